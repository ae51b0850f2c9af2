"""What prefill and decode workers have in common: one engine in one process, seen from outside."""
