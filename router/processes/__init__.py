"""Several router processes on the same ports, and what they count together."""
