"""gRPC contracts: stubs generated from `proto/` (`make proto`), and their mapping to core types."""
