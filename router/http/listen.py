"""Sockets that the router listens on."""

import socket
from pathlib import Path

from core.errors import ConfigError


def listen_locally(path: Path) -> socket.socket:
    """A Unix socket, in the place of one that an earlier process has left."""
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    listener.setblocking(False)
    return listener


def _bound(family: socket.AddressFamily, address: tuple[str, int]) -> socket.socket:
    """Shares its port with others of its kind. Raises OSError."""
    listener = socket.socket(family)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError:
        listener.close()
        raise
    return listener


def listen(address: str, reuse_port: bool) -> socket.socket:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if reuse_port:  # listening begins with serving: until then others get all connections
            listener = _bound(family, (host, int(port)))
        else:
            listener = socket.create_server((host, int(port)), family=family, backlog=2048)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"router.http: cannot listen on {address}: {reason}") from None
    listener.setblocking(False)
    return listener
