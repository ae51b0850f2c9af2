"""A TCP proxy in front of a worker's gRPC port, with faults on demand."""

import asyncio
from collections.abc import Callable


class FaultyProxy:
    """Forwards bytes between clients and `target` (host:port). Faults act on what the target
    sends; `break_after(n, fault)` waits until it has sent n more bytes.

    A broken connection is closed on both sides; new ones are accepted, so that the network has
    healed at once. `stall` keeps everything open and forwards nothing until `resume`."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = host, int(port)
        self.address = ""
        self.delay_s = 0.0
        self.num_connections = 0
        self._running = asyncio.Event()
        self._running.set()
        self._left: int | None = None
        self._fault: Callable[[bytes], bytes | None] = lambda data: None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> "FaultyProxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()
        self.address = f"{host}:{port}"
        return self

    def break_after(self, num_bytes: int, fault: str = "close") -> None:
        """close: cuts inside what is sent. drop, duplicate, flip: does that to one piece of the
        stream, which garbles it from there on."""
        self._left = num_bytes
        self._fault = {
            "close": lambda data: None,
            "drop": lambda data: b"",
            "duplicate": lambda data: data + data,
            "flip": lambda data: data[:-1] + bytes([data[-1] ^ 0x10]),
        }[fault]

    def cut(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def stall(self) -> None:
        self._running.clear()

    def resume(self) -> None:
        self._running.set()

    async def close(self) -> None:
        self._server.close()
        self.resume()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            upstream, sink = await asyncio.open_connection(*self._target)
        except OSError:
            writer.transport.abort()
            return
        both = {writer, sink}
        self._writers |= both
        pumps = [
            asyncio.create_task(self._pump(reader, sink, is_faulty=False)),
            asyncio.create_task(self._pump(upstream, writer, is_faulty=True)),
        ]
        self._tasks |= set(pumps)
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        self._writers -= both
        for one in both:
            one.transport.abort()
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        self._tasks -= set(pumps)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_faulty: bool
    ) -> None:
        try:
            while data := await reader.read(4096):
                await self._running.wait()
                if is_faulty:
                    await asyncio.sleep(self.delay_s)
                    changed = self._disturbed(data)
                    if changed is None:
                        return
                    data = changed
                writer.write(data)
                await writer.drain()
        except OSError:
            return

    def _disturbed(self, data: bytes) -> bytes | None:
        if self._left is None:
            return data
        self._left -= len(data)
        if self._left >= 0:
            return data
        self._left = None
        return self._fault(data)
