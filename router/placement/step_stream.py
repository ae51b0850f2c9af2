"""The receiving side of the stream of steps: one connection brings the tokens of all attempts on
one worker, a message for each of its steps (`StepsHello` in worker.proto)."""

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from core.errors import UnavailableError
from rpc import worker_pb2
from rpc.cluster_token import cluster_token
from rpc.frames import connect

logger = logging.getLogger(__name__)

_AGAIN_S = 1.0
# Messages that one reader takes before others have their turn.
_FAIR_TURN = 16
# Numbers of attempts fit into 32 bits; so many are never open at once.
_NUMBERS = 1 << 31
# How long readers are woken in one turn of the event loop, and turns for others behind it:
# grpc.aio takes one event a turn from its threads when it has many, and first tokens are among
# them.
_WAKE_S = 0.0005
_TURNS_BETWEEN = 8


# What comes for an attempt: a token and its position in the output, or more than that.
Item = tuple[int, int] | worker_pb2.Tokens


class Inbox:
    """What has come for one attempt and was not taken yet: bounded by the attempt's max_tokens.
    One reader."""

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._error: BaseException | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._direct: Callable[[Item], bool] | None = None  # while the reader waits
        self._num_at_once = 0  # taken since the reader last had to wait
        self._is_due = False  # somebody is about to call `wake`

    def put(self, item: Item) -> None:
        self._items.append(item)
        self.wake()

    def put_quietly(self, item: Item) -> bool:
        """As `put`, but the caller has to call `wake`, unless this returns False."""
        self._items.append(item)
        was_due, self._is_due = self._is_due, True
        return not was_due

    def fail(self, error: BaseException) -> None:
        """No more will come. The reader gets what has, and then this error."""
        if self._error is None:
            self._error = error
        self.wake()

    async def take(self, direct: Callable[[Item], bool] | None = None) -> Item:
        """The next item that `direct` does not take: those that come while this waits are offered
        to it, when it is the reader's turn. Raises what `direct` raises."""
        while not self._items:
            if self._error is not None:
                raise self._error
            self._num_at_once = 0
            self._direct = direct
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._direct = None
        self._num_at_once += 1
        if self._num_at_once % _FAIR_TURN == 0:
            await asyncio.sleep(0)
        return self._items.popleft()

    def wake(self) -> None:
        """It is the reader's turn."""
        self._is_due = False
        if self._waiter is None or self._waiter.done():
            return
        if self._direct is not None:
            try:
                while self._items and self._direct(self._items[0]):
                    self._items.popleft()
            except Exception as error:
                self._waiter.set_exception(error)
                return
            if not self._items and self._error is None:
                return
            self._direct = None
        self._waiter.set_result(None)


class StepReader:
    """Follows one worker's steps as long as `follow` runs. `stream_id` names the stream while it
    is open, else it is ""; attempts whose tokens come here then have them on their own calls.

    The readers of a step are woken for a while, and in between further steps are read. So a
    router that does not keep up finds several tokens for a reader when its turn comes, which cost
    little more than one, since they go out in one write.
    """

    def __init__(self, worker_id: str, incarnation: str) -> None:
        self.stream_id = ""
        self._worker_id = worker_id
        self._incarnation = incarnation
        self._inboxes: dict[str, Inbox] = {}
        self._by_number: dict[int, Inbox] = {}
        self._numbers = count(1)
        self._due: deque[Inbox] = deque()  # to be woken

    @contextmanager
    def receiving(self, request_id: str, inbox: Inbox) -> Iterator[int]:
        """Tokens of this attempt go to `inbox` while the body runs; if the stream breaks, so does
        the inbox, with UnavailableError. Yields the number by which the worker may call it."""
        number = next(self._numbers) % _NUMBERS + 1
        self._inboxes[request_id] = self._by_number[number] = inbox
        try:
            yield number
        finally:
            self._inboxes.pop(request_id, None)
            self._by_number.pop(number, None)

    async def follow(self, address: str) -> None:
        """Keeps the connection, and makes it again when it breaks."""
        failures = 0
        while True:
            try:
                reason = await self._follow_once(address)
            except (OSError, TimeoutError) as error:
                reason = str(error) or "nobody answers"
            failures = 1 if self.stream_id else failures + 1
            self.stream_id = ""
            reason = f"{self._worker_id}: the stream of tokens has broken: {reason}"
            if failures == 1:
                logger.warning("%s", reason)
            self._break(reason)
            await asyncio.sleep(_AGAIN_S)

    async def _follow_once(self, address: str) -> str:
        """Until it breaks. Why it did."""
        refusals: list[str] = []
        stream_id = uuid.uuid4().hex

        def receive(frame: bytes) -> None:
            message = worker_pb2.StepTokens.FromString(frame)
            if message.refusal:
                refusals.append(message.refusal)
                return
            self.stream_id = stream_id
            self._receive(message)

        connection = await connect(address, receive)
        try:
            hello = worker_pb2.StepsHello(
                stream_id=stream_id, incarnation=self._incarnation, cluster_token=cluster_token()
            )
            connection.send(hello.SerializeToString())
            reason = await connection.ended
        finally:
            connection.abort("the router has left")
            await connection.ended
        return refusals[0] if refusals else reason

    def _receive(self, message: worker_pb2.StepTokens) -> None:
        is_waking = bool(self._due)
        columns = message.step_numbers, message.indexes, message.token_ids
        for number, index, token_id in zip(*columns, strict=True):
            self._put(self._by_number.get(number), (index, token_id))
        for sequence in message.sequences:
            self._put(self._inboxes.get(sequence.request_id), sequence.tokens)
        if not is_waking:
            self._wake_some()

    def _put(self, inbox: Inbox | None, item: Item) -> None:
        """No inbox: the attempt has ended, and its worker is about to hear of it."""
        if inbox is not None and inbox.put_quietly(item):
            self._due.append(inbox)

    def _wake_some(self, turns_before: int = 0) -> None:
        loop = asyncio.get_running_loop()
        if turns_before:
            loop.call_soon(self._wake_some, turns_before - 1)
            return
        until = time.monotonic() + _WAKE_S
        while self._due:
            self._due.popleft().wake()
            if time.monotonic() > until:
                break
        if self._due:
            loop.call_soon(self._wake_some, _TURNS_BETWEEN)

    def _break(self, reason: str) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        self._by_number.clear()
        for inbox in inboxes.values():
            inbox.fail(UnavailableError(reason))
