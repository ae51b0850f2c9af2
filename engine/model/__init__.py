"""One decoder, model families as flags; weights."""
