"""One model on one worker. Knows torch; knows nothing of Ray, gRPC or KV transports."""
