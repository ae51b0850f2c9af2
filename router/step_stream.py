"""The receiving side of `DecodeService.Steps`: one stream brings the tokens of all attempts on one
worker, a message for each of its steps."""

import asyncio
import logging
import uuid
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from core.errors import UnavailableError
from rpc import worker_pb2

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
# Messages that one reader takes before others have their turn.
_FAIR_TURN = 16


class Inbox:
    """What has come for one attempt and was not taken yet: bounded by the attempt's max_tokens.
    One reader."""

    def __init__(self) -> None:
        self._items: deque[worker_pb2.Tokens] = deque()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._num_at_once = 0  # taken since the reader last had to wait

    def put(self, tokens: worker_pb2.Tokens) -> None:
        self._items.append(tokens)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """No more will come. The reader gets what has, and then this error."""
        if self._error is None:
            self._error = error
        self._wake()

    async def take(self) -> worker_pb2.Tokens:
        while not self._items:
            if self._error is not None:
                raise self._error
            self._num_at_once = 0
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._num_at_once += 1
        if self._num_at_once % _FAIR_TURN == 0:
            await asyncio.sleep(0)
        return self._items.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StepReader:
    """Follows one worker's steps as long as `follow` runs. `stream_id` names the stream while it
    is open, else it is ""; attempts whose tokens come here then have them on their own calls."""

    def __init__(self, worker_id: str, incarnation: str) -> None:
        self.stream_id = ""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._inboxes: dict[str, Inbox] = {}

    @contextmanager
    def receiving(self, request_id: str, inbox: Inbox) -> Iterator[None]:
        """Tokens of this attempt go to `inbox` while the body runs; if the stream breaks, so does
        the inbox, with UnavailableError."""
        self._inboxes[request_id] = inbox
        try:
            yield
        finally:
            self._inboxes.pop(request_id, None)

    async def follow(self, stub: Any) -> None:
        """Opens the stream, again when it breaks. Returns if the worker has none to offer."""
        while True:
            try:
                await self._read(stub)
                reason = "it ended"
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return
                reason = error.details() or error.code().name
            finally:
                self.stream_id = ""
            self._break(f"{self._worker_id}: the stream of tokens has broken: {reason}")
            await asyncio.sleep(_AGAIN_S)

    async def _read(self, stub: Any) -> None:
        stream_id = uuid.uuid4().hex
        request = worker_pb2.StepsRequest(stream_id=stream_id, incarnation=self._incarnation)
        call = stub.Steps(request)
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                self.stream_id = stream_id
                for sequence in message.sequences:
                    # Unknown: its attempt has ended, and its worker is about to hear of it.
                    inbox = self._inboxes.get(sequence.request_id)
                    if inbox is not None:
                        inbox.put(sequence.tokens)
        finally:
            call.cancel()

    def _break(self, reason: str) -> None:
        if self._inboxes:
            logger.warning("%s", reason)
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.fail(UnavailableError(reason))
