"""What real workers say of their times: each part is in its own number, and they add up."""

import asyncio
import time
from pathlib import Path

import pytest

from engine.types import SequenceOutput
from prefill_worker import prefill_service
from rpc import worker_pb2 as pb
from support.pair import BLOCK, prompt, request, running_pair, tiny_config

_STEP_S = 0.05


async def test_chunks_and_pulls_are_measured_where_they_happen(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tiny_model_dir)  # chunks of 32 tokens
    transfer = config.kv_transfer.model_copy(update={"transport": "grpc"})
    async with running_pair(config.model_copy(update={"kv_transfer": transfer})) as pair:
        engine = pair.prefill.runtime.engine
        forward = engine.model.forward

        def slow(*args):
            time.sleep(_STEP_S)
            return forward(*args)

        monkeypatch.setattr(engine.model, "forward", slow)
        decode_model = pair.decode.runtime.engine.model
        decode_forward = decode_model.forward

        def slow_decode(*args):
            time.sleep(_STEP_S)
            return decode_forward(*args)

        monkeypatch.setattr(decode_model, "forward", slow_decode)
        asked = request(prompt(100), max_tokens=4)
        prefill, decode = pair.prefill_call(asked), pair.decode_call(asked, pair.source())

        async def first_token() -> tuple[pb.PrefillStarted, pb.FirstToken]:
            events = [event async for event in prefill]
            return events[0].started, events[1].first_token

        (started, first), (handed, step) = await asyncio.wait_for(
            asyncio.gather(first_token(), _first_tokens(decode)), 20
        )
        decode.cancel()
        await pair.wait_idle()
    chunks = list(first.chunks)
    assert [chunk.num_tokens for chunk in chunks] == [32, 32, 32, 4]
    assert all(chunk.seconds >= _STEP_S for chunk in chunks)
    assert chunks[0].offset_seconds == 0
    for before, after in zip(chunks, chunks[1:], strict=False):
        # Each starts when the one before has ended, but for how long its news took.
        assert after.offset_seconds >= before.offset_seconds + _STEP_S / 2
    assert first.prefill_seconds >= sum(chunk.seconds for chunk in chunks) - _STEP_S / 2
    # Nothing was in front of it: the step that admitted it is the first chunk's, not the queue's.
    assert started.queue_seconds < chunks[0].seconds
    assert sum(pull.bytes for pull in handed.pulls) == handed.kv_bytes > 0
    assert len(handed.pulls) > 1 and BLOCK < 32
    pulled = sum(pull.seconds for pull in handed.pulls)
    assert pulled == pytest.approx(handed.kv_transfer_seconds)
    last = handed.pulls[-1]
    assert last.offset_seconds + last.seconds <= handed.hand_over_seconds
    assert handed.hand_over_seconds >= handed.kv_tail_seconds + handed.queue_offset_seconds
    # The first step of the decode worker starts after the release, and is its own forward.
    assert step.seconds >= _STEP_S
    assert step.offset_seconds > handed.hand_over_seconds - _STEP_S / 2


async def _first_tokens(decode) -> tuple[pb.DecodeStarted, pb.DecodeStep]:
    started = None
    async for event in decode:
        if event.HasField("tokens"):
            assert started is not None and event.tokens.HasField("first_step")
            return started, event.tokens.first_step
        started = event.started
    raise AssertionError("the decode worker said no token")


def test_chunks_count_from_the_first_step_however_late_the_admissions_news_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = 10.0
    monkeypatch.setattr(prefill_service, "now", lambda: at)
    clock = prefill_service._ChunkClock()
    admitted = SequenceOutput("r", admitted=True, num_cached_tokens=16, num_computed_tokens=16)
    clock.take(admitted)
    at = 10.75  # the step of 0.5 s began a quarter of a second after the news of the admission
    clock.take(SequenceOutput("r", step_seconds=0.5, num_computed_tokens=48))
    at = 11.25
    clock.take(SequenceOutput("r", step_seconds=0.25, num_computed_tokens=58))
    assert clock.started == 10.25
    assert [(c.num_tokens, c.offset_seconds, c.seconds) for c in clock.chunks] == [
        (32, 0, 0.5),
        (10, 0.75, 0.25),
    ]
