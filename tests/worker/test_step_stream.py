"""From the engine's outputs to the stream of steps: what wakes a reader, in what order it goes."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest

from core.errors import EngineError
from core.types import FinishReason, GenerationRequest, SamplingParams
from decode_worker.decode_service import DecodeService
from engine.types import SequenceOutput
from rpc import worker_pb2 as pb
from worker import step_stream
from worker.outputs import OutputHub, OutputStream
from worker.step_stream import StepStream, StepStreams


def said(message: pb.StepTokens) -> list[tuple[Any, int, int]]:
    """(who, index, token) in the order in which a router reads them."""
    columns = zip(message.step_numbers, message.indexes, message.token_ids, strict=True)
    found: list[tuple[Any, int, int]] = list(columns)
    for sequence in message.sequences:
        for position, token in enumerate(sequence.tokens.tokens):
            found.append((sequence.request_id, sequence.tokens.first_index + position, token.id))
    return found


def tokens(index: int, *ids: int) -> pb.Tokens:
    return pb.Tokens(first_index=index, tokens=[pb.Token(id=i) for i in ids])


class Wire:
    """A router's end: what it was sent, while it takes something."""

    def __init__(self) -> None:
        self.is_free = True
        self.sent: list[pb.StepTokens] = []
        self.stream = StepStream(self)  # type: ignore[arg-type]

    def send(self, message: bytes) -> None:
        self.sent.append(pb.StepTokens.FromString(message))

    async def said(self) -> list[tuple[Any, int, int]]:
        """Since the last call."""
        await asyncio.sleep(0)
        sent, self.sent = self.sent, []
        return [token for message in sent for token in said(message)]


async def test_tokens_of_a_request_keep_their_order_in_columns_and_out_of_them() -> None:
    wire = Wire()
    stream = wire.stream
    stream.put_token("a", 1, 0, 100)
    stream.put("a", tokens(1, 101, 102))
    stream.put_token("a", 1, 3, 103)  # behind the two that are no column
    stream.put_token("b", 2, 0, 200)
    assert [(index, token) for _, index, token in await wire.said()] == [
        (0, 100), (1, 101), (2, 102), (3, 103), (0, 200),
    ]  # fmt: skip
    stream.put_token("a", 1, 4, 104)
    assert await wire.said() == [(1, 4, 104)]


async def test_a_step_is_one_message_and_a_router_that_takes_nothing_loses_nothing() -> None:
    wire = Wire()
    for number in range(1, 4):
        wire.stream.put_token(str(number), number, 0, number)
    assert not wire.sent
    await asyncio.sleep(0)
    assert len(wire.sent) == 1 and await wire.said() == [(1, 0, 1), (2, 0, 2), (3, 0, 3)]
    wire.is_free = False
    for index in (1, 2):
        wire.stream.put_token("1", 1, index, index)
        assert not await wire.said()
    wire.is_free = True
    wire.stream.flush()
    assert await wire.said() == [(1, 1, 1), (1, 2, 2)]


async def test_a_message_is_bounded_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_stream, "_MAX_SEQUENCES", 3)
    wire = Wire()
    stream = wire.stream
    for index in range(8):
        stream.put_token("a", 1, index, index)
    for index in range(8, 12):
        stream.put("a", tokens(index, index))
    stream.flush()
    for message in wire.sent:
        assert len(message.step_numbers) <= 3 and len(message.sequences) <= 3
    assert [index for _, index, _ in await wire.said()] == list(range(12))


async def test_what_a_reader_has_not_taken_nothing_overtakes() -> None:
    outputs, taken = OutputStream(), []

    def direct(output: SequenceOutput) -> bool:
        if output.finish_reason is not None:
            return False
        taken.append(output.token_ids[0])
        return True

    reading = asyncio.ensure_future(outputs.next(direct))
    await asyncio.sleep(0)
    for token_id in (1, 2):
        outputs.put(SequenceOutput("a", [token_id]))
    assert taken == [1, 2] and not reading.done()
    outputs.put(SequenceOutput("a", [3], finish_reason=FinishReason.STOP))
    outputs.put(SequenceOutput("a", [4]))  # before the reader has had its turn
    assert taken == [1, 2]
    assert (await reading).token_ids == [3] and (await outputs.next(direct)).token_ids == [4]
    reading = asyncio.ensure_future(outputs.next(direct))
    await asyncio.sleep(0)
    outputs.put(EngineError("gone"))
    with pytest.raises(EngineError, match="gone"):
        await reading


class Streaming:
    """One Decode call whose tokens go by steps, as far as the engine's outputs are concerned."""

    def __init__(self) -> None:
        self.hub, self.written = OutputHub(), []
        self.wire = Wire()
        steps = StepStreams(lambda incarnation: None)
        steps._open["router"] = self.wire.stream
        runtime: Any = SimpleNamespace(outputs=self.hub)
        service = DecodeService(runtime, None, steps)  # type: ignore[arg-type]
        message = pb.DecodeRequest(steps="router", step_number=7)
        message.request.request_id = "a"
        request = GenerationRequest("a", (1, 2), SamplingParams(max_tokens=99))

        async def write(message: pb.DecodeEvent) -> None:
            self.written.append(message.WhichOneof("event"))

        async def run() -> None:
            with self.hub.open("a") as outputs:
                context: Any = SimpleNamespace(write=write)
                steps = service._steps_of(message)
                await service._stream(request, outputs, 5, context, steps, scored=request)

        self.call = asyncio.ensure_future(run())

    async def step(self, *token_ids: int, **more: Any) -> None:
        await asyncio.sleep(0.001)  # the call waits
        self.hub.dispatch([SequenceOutput("a", list(token_ids), **more)])


async def test_a_plain_token_wakes_nobody_and_any_other_is_in_its_place() -> None:
    at = Streaming()
    await at.step(10, admitted=True, num_cached_tokens=16)
    await at.step(11)
    await at.step(12)
    await at.step(13, 14)
    await at.step(15)
    await at.step(16, finish_reason=FinishReason.LENGTH)
    await at.call
    assert at.written == ["steps_ended"]
    (first, *_) = [said for message in at.wire.sent for said in message.sequences]
    assert first.tokens.first_index == 5 and first.tokens.started.num_cached_tokens == 16
    found = await at.wire.said()
    assert [index for _, index, _ in found] == list(range(5, 12))
    assert [token for _, _, token in found] == list(range(10, 17))


async def test_a_call_fails_when_its_router_has_ended_the_steps() -> None:
    at = Streaming()
    await at.step(10, admitted=True)
    await at.step(11)
    at.wire.stream.is_open = False
    await at.step(12)
    with pytest.raises(Exception, match="has broken"):
        await at.call
    at = Streaming()
    await at.step(10, error="it does not go on")
    with pytest.raises(EngineError, match="does not go on"):
        await at.call
    at.call.cancel()
    with suppress(EngineError, asyncio.CancelledError):
        await at.call
