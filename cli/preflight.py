"""What can be known to be wrong before anything is started."""

import errno
import socket
from contextlib import ExitStack

from cli.state import running_deployments
from core.config import Config
from core.errors import ConfigError, UnavailableError


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" -> (host, port); an IPv6 host may stand in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def client_address(address: str) -> str:
    """Where a client on this machine reaches a server that is bound to `address`."""
    host, port = split_address(address)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "*": "127.0.0.1"}.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def claim_addresses(config: Config) -> dict[str, str]:
    """Checks that the router can bind both of its addresses, together. Returns them by their
    key, "router.http" and "router.grpc", with a port of 0 replaced by a free one.
    Raises UnavailableError that says which is taken and what to do."""
    claimed = {}
    with ExitStack() as bound:
        for key, address in (
            ("router.http", config.router.http),
            ("router.grpc", config.router.grpc),
        ):
            host, _ = split_address(address)
            server = bound.enter_context(_bind(key, address))
            port = server.getsockname()[1]
            claimed[key] = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return claimed


def _bind(key: str, address: str) -> socket.socket:
    host, port = split_address(address)
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"{key}: cannot find the host of {address}: {error.strerror}") from error
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        # As servers do: a port whose last connections still linger is free. One that is listened
        # to is not.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(target)
        server.listen(1)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise UnavailableError(_port_in_use(key, address)) from error
        raise UnavailableError(f"{key}: cannot bind {address}: {error.strerror}") from error
    return server


def _port_in_use(key: str, address: str) -> str:
    owner = next((d for d in running_deployments() if d.http == address), None)
    if owner is not None:
        return (
            f"{address} is in use by another `pdserve up` (pid {owner.pid}); `pdserve down` ends it"
        )
    host, port = address.rpartition(":")[::2]
    return (
        f"port {port} on {host} is in use ({key}); "
        f"choose another with --set {key}={host}:{int(port) + 10}"
    )
