"""Spans of real requests, as an OTLP collector receives them."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from test_timeline import give_times

from core.errors import ConfigError, UnavailableError
from router.request.tracing import Tracer
from support.fake_workers import Fault
from support.router import running

_TRACE, _SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@asynccontextmanager
async def collector() -> AsyncIterator[tuple[str, list]]:
    """The address of an OTLP collector, and the spans that it has got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length:")[1].split("\r\n")[0])
        body = await reader.readexactly(length)
        if "content-encoding: gzip" in head:
            import gzip

            body = gzip.decompress(body)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            spans.extend(span for scope in resource.scope_spans for span in scope.spans)
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}/v1/traces", spans


async def _ask(it, traceparent: str) -> None:
    body = {"model": "fake", "prompt": "hello", "max_tokens": 8}
    headers = {"traceparent": traceparent, "x-request-id": "mine"}
    assert (await it.http.post("/v1/completions", json=body, headers=headers)).status_code == 200


async def test_a_request_is_a_span_below_the_clients_with_its_parts_below_it() -> None:
    async with collector() as (endpoint, spans):
        async with running(f"router.otlp_endpoint={endpoint}") as it:
            faults = iter([Fault("error", 2, UnavailableError("no power"))])
            it.worker("decode-0").next_fault = lambda: next(faults, None)
            give_times(it)
            await _ask(it, f"00-{_TRACE}-{_SPAN}-01")
            # The same trace goes on to every worker.
            seen = [call["traceparent"] for w in it.cluster.everyone for call in w.metadata]
            assert len(seen) == 4 and {value.split("-")[1] for value in seen} == {_TRACE}
        (root,) = [span for span in spans if span.name == "completions"]
        assert root.trace_id.hex() == _TRACE and root.parent_span_id.hex() == _SPAN
        found = {a.key: a.value for a in root.attributes}
        assert found["pdserve.request_id"].string_value == "mine"
        assert found["gen_ai.usage.output_tokens"].int_value == 8
        parts = [span for span in spans if span is not root]
        assert {span.parent_span_id for span in parts} == {root.span_id}
        assert {span.trace_id for span in spans} == {root.trace_id}
        assert len({span.span_id for span in spans}) == len(spans)
        names = [span.name for span in parts]
        assert names.count("decode") == 2 and names.count("attempt ended") == 1
        assert {"tokenize", "queue", "prefill", "kv pull", "commit to release"} <= set(names)
        assert names.count("first decode step") == 2
        # Each token is an event of the request's own span, the first one by that name.
        events = [event.name for event in root.events]
        assert events == ["first token"] + 7 * ["token"]
        times = [event.time_unix_nano for event in root.events]
        assert times == sorted(times) and times[-1] <= root.end_time_unix_nano
        for span in spans:
            assert root.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano


async def test_events_of_a_long_answer_are_bounded() -> None:
    async with collector() as (endpoint, spans):
        async with running(f"router.otlp_endpoint={endpoint}") as it:
            await it.complete("hello", max_tokens=100, n=2)
        (root,) = [span for span in spans if span.name == "completions"]
        assert len(root.events) == 128
        assert {a.value.int_value for event in root.events for a in event.attributes} == {0, 1}


async def test_an_unsampled_parent_gives_its_trace_id_alone() -> None:
    async with collector() as (endpoint, spans):
        async with running(f"router.otlp_endpoint={endpoint}") as it:
            await _ask(it, f"00-{_TRACE}-{_SPAN}-00")
        (root,) = [span for span in spans if span.name == "completions"]
        assert root.trace_id.hex() == _TRACE and not root.parent_span_id


async def test_a_collector_that_is_away_harms_no_request() -> None:
    async with running("router.otlp_endpoint=http://127.0.0.1:9/v1/traces") as it:
        await _ask(it, f"00-{_TRACE}-{_SPAN}-01")


def test_without_the_extra_the_error_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match="pdserve\\[tracing\\]"):
        Tracer("http://127.0.0.1:4318/v1/traces")
