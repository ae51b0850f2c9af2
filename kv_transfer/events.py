"""What a prefill worker announces about one attempt, and in which order."""

from dataclasses import dataclass

from core.errors import HandoverError
from core.types import FinishReason, TokenLogprobs
from kv_transfer.lease import Lease, LeaseState


@dataclass(frozen=True, slots=True)
class Admitted:
    """The prefill has its blocks and will run. Sent once, first."""

    block_ids: tuple[int, ...]  # P's block of every position, the partial last one included
    block_size: int  # tokens in each


@dataclass(frozen=True, slots=True)
class Ready:
    """The blocks at positions [0, num_blocks) are final."""

    num_blocks: int


@dataclass(frozen=True, slots=True)
class Commit:
    """Everything is computed. Comes after the Ready of all blocks."""

    num_tokens: int
    token_digest: bytes
    # None at all, or one for each copy of the plan (`kv_transfer.layout`), by destination rank.
    checksums: tuple[int, ...]
    first_token: int
    first_logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """The first token was the last: there is nothing to hand over."""

    reason: FinishReason | None


Event = Admitted | Ready | Commit | Finished


class EventFeed:
    """A lease told as events: `next` until it returns None, then again after `lease.changed`.
    Readiness that grew several times is one event. The commit has no checksums: these are of what
    one decode worker takes. Ends (`is_over`) when the lease was released or finished."""

    def __init__(self, lease: Lease, block_size: int) -> None:
        self._lease = lease
        self._block_size = block_size
        self._is_admitted_sent = False
        self._num_ready_sent = 0
        self._is_commit_sent = False
        self.is_over = False

    def next(self) -> Event | None:
        """Raises what made the lease fail."""
        lease = self._lease
        if lease.state is LeaseState.FAILED:
            raise lease.error or HandoverError("the prefill failed")
        if self.is_over:
            return None
        if lease.state is LeaseState.FINISHED:
            self.is_over = True
            return Finished(lease.finish_reason)
        if lease.state is LeaseState.RELEASED:
            self.is_over = True
            return None
        if lease.block_ids is not None and not self._is_admitted_sent:
            self._is_admitted_sent = True
            return Admitted(tuple(lease.block_ids), self._block_size)
        if lease.num_ready_blocks > self._num_ready_sent:
            self._num_ready_sent = lease.num_ready_blocks
            return Ready(lease.num_ready_blocks)
        if lease.state is LeaseState.COMMITTED and not self._is_commit_sent:
            assert lease.first_token is not None
            self._is_commit_sent = True
            return Commit(
                num_tokens=lease.num_tokens,
                token_digest=lease.token_digest,
                checksums=(),
                first_token=lease.first_token,
                first_logprobs=lease.first_logprobs,
            )
        return None
