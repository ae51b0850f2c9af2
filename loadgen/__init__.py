"""The load generator: what `pdserve bench` and `pdserve compare` send, measure and say."""
