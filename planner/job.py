"""One simulated request, and what a worker tells about it."""

from dataclasses import dataclass
from typing import Any, Protocol

from planner.trace import TraceRequest


@dataclass(slots=True, eq=False)
class Job:
    """Where a request stands. Times are simulated seconds, negative until they happened."""

    index: int
    request: TraceRequest
    arrival: float
    hands_over: bool = False  # decoded by another worker than the one that prefills
    prefill: Any = None  # the workers that were chosen
    decode: Any = None
    num_cached: int = 0  # prompt tokens found in the prefill worker's cache
    num_computed: int = 0  # prompt tokens whose KV exists, cached ones included
    last_chunk: int = 0  # tokens that the last prefill step computed
    first_token_at: float = -1.0
    reserved_at: float = -1.0  # the decode worker has room for it
    decode_at: float = -1.0
    num_emitted: int = 0


class Host(Protocol):
    """Whoever owns the workers. Called at the moment it happens, between two steps."""

    def admitted(self, job: Job) -> None:
        """A prefill has its blocks and begins."""

    def reserved(self, job: Job) -> None:
        """A decode worker has room for a job's KV."""

    def first_token(self, job: Job) -> None:
        """The prompt is computed. A job that hands over keeps its KV until it is released."""

    def done(self, job: Job) -> None:
        """The last token was written; the worker has forgotten the job."""

    def gap(self, seconds: float, count: int) -> None:
        """`count` sequences got a token, so long after the one before."""
