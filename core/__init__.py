"""The vocabulary that every pdserve process shares. Imports neither torch nor ray nor grpc."""
