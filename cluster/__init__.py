"""The control plane: which workers exist, where they run, who replaces them. The only importer
of ray; nothing on the path of a request passes through here."""
