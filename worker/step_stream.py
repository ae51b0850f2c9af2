"""The sending side of the stream of steps: tokens of many requests in one message a step, on a
connection that each router keeps to each of its workers (`StepsHello` in worker.proto)."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from core.errors import PdserveError, RequestError, UnavailableError
from rpc import worker_pb2 as pb
from rpc.cluster_token import cluster_token, is_right
from rpc.frames import MAX_HELLO_BYTES, FrameConnection, listen

logger = logging.getLogger(__name__)

_MAX_SEQUENCES, _MAX_BYTES = 1024, 1 << 20  # in one message; or one sequence that is longer
_HELLO_S = 10.0
_MAX_CONNECTIONS = 256


class StepStream:
    """What one router has not been sent yet, in order. It goes out when the event loop has done
    what it is doing, so that a step's tokens go together; while the router takes nothing it stays
    here, bounded by what the router's requests may say."""

    def __init__(self, connection: FrameConnection) -> None:
        self.is_open = True
        self._connection = connection
        self._columns: list[tuple[int, int, int]] = []  # they go before those that wait
        self._waiting: deque[pb.SequenceTokens] = deque()
        self._is_due = False  # `flush` will be called

    def put(self, request_id: str, tokens: pb.Tokens) -> None:
        """Raises UnavailableError if the router has ended the stream."""
        if not self.is_open:
            raise UnavailableError("the stream of tokens to the router has broken")
        self._waiting.append(pb.SequenceTokens(request_id=request_id, tokens=tokens))
        self._flush_soon()

    def put_token(self, request_id: str, step_number: int, index: int, token_id: int) -> None:
        """One token with nothing else to tell. Raises as `put`."""
        if self._waiting or not self.is_open:
            tokens = pb.Tokens(first_index=index, tokens=[pb.Token(id=token_id)])
            self.put(request_id, tokens)
            return
        self._columns.append((step_number, index, token_id))
        self._flush_soon()

    def _flush_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Sends what the router takes now."""
        self._is_due = False
        while (self._columns or self._waiting) and self._connection.is_free:
            self._connection.send(self._next().SerializeToString())

    def _next(self) -> pb.StepTokens:
        message = pb.StepTokens()
        columns, self._columns = self._columns[:_MAX_SEQUENCES], self._columns[_MAX_SEQUENCES:]
        if columns:
            numbers, indexes, token_ids = zip(*columns, strict=True)
            message = pb.StepTokens(step_numbers=numbers, indexes=indexes, token_ids=token_ids)
        if not self._columns:
            num_bytes = 0
            while self._waiting and len(message.sequences) < _MAX_SEQUENCES:
                num_bytes += self._waiting[0].ByteSize()
                if message.sequences and num_bytes > _MAX_BYTES:
                    break
                message.sequences.append(self._waiting.popleft())
        return message


class StepStreams:
    """The open streams of one worker, by the id that their router gave them."""

    def __init__(self, check_incarnation: Callable[[str], None]) -> None:
        """`check_incarnation` raises a PdserveError for one that is not this worker's."""
        self._check_incarnation = check_incarnation
        self._open: dict[str, StepStream] = {}
        self._connections: dict[FrameConnection, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None

    def get(self, stream_id: str) -> StepStream | None:
        return self._open.get(stream_id)

    async def listen(self, host: str) -> str:
        """Its address, on a free port of `host`."""
        self._server, address = await listen(host, self._connect)
        return address

    async def close(self) -> None:
        """After the calls that use it. Idempotent."""
        if self._server is not None:
            self._server.close()
        for connection in self._connections:
            connection.abort("the worker stops")
        await asyncio.gather(*self._connections.values())

    def _connect(self) -> FrameConnection:
        hello: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        # Nothing is expected behind it: a second one ends the connection.
        connection = FrameConnection(hello.set_result, max_bytes=MAX_HELLO_BYTES)
        task = asyncio.create_task(self._serve(connection, hello), name="a router's steps")
        self._connections[connection] = task
        task.add_done_callback(lambda _: self._connections.pop(connection))
        return connection

    async def _serve(self, connection: FrameConnection, hello: asyncio.Future[bytes]) -> None:
        """Until the router leaves."""
        if len(self._connections) > _MAX_CONNECTIONS:
            connection.abort(f"{_MAX_CONNECTIONS} others are there already")
            await connection.ended
            return
        either: set[asyncio.Future[Any]] = {hello, connection.ended}
        await asyncio.wait(either, timeout=_HELLO_S, return_when=asyncio.FIRST_COMPLETED)
        if not hello.done():
            connection.abort("no hello came")
            await connection.ended
            return
        try:
            stream_id = self._admit(hello.result())
        except PdserveError as error:
            logger.warning("a stream of steps is refused: %s", error.message)
            connection.send(pb.StepTokens(refusal=error.message).SerializeToString())
            connection.close()
            await connection.ended
            return
        stream = self._open[stream_id] = StepStream(connection)
        connection.on_free = stream.flush
        connection.send(pb.StepTokens().SerializeToString())
        await connection.ended
        stream.is_open = False
        del self._open[stream_id]

    def _admit(self, hello: bytes) -> str:
        """The stream's id. Raises a PdserveError."""
        try:
            message = pb.StepsHello.FromString(hello)
        except DecodeError:
            raise RequestError("this is no StepsHello") from None
        if (token := cluster_token()) and not is_right(message.cluster_token, token):
            raise RequestError("wrong or missing cluster token")
        self._check_incarnation(message.incarnation)
        if not message.stream_id or message.stream_id in self._open:
            raise RequestError("the stream needs an id that no other one has")
        return message.stream_id
