"""gRPC servers and channels with one set of options, so that both ends agree.

Keepalive: a prefill may be silent for a minute; a client pings every 10 s and a server allows
one every 5 s, so that no ping is answered with GOAWAY too_many_pings, and a dead host is
noticed within 15 s. Messages are small by design: KV travels in pieces of at most 1 MiB.
"""

from collections.abc import Sequence
from typing import Any

import grpc

from rpc.cluster_token import TokenChannel, TokenInterceptor, cluster_token
from rpc.tls import (
    INTERNAL_NAME,
    TlsFiles,
    channel_credentials,
    internal_tls,
    server_credentials,
)

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
_COMMON = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Without it a peer whose process is stopped, and whose kernel still answers, is noticed only
    # after a minute: gRPC waits that long for the answer to a ping that was delivered.
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
]
_SERVER = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.http2.max_ping_strikes", 0),
    # Without it two servers could share a port silently, each getting half of the calls.
    ("grpc.so_reuseport", 0),
]
_CLIENT = [
    *_COMMON,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Retries belong to the caller: a retried Prefill would be a second attempt under one id.
    ("grpc.enable_retries", 0),
    # A channel of its own for each worker connection, never a shared global one.
    ("grpc.use_local_subchannel_pool", 1),
]


def make_server() -> grpc.aio.Server:
    """A server for other parts of this deployment. Checks the cluster token, if there is one."""
    token = cluster_token()
    checks = [TokenInterceptor(token)] if token else []
    return grpc.aio.server(interceptors=checks, options=_SERVER)


def make_public_server(
    interceptors: Sequence[grpc.aio.ServerInterceptor], reuse_port: bool = False
) -> grpc.aio.Server:
    """A server for clients. `reuse_port`: other processes of this deployment have the same port,
    and the kernel gives each of them a part of the connections."""
    options = dict(_SERVER)
    options["grpc.so_reuseport"] = int(reuse_port)
    return grpc.aio.server(interceptors=interceptors, options=list(options.items()))


def bind(server: grpc.aio.Server, address: str) -> int:
    """The port on which a server for other parts of this deployment listens: with TLS, if this
    process has certificates. Raises RuntimeError if the address is taken."""
    files = internal_tls()
    if files is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(files)))


def bind_public(server: grpc.aio.Server, address: str, files: TlsFiles | None) -> int:
    """As `bind`, for clients. `files`: None for plain connections."""
    if files is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, server_credentials(files)))


def make_channel(address: str, token: str | None = None, tls: TlsFiles | None = None) -> Any:
    """A grpc.aio.Channel to another part of this deployment. Sends the cluster token, and shows
    the certificate: this process's own ones, unless others are given."""
    token = cluster_token() if token is None else token
    files = tls if tls is not None else internal_tls()
    if files is None:
        channel = grpc.aio.insecure_channel(address, options=_CLIENT)
    else:
        options = [*_CLIENT, ("grpc.ssl_target_name_override", INTERNAL_NAME)]
        channel = grpc.aio.secure_channel(address, channel_credentials(files), options=options)
    return TokenChannel(channel, token) if token else channel
