"""Timelines as OpenTelemetry spans, sent by OTLP over HTTP. Needs the extra `tracing`.

A request is one span with a child for each part, and an event for each token. It belongs to the
trace of the client's `traceparent`, below the client's span if that one is sampled; without, to a
trace of its own, whose id the workers' logs have too. Start times are the router's clock plus
measured durations.
"""

import logging
import secrets
from collections.abc import Sequence
from typing import Any

from core.errors import ConfigError
from router.request.timeline import Timeline
from router.request.timeline_view import timeline_spans

logger = logging.getLogger(__name__)

_MAX_QUEUED = 4096  # spans; more are dropped, never waited for
_MAX_EVENTS = 128  # of one span, which is OpenTelemetry's own limit; of tokens, the first ones


class Tracer:
    """Owns the exporter and its thread. `export` never blocks and never fails a request."""

    def __init__(self, endpoint: str) -> None:
        """`endpoint`: for example http://127.0.0.1:4318/v1/traces. Raises ConfigError."""
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk import trace as sdk
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                "router.otlp_endpoint: needs OpenTelemetry: pip install 'pdserve[tracing]'"
            ) from error
        self._trace, self._sdk = trace, sdk
        self._resource = Resource.create({"service.name": "pdserve"})
        self._processor = BatchSpanProcessor(
            OTLPSpanExporter(endpoint=endpoint, timeout=5),
            max_queue_size=_MAX_QUEUED,
            schedule_delay_millis=1000,
        )

    def export(self, timeline: Timeline) -> None:
        """Queues the spans of a request that has ended."""
        try:
            for span in self._spans(timeline):
                self._processor.on_end(span)
        except Exception:
            logger.exception("cannot export the spans of request %s", timeline.id)

    def close(self) -> None:
        """Sends what is queued. May take some seconds: not for the event loop."""
        self._processor.shutdown()

    def _spans(self, timeline: Timeline) -> list[Any]:
        trace_id, parent = self._parent(timeline.traceparent)
        root = self._context(trace_id, secrets.randbits(64) or 1)
        end = timeline.ended if timeline.ended is not None else timeline.now()
        has_failed = timeline.outcome not in ("ok", "cancelled")
        attributes = {
            "pdserve.request_id": timeline.id,
            "pdserve.response_id": timeline.response_id,
            "pdserve.outcome": timeline.outcome,
            "gen_ai.usage.input_tokens": timeline.num_prompt_tokens,
            "gen_ai.usage.output_tokens": timeline.num_tokens,
        }
        if timeline.ttft is not None:
            attributes["pdserve.ttft_seconds"] = timeline.ttft
        spans = [
            self._span(
                timeline, timeline.api, root, parent, 0.0, end, attributes, has_failed,
                self._token_events(timeline),
            )
        ]  # fmt: skip
        for part in timeline_spans(timeline):
            attributes = {"pdserve.where": part.where, "pdserve.choice": part.choice}
            if part.note:
                attributes["pdserve.note"] = part.note
            context = self._context(trace_id, secrets.randbits(64) or 1)
            spans.append(
                self._span(
                    timeline, part.name, context, root, part.start, part.start + part.seconds,
                    attributes, part.name == "attempt ended",
                )
            )  # fmt: skip
        return spans

    def _token_events(self, timeline: Timeline) -> list[Any]:
        """`first token`, then `token`s, of each choice."""
        events = []
        for sequence in timeline.sequences:
            for index, at in enumerate(sequence.token_times[:_MAX_EVENTS]):
                name = "token" if index else "first token"
                when = int((timeline.received_at + at) * 1e9)
                choice = {"pdserve.choice": sequence.index}
                events.append(self._sdk.Event(name, choice, timestamp=when))
        return sorted(events, key=lambda event: event.timestamp)[:_MAX_EVENTS]

    def _parent(self, traceparent: str) -> tuple[int, Any]:
        """The trace, and the client's span in it if it is sampled."""
        if not traceparent:
            return secrets.randbits(128) or 1, None
        _, trace_id, span_id, flags = traceparent.split("-")
        if not int(flags, 16) & 1:
            return int(trace_id, 16), None
        return int(trace_id, 16), self._context(int(trace_id, 16), int(span_id, 16), True)

    def _context(self, trace_id: int, span_id: int, is_remote: bool = False) -> Any:
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(trace_id, span_id, is_remote, flags)

    def _span(
        self,
        timeline: Timeline,
        name: str,
        context: Any,
        parent: Any,
        start: float,
        end: float,
        attributes: dict[str, Any],
        has_failed: bool,
        events: Sequence[Any] = (),
    ) -> Any:
        trace = self._trace
        code = trace.StatusCode.ERROR if has_failed else trace.StatusCode.OK
        return self._sdk.ReadableSpan(
            name=name,
            context=context,
            parent=parent,
            resource=self._resource,
            attributes=attributes,
            events=events,
            kind=trace.SpanKind.INTERNAL if parent is not None and not parent.is_remote
            else trace.SpanKind.SERVER,
            status=trace.Status(code),
            start_time=int((timeline.received_at + start) * 1e9),
            end_time=int((timeline.received_at + end) * 1e9),
        )  # fmt: skip
