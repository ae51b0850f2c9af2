"""Timelines as JSON and as spans: for `/debug/requests`, `timings` and the dashboard."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from router.request.timeline import AttemptTimeline, SequenceTimeline, Timeline

ROUTER = "router"
MAX_PIECES = 256  # chunks, or pulls, of one attempt
_MIN_QUEUE_S = 0.001  # a shorter wait for workers is not worth a span


@dataclass(frozen=True, slots=True)
class Span:
    """A part of a request that took time. `start` is in seconds after the request's arrival."""

    name: str
    where: str  # the router, or a worker's id
    start: float
    seconds: float
    choice: int = 0
    note: str = ""


def timeline_summary(timeline: Timeline) -> dict[str, Any]:
    """What the list of requests shows."""
    tpots = [s.tpot for s in timeline.sequences if s.tpot is not None]
    return {
        "id": timeline.id,
        "response_id": timeline.response_id or None,
        "api": timeline.api,
        "outcome": timeline.outcome,
        "received_at": timeline.received_at,
        "age_seconds": _round(timeline.now()),
        "num_choices": len(timeline.sequences),
        "num_attempts": sum(len(s.attempts) for s in timeline.sequences),
        "num_prompt_tokens": timeline.num_prompt_tokens,
        "num_cached_tokens": timeline.num_cached_tokens,
        "num_output_tokens": timeline.num_tokens,
        "tokenize_seconds": _round(timeline.tokenized),
        "ttft_seconds": _round(timeline.ttft),
        "tpot_seconds": _round(sum(tpots) / len(tpots)) if tpots else None,
        "e2e_seconds": _round(timeline.ended if timeline.ended is not None else timeline.now()),
    }


def timeline_view(timeline: Timeline) -> dict[str, Any]:
    """Everything there is about one request."""
    for sequence in timeline.sequences:
        for attempt in sequence.attempts:
            attempt.refresh()
    spans = [asdict(span) for span in timeline_spans(timeline)]
    for span in spans:
        span["start"], span["seconds"] = _round(span["start"]), _round(span["seconds"])
    return {
        **timeline_summary(timeline),
        "sequences": [_sequence(sequence) for sequence in timeline.sequences],
        "spans": spans,
    }


def timeline_spans(timeline: Timeline) -> Iterator[Span]:
    """The request as bars, each on the row of the process that it happened in."""
    if timeline.tokenized is not None:
        yield Span("tokenize", ROUTER, 0.0, timeline.tokenized)
    for sequence in timeline.sequences:
        for attempt in sequence.attempts:
            yield from _attempt_spans(sequence, attempt, timeline.now())


def _attempt_spans(
    sequence: SequenceTimeline, attempt: AttemptTimeline, now: float
) -> Iterator[Span]:
    choice, placed = sequence.index, attempt.placed
    if placed - attempt.searched > _MIN_QUEUE_S:
        yield Span("router queue", ROUTER, attempt.searched, placed - attempt.searched, choice)
    ended = attempt.ended if attempt.ended is not None else now
    last = sequence.last_token if attempt.outcome in ("ok", "running") else None
    decode_end = max(last if last is not None else ended, placed)
    if attempt.prefill is not None:
        yield from _prefill_spans(attempt, choice)
    decode = attempt.decode_started
    if decode is not None and attempt.prefill is not None:
        yield from _hand_over_spans(attempt, choice)
        start = placed + decode.hand_over_seconds
        if not decode.hand_over_seconds and attempt.first_token is not None:
            start = attempt.first_token
        yield Span("decode", attempt.decode, start, max(0.0, decode_end - start), choice)
        if (step := attempt.first_step) is not None:
            at = placed + step.offset_seconds
            yield Span("first decode step", attempt.decode, at, step.seconds, choice)
    elif attempt.prefill is None:
        queued = decode.queue_seconds if decode is not None else 0.0
        if decode is not None:
            yield Span("queue", attempt.decode, placed, queued, choice)
        first = attempt.first_token
        computed = (first if first is not None else ended) - placed - queued
        yield Span("prefill", attempt.decode, placed + queued, max(0.0, computed), choice)
        if first is not None:
            yield Span("decode", attempt.decode, first, max(0.0, decode_end - first), choice)
    if attempt.outcome not in ("ok", "running"):
        yield Span("attempt ended", ROUTER, ended, 0.0, choice, attempt.outcome)


def _prefill_spans(attempt: AttemptTimeline, choice: int) -> Iterator[Span]:
    assert attempt.prefill is not None
    if attempt.prefill_started is None:
        return
    queued = attempt.prefill_started.queue_seconds
    start = attempt.placed + queued
    yield Span("queue", attempt.prefill, attempt.placed, queued, choice)
    done = attempt.prefilled
    if done is None:
        return
    if not done.chunks:
        yield Span("prefill", attempt.prefill, start, done.prefill_seconds, choice)
    for chunk in done.chunks[:MAX_PIECES]:
        at = start + chunk.offset_seconds
        note = f"{chunk.num_tokens} tokens"
        yield Span("prefill", attempt.prefill, at, chunk.seconds, choice, note)


def _hand_over_spans(attempt: AttemptTimeline, choice: int) -> Iterator[Span]:
    decode, placed = attempt.decode_started, attempt.placed
    assert decode is not None
    queue_at = placed + decode.queue_offset_seconds
    yield Span("queue", attempt.decode, queue_at, decode.queue_seconds, choice)
    for pull in decode.pulls[:MAX_PIECES]:
        rate = f", {pull.bytes / pull.seconds / 1e9:.2f} GB/s" if pull.seconds > 0 else ""
        note = f"{pull.bytes / 1e6:.2f} MB from {attempt.prefill}{rate}"
        yield Span("kv pull", attempt.decode, placed + pull.offset_seconds, pull.seconds, choice,
                   note)  # fmt: skip
    if decode.hand_over_seconds:
        tail = decode.kv_tail_seconds
        start = placed + decode.hand_over_seconds - tail
        yield Span("commit to release", attempt.decode, start, tail, choice)


def _sequence(sequence: SequenceTimeline) -> dict[str, Any]:
    return {
        "choice": sequence.index,
        "num_output_tokens": sequence.num_tokens,
        "first_token_seconds": _round(sequence.first_token),
        "last_token_seconds": _round(sequence.last_token),
        "finished_seconds": _round(sequence.finished),
        "finish_reason": sequence.finish_reason,
        "tpot_seconds": _round(sequence.tpot),
        "token_seconds": [_round(seconds) for seconds in sequence.token_times],
        "attempts": [_attempt(attempt) for attempt in sequence.attempts],
    }


def _attempt(attempt: AttemptTimeline) -> dict[str, Any]:
    started, done, decode = attempt.prefill_started, attempt.prefilled, attempt.decode_started
    return {
        "id": attempt.attempt_id,
        "decision": "local" if attempt.prefill is None else "disaggregated",
        "prefill_worker": attempt.prefill,
        "decode_worker": attempt.decode,
        "resumed_at_token": attempt.resumed_at,
        "searched_seconds": _round(attempt.searched),
        "placed_seconds": _round(attempt.placed),
        "first_token_seconds": _round(attempt.first_token),
        "ended_seconds": _round(attempt.ended),
        "outcome": attempt.outcome,
        "prefill": started and {
            "queue_seconds": _round(started.queue_seconds),
            "num_cached_tokens": started.num_cached_tokens,
            "prefill_seconds": _round(done.prefill_seconds) if done is not None else None,
            "chunks": [
                {
                    "num_tokens": chunk.num_tokens,
                    "offset_seconds": _round(chunk.offset_seconds),
                    "seconds": _round(chunk.seconds),
                }
                for chunk in (done.chunks if done is not None else ())[:MAX_PIECES]
            ],
        },
        "decode": decode and {
            "queue_seconds": _round(decode.queue_seconds),
            "num_cached_tokens": decode.num_cached_tokens,
            "num_transferred_tokens": decode.num_transferred_tokens,
            "kv_bytes": decode.kv_bytes,
            "kv_transfer_seconds": _round(decode.kv_transfer_seconds),
            "kv_tail_seconds": _round(decode.kv_tail_seconds),
            "hand_over_seconds": _round(decode.hand_over_seconds),
            "first_step": attempt.first_step and {
                "offset_seconds": _round(attempt.first_step.offset_seconds),
                "seconds": _round(attempt.first_step.seconds),
            },
            "pulls": [
                {
                    "bytes": pull.bytes,
                    "offset_seconds": _round(pull.offset_seconds),
                    "seconds": _round(pull.seconds),
                }
                for pull in decode.pulls[:MAX_PIECES]
            ],
        },
    }  # fmt: skip


def _round(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)
