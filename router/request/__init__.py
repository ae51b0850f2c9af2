"""The life of a request: its sequences, their attempts, its timeline and measures."""
