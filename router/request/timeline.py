"""One timeline per request: what happened to it, where, and how long each part took.

Every part is measured where it happens, as a duration: the router's offsets are from the arrival
of the request on its own monotonic clock, and workers send durations along with their events. The
two are joined at the start of an attempt, as if the way to a worker took no time; no clock reading
ever crosses to another host. `router.request.timeline_view` turns a timeline into JSON and spans.
"""

import logging
import uuid
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from time import monotonic, time
from typing import Any

from core.logs import about
from router.request.attempt import Attempt
from rpc import worker_pb2

logger = logging.getLogger(__name__)

MAX_TIMELINES = 1000
MAX_TOKEN_TIMES = 2048  # of one request, all its choices together
MAX_EVENTS = 512


class EventLog:
    """The last events of all requests, numbered, for whoever looks at them live."""

    def __init__(self) -> None:
        self._events: deque[dict[str, Any]] = deque(maxlen=MAX_EVENTS)
        self.last = 0

    def add(self, kind: str, request_id: str, **what: Any) -> None:
        self.last += 1
        self._events.append({"number": self.last, "kind": kind, "id": request_id, **what})

    def since(self, number: int) -> list[dict[str, Any]]:
        """Events after `number` that are still kept, oldest first."""
        return [event for event in self._events if event["number"] > number]


@dataclass(slots=True)
class AttemptTimeline:
    """One attempt. Holds the attempt itself only while it runs; an ended one is some numbers."""

    attempt: Attempt | None
    attempt_id: str
    prefill: str | None  # worker ids; None: the decode side prefilled for itself
    decode: str
    searched: float  # when the router began to look for workers
    placed: float
    resumed_at: int  # tokens that earlier attempts had emitted
    decode_role: str = "decode"
    first_token: float | None = None  # of this attempt
    ended: float | None = None
    outcome: str = "running"
    prefill_started: worker_pb2.PrefillStarted | None = None
    prefilled: worker_pb2.FirstToken | None = None
    decode_started: worker_pb2.DecodeStarted | None = None
    first_step: worker_pb2.DecodeStep | None = None

    def refresh(self) -> None:
        """Takes over what the workers have said by now."""
        if self.attempt is not None:
            self.prefill_started = self.attempt.prefill_started
            self.prefilled = self.attempt.prefilled
            self.decode_started = self.attempt.decode_started
            self.first_step = self.attempt.first_step

    @property
    def emitter(self) -> tuple[str, str]:
        """Role and id of the worker that the latest token came from."""
        if self.prefill is None:
            return self.decode_role, self.decode
        is_first = self.attempt is not None and self.attempt.decode_started is None
        return ("prefill", self.prefill) if is_first else ("decode", self.decode)


@dataclass(slots=True)
class SequenceTimeline:
    """One choice of a request. The pipeline notes attempts, the generation tokens and the end."""

    request: "Timeline"
    index: int
    attempts: list[AttemptTimeline] = field(default_factory=list)
    # When each batch of tokens arrived here; one entry a token of the batch, as long as there is
    # room in the request's share.
    token_times: array = field(default_factory=lambda: array("f"))
    num_tokens: int = 0
    first_token: float | None = None
    last_token: float | None = None
    finished: float | None = None
    finish_reason: str | None = None

    def begin_attempt(self, attempt: Attempt, searched: float, num_emitted: int) -> None:
        placement = attempt.placement
        prefill = placement.prefill.id if placement.prefill is not None else None
        self.attempts.append(
            AttemptTimeline(
                attempt,
                attempt.request_id,
                prefill,
                placement.decode.id,
                searched,
                self.request.now(),
                num_emitted,
                placement.decode.role.value,
            )
        )
        self._event("placed", prefill=prefill, decode=placement.decode.id)

    def end_attempt(self, outcome: str) -> None:
        current = self.attempts[-1]
        current.refresh()
        current.attempt = None
        current.ended = self.request.now()
        # A stop string ends an attempt that would have gone on.
        current.outcome = "ok" if self.finished is not None else outcome
        if current.outcome != "ok":
            self._event("failed", decode=current.decode, prefill=current.prefill)

    def tick(self, num_tokens: int) -> None:
        """So many tokens have just arrived."""
        now = self.last_token = monotonic() - self.request.received
        current = self.attempts[-1]
        if current.first_token is None:
            current.first_token = now
            self._event("token", prefill=current.prefill, decode=current.decode)
        elif current.decode_started is None:
            current.refresh()
            if (started := current.decode_started) is not None and current.prefill is not None:
                self._event(
                    "kv", prefill=current.prefill, decode=current.decode, bytes=started.kv_bytes
                )
        if self.first_token is None:
            self.first_token = now
        self.num_tokens += num_tokens
        for _ in range(self.request.take_room(num_tokens)):
            self.token_times.append(now)

    def finish(self, reason: str) -> None:
        self.finished, self.finish_reason = self.request.now(), reason
        decode = self.attempts[-1].decode if self.attempts else None
        self._event("finished", decode=decode)

    @property
    def emitter(self) -> tuple[str, str] | None:
        return self.attempts[-1].emitter if self.attempts else None

    @property
    def tpot(self) -> float | None:
        if self.first_token is None or self.last_token is None or self.num_tokens < 2:
            return None
        return (self.last_token - self.first_token) / (self.num_tokens - 1)

    def _event(self, kind: str, **what: Any) -> None:
        if self.request.events is not None:
            self.request.events.add(kind, self.request.id, choice=self.index, **what)


class Timeline:
    """One API request. Its numbers are seconds after `received`, on this process's clock."""

    def __init__(self, request_id: str, api: str, traceparent: str = "") -> None:
        self.id = request_id or uuid.uuid4().hex
        self.api = api
        self.traceparent = traceparent
        self.response_id = ""
        self.received = monotonic()
        self.received_at = time()  # for people; nothing is computed from it
        self.tokenized: float | None = None
        self.ended: float | None = None
        self.outcome = "running"
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.sequences: list[SequenceTimeline] = []
        # Set when somebody keeps this timeline.
        self.events: EventLog | None = None
        self.on_end: Callable[[Timeline], None] | None = None
        self._room = MAX_TOKEN_TIMES

    def now(self) -> float:
        return monotonic() - self.received

    def note_tokenized(self) -> None:
        self.tokenized = self.now()

    def take_room(self, wanted: int) -> int:
        """How many more token times may be kept, `wanted` at most."""
        granted = min(wanted, self._room)
        self._room -= granted
        return granted

    def add_sequences(self, count: int) -> list[SequenceTimeline]:
        self.sequences = [SequenceTimeline(self, index) for index in range(count)]
        return self.sequences

    def end(self, outcome: str) -> None:
        self.ended, self.outcome = self.now(), outcome
        logger.info(
            "request %s: %s, %d + %d tokens in %.3f s",
            self.id, outcome, self.num_prompt_tokens, self.num_tokens, self.ended,
            extra=about(
                request_id=self.id, response_id=self.response_id, api=self.api, outcome=outcome,
                traceparent=self.traceparent, num_prompt_tokens=self.num_prompt_tokens,
                num_cached_tokens=self.num_cached_tokens, num_tokens=self.num_tokens,
                num_attempts=sum(len(s.attempts) for s in self.sequences),
                ttft_seconds=self.ttft, seconds=self.ended,
            ),
        )  # fmt: skip
        if self.on_end is not None:
            self.on_end(self)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def ttft(self) -> float | None:
        """To the first token of any choice."""
        times = [s.first_token for s in self.sequences if s.first_token is not None]
        return min(times, default=None)


class Timelines:
    """The timelines of the last requests, by request id and by response id. A client that uses
    an id again finds its latest request under it."""

    def __init__(
        self, limit: int = MAX_TIMELINES, on_end: Callable[[Timeline], None] | None = None
    ) -> None:
        self.events = EventLog()
        self._on_end = on_end
        self._limit = limit
        self._kept: OrderedDict[int, Timeline] = OrderedDict()
        self._by_id: dict[str, Timeline] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, timeline: Timeline) -> None:
        """From now on it can be found; the oldest one makes room."""
        timeline.events, timeline.on_end = self.events, self._on_end
        self._kept[id(timeline)] = timeline
        for name in (timeline.id, timeline.response_id):
            if name:
                self._by_id[name] = timeline
        while len(self._kept) > self._limit:
            _, oldest = self._kept.popitem(last=False)
            for name in (oldest.id, oldest.response_id):
                if self._by_id.get(name) is oldest:
                    del self._by_id[name]

    def find(self, name: str) -> Timeline | None:
        return self._by_id.get(name)

    def recent(self, count: int) -> Iterable[Timeline]:
        """The latest first."""
        return islice(reversed(self._kept.values()), count)
