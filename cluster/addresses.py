"""Addresses of the controller's service, as they are on one node and seen from others."""

from ipaddress import ip_address


def host_on(node: str, host: str) -> str:
    """What to bind on another node instead of `host`, which was meant for the first one."""
    return host if _is_wildcard(host) else node


def reached_at(address: str, node: str) -> str:
    """Where other machines reach a server that is bound to `address` on the machine `node`; "" if
    they do not."""
    host, _, port = address.rpartition(":")
    if _is_wildcard(host):
        return f"{node}:{port}"
    return "" if host != node and _is_loopback(host) else address


def _is_wildcard(host: str) -> bool:
    try:
        return host == "*" or ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        return False


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
