"""Ports for servers that are started by a command line and so must be told theirs."""

import random
import socket


def free_port() -> int:
    """Below those that the kernel hands out by itself: between this call and the moment the server
    listens, which may be seconds, nobody is given it by chance."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
