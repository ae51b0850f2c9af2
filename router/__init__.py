"""The front door: HTTP and gRPC in, token ids to the workers. Imports neither torch nor ray."""
