"""Leases: how long a prefill worker keeps the blocks of an attempt for a decode worker.

One lease per attempt. It is opened by the prefill request or, when that is still on its way, by
the decode worker that attaches first.

    EXPECTED   attached, the prefill request has not come yet     ends: time
    COMPUTING  the prefill is queued or running                    ends: failure, detach
    COMMITTED  all blocks final and pinned                ends: release, failure, detach, time
    RELEASED   the decode worker has everything         terminal
    FINISHED   the first token was the last             terminal, nothing to hand over
    FAILED     aborted, expired, or its peer left       terminal, `error` says why

    state      event         -> state      the blocks
    (none)     open             COMPUTING  engine allocates
    (none)     attach           EXPECTED   none
    EXPECTED   open             COMPUTING  engine allocates
    EXPECTED   time, detach     FAILED     none
    COMPUTING  attach           COMPUTING  -
    COMPUTING  commit           COMMITTED  pinned
    COMPUTING  finish           FINISHED   freed by the engine
    COMPUTING  fail, detach     FAILED     unpinned
    COMMITTED  attach           COMMITTED  pinned as long as the stream lives
    COMMITTED  release          RELEASED   unpinned, the answer is "pinned without a gap"
    COMMITTED  fail, detach     FAILED     unpinned
    COMMITTED  time             FAILED     unpinned, but only while nobody is attached
    terminal   release          same       the answer is "not pinned"
    terminal   any other        same       -

Blocks are unpinned exactly once, by the one call of `unpin` that every path to RELEASED or FAILED
makes. An attempt has one life: its id is remembered after its end and refused for a while.
The table does no I/O and reads time from the clock that it is given; the worker calls `sweep`
from a timer that runs when nothing else does.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from enum import StrEnum

from core.errors import DeadlineError, HandoverError, PdserveError, RequestError
from core.types import FinishReason, TokenLogprobs

_REMEMBERED = 8192


class LeaseState(StrEnum):
    EXPECTED = "expected"
    COMPUTING = "computing"
    COMMITTED = "committed"
    RELEASED = "released"
    FINISHED = "finished"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        return self in (LeaseState.RELEASED, LeaseState.FINISHED, LeaseState.FAILED)


class Lease:
    """What one decode worker may know about one prefill. `changed` wakes the Attach stream, which
    clears it; `ended` is set once, for the prefill's side."""

    def __init__(self, request_id: str, state: LeaseState, now: float) -> None:
        self.request_id = request_id
        self.state = state
        self.since = now  # when it last lost or never had somebody attached
        self.is_attached = False
        self.was_attached = False
        self.token_digest = b""
        self.num_tokens = 0
        self.block_ids: list[int] | None = None
        self.num_ready_blocks = 0
        self.first_token: int | None = None
        self.first_logprobs: TokenLogprobs | None = None
        self.finish_reason: FinishReason | None = None
        self.error: PdserveError | None = None
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()


class LeaseTable:
    """All leases of one prefill worker.

    `unpin(request_id, error)` frees whatever the engine holds for an attempt, in whatever state it
    is; it is called exactly once for every attempt that was opened and did not finish by itself.
    `error` says why an attempt failed and is None after a release.
    """

    def __init__(
        self,
        *,
        lease_seconds: float,
        clock: Callable[[], float],
        unpin: Callable[[str, PdserveError | None], None],
    ) -> None:
        self._lease_seconds = lease_seconds
        self._clock = clock
        self._unpin = unpin
        self._leases: dict[str, Lease] = {}
        self._ended: OrderedDict[str, Lease] = OrderedDict()

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, request_id: str) -> Lease | None:
        return self._leases.get(request_id) or self._ended.get(request_id)

    # ------------------------------------------------------------ the prefill's side

    def open(self, request_id: str, token_digest: bytes, num_tokens: int) -> Lease:
        """The prefill request has come. Raises RequestError if the id was used before."""
        lease = self.get(request_id)
        if lease is None:
            lease = Lease(request_id, LeaseState.COMPUTING, self._clock())
            self._leases[request_id] = lease
        elif lease.state is not LeaseState.EXPECTED:
            raise RequestError(f"attempt {request_id} was used before", param="request_id")
        elif lease.token_digest != token_digest:
            error = HandoverError(f"attempt {request_id} was attached for other tokens")
            self._fail(lease, error)
            raise error
        lease.state = LeaseState.COMPUTING
        lease.token_digest = token_digest
        lease.num_tokens = num_tokens
        lease.changed.set()
        return lease

    def admitted(self, request_id: str, block_ids: list[int]) -> None:
        if lease := self._computing(request_id):
            lease.block_ids = block_ids
            lease.changed.set()

    def ready(self, request_id: str, num_ready_blocks: int) -> None:
        """Blocks up to `num_ready_blocks` are final."""
        if lease := self._computing(request_id):
            lease.num_ready_blocks = num_ready_blocks
            lease.changed.set()

    def commit(
        self, request_id: str, first_token: int, first_logprobs: TokenLogprobs | None
    ) -> None:
        """All blocks are final and pinned."""
        if lease := self._computing(request_id):
            lease.state = LeaseState.COMMITTED
            lease.since = self._clock()
            lease.first_token = first_token
            lease.first_logprobs = first_logprobs
            lease.changed.set()

    def finish(self, request_id: str, reason: FinishReason) -> None:
        """The first token ended the sequence; the engine has freed it already."""
        if lease := self._computing(request_id):
            lease.finish_reason = reason
            self._end(lease, LeaseState.FINISHED)

    def fail(self, request_id: str, error: PdserveError) -> None:
        """The prefill failed, or its caller does not want the attempt any more."""
        if lease := self._leases.get(request_id):
            self._fail(lease, error)

    # ------------------------------------------------------------ the decode worker's side

    def attach(self, request_id: str, token_digest: bytes) -> Lease:
        """Takes the lease; one decode worker per attempt. Raises HandoverError."""
        lease = self.get(request_id)
        if lease is None:
            lease = Lease(request_id, LeaseState.EXPECTED, self._clock())
            lease.token_digest = token_digest
            self._leases[request_id] = lease
        elif lease.was_attached:
            raise HandoverError(f"attempt {request_id} was attached before")
        elif lease.state is LeaseState.FAILED:
            assert lease.error is not None
            raise HandoverError(f"attempt {request_id} has ended: {lease.error.message}")
        elif lease.state is LeaseState.RELEASED:
            raise HandoverError(f"attempt {request_id} was released before")
        elif lease.token_digest != token_digest:
            raise HandoverError(f"attempt {request_id} is for other tokens")
        lease.is_attached = lease.was_attached = True
        return lease

    def detach(self, lease: Lease) -> None:
        """The Attach stream has ended, for whatever reason. Idempotent."""
        lease.is_attached = False
        if not lease.state.is_terminal:
            self._fail(lease, HandoverError("the decode worker left before it had everything"))

    def release(self, request_id: str) -> bool:
        """The fence: whether all blocks were pinned from the commit until now. Unpins them."""
        lease = self._leases.get(request_id)
        if lease is None or lease.state is not LeaseState.COMMITTED:
            return False
        self._end(lease, LeaseState.RELEASED)
        self._unpin(request_id, None)
        return True

    # ------------------------------------------------------------ time and ends

    def sweep(self) -> None:
        """Ends every lease that nobody holds any more. Looks at all: order proves nothing."""
        horizon = self._clock() - self._lease_seconds
        for lease in list(self._leases.values()):
            if lease.since > horizon:
                continue
            if lease.state is LeaseState.EXPECTED:
                self._fail(lease, DeadlineError("the prefill request never came"))
            elif lease.state is LeaseState.COMMITTED and not lease.is_attached:
                self._fail(lease, HandoverError("the lease ran out before anyone attached"))

    def fail_all(self, error: PdserveError) -> None:
        for lease in list(self._leases.values()):
            self._fail(lease, error)

    def _computing(self, request_id: str) -> Lease | None:
        lease = self._leases.get(request_id)
        return lease if lease is not None and lease.state is LeaseState.COMPUTING else None

    def _fail(self, lease: Lease, error: PdserveError) -> None:
        was_opened = lease.state is not LeaseState.EXPECTED
        lease.error = error
        self._end(lease, LeaseState.FAILED)
        if was_opened:
            self._unpin(lease.request_id, error)

    def _end(self, lease: Lease, state: LeaseState) -> None:
        lease.state = state
        lease.block_ids = None
        lease.changed.set()
        lease.ended.set()
        del self._leases[lease.request_id]
        self._ended[lease.request_id] = lease
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
