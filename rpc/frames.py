"""Messages one way on a TCP connection of its own, for what comes with each step of an engine.

gRPC hands a message from thread to thread, three on each side, each woken on a core that computes:
that costs more than all else that happens to a step's tokens. Here the event loop that has a
message writes it, and the one that waits for it reads it.

A frame is four bytes of length, big-endian, and a protobuf message. Whoever connects says with one
frame who it is, the cluster token included, and from then on only the other side speaks. As with
gRPC: TLS where this process has certificates, frames of at most MAX_MESSAGE_BYTES, and an end to a
connection whose host is gone.
"""

import asyncio
import logging
import socket
import struct
from collections.abc import Callable

from rpc.channel import MAX_MESSAGE_BYTES
from rpc.tls import INTERNAL_NAME, client_context, internal_tls, server_context

logger = logging.getLogger(__name__)

MAX_HELLO_BYTES = 4096
_LENGTH = struct.Struct("!I")
_CONNECT_S = 5.0
_DEAD_S = 15  # a host that says nothing for so long is gone


class FrameConnection(asyncio.Protocol):
    """One end. `on_frame` gets each message as it comes, and must not block; if it raises, the
    connection ends. `on_free` is called when the other side takes something again. `ended` is why,
    when it is over."""

    def __init__(
        self,
        on_frame: Callable[[bytes], object],
        max_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Needs a running loop. `max_bytes`: of a message that comes."""
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.is_free = False  # whether what is sent does not pile up here
        self.on_free: Callable[[], object] = lambda: None
        self._on_frame = on_frame
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._rest = bytearray()
        self._reason = ""

    def send(self, message: bytes) -> None:
        """Nothing happens if the connection has ended."""
        if self._transport is not None:
            self._transport.write(_LENGTH.pack(len(message)) + message)

    def close(self) -> None:
        """After what was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """At once, for `reason`."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()
        else:
            self.connection_lost(None)

    # ------------------------------------------------------------ asyncio's side

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        if self.ended.done():  # aborted while it was made
            transport.abort()
            return
        self._transport = transport
        self.is_free = True
        _notice_dead_hosts(transport.get_extra_info("socket"))

    def data_received(self, data: bytes | bytearray) -> None:
        if self._rest:
            self._rest += data
            data = self._rest
        at = 0
        try:
            while len(data) - at >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(data, at)
                if length > self._max_bytes:
                    raise ValueError(f"a message of {length} bytes; at most {self._max_bytes}")
                end = at + _LENGTH.size + length
                if end > len(data):
                    break
                self._on_frame(bytes(data[at + _LENGTH.size : end]))
                at = end
        except Exception as error:
            logger.warning("a connection ends for what came on it: %s", error)
            self.abort(str(error))
            return
        if at or data is not self._rest:
            self._rest = bytearray(data[at:])

    def pause_writing(self) -> None:
        self.is_free = False

    def resume_writing(self) -> None:
        self.is_free = True
        self.on_free()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.is_free = False
        if not self.ended.done():
            self.ended.set_result(self._reason or str(error or "it ended"))


async def listen(
    host: str, make_connection: Callable[[], FrameConnection]
) -> tuple[asyncio.Server, str]:
    """Serves on a free port of `host` from now on; `make_connection` makes this side's end of
    each. With its address, host:port."""
    files = internal_tls()
    server = await asyncio.get_running_loop().create_server(
        make_connection,
        sock=socket.create_server((host, 0)),
        ssl=server_context(files) if files is not None else None,
        ssl_handshake_timeout=_CONNECT_S if files is not None else None,
    )
    return server, f"{host}:{server.sockets[0].getsockname()[1]}"


async def connect(address: str, on_frame: Callable[[bytes], None]) -> FrameConnection:
    """To what `listen` has said. Raises OSError, TimeoutError if nobody answers."""
    files = internal_tls()
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(_CONNECT_S):
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: FrameConnection(on_frame),
            host,
            int(port),
            ssl=client_context(files) if files is not None else None,
            server_hostname=INTERNAL_NAME if files is not None else None,
        )
    return connection


def _notice_dead_hosts(sock: socket.socket) -> None:
    """Where the system can: by probes while nothing is sent, else by what is not acknowledged."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _DEAD_S - 5),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 5),
        ("TCP_USER_TIMEOUT", 1000 * _DEAD_S),
    ):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
