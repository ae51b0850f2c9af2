"""HTTP itself: the server, bodies under limits, responses that end with their client, errors."""
