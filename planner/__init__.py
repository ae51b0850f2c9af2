"""Chooses pools for a trace by simulating them. Imports no torch: the engine's scheduler and the
router's policy decide, a performance model says how long a step takes."""
