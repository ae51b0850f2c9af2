"""Cases of the hand-over that other systems got wrong, one by one; V numbers are theirs."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from core.errors import (
    CorruptBlockError,
    DeadlineError,
    PdserveError,
    StalePeerError,
    UnavailableError,
)
from core.types import Role
from decode_worker import DecodeWorker
from rpc import worker_pb2 as pb
from rpc.channel import make_channel
from rpc.status import error_from_rpc
from support.pair import (
    BLOCK,
    Pair,
    disturb,
    hand_over_config,
    prompt,
    request,
    running_pair,
    serves,
    start_worker,
    stop_worker,
)

NUM_TOKENS = 100  # 13 blocks in 4 chunks


async def error_of(call: Any) -> PdserveError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        async for _ in call:
            pass
    return error_from_rpc(failed.value, "decode-0")


# ------------------------------------------------------------------ overlap


async def test_on_a_link_as_slow_as_the_prefill_only_the_last_chunk_is_left(pair: Pair) -> None:
    """Point 2 of the hand-over, by order of events: a pull takes as long as the next chunk's
    computation. When the first token is there, all but the last chunk's block was asked for, and
    nothing but that block is pulled between P's commit and D's first step."""
    shim = disturb(pair)
    engine, decode_engine = pair.prefill.runtime.engine, pair.decode.runtime.engine
    forward, decode_forward = engine.model.forward, decode_engine.model.forward
    events: list[str] = []
    begun = [threading.Semaphore(0) for _ in range(5)]
    computed = [asyncio.Event() for _ in range(5)]
    loop = asyncio.get_running_loop()
    chunk = 0

    def paced(*args: Any, **kwargs: Any) -> Any:
        nonlocal chunk
        chunk += 1
        assert chunk == 1 or begun[chunk - 1].acquire(timeout=10), "no pull beside the prefill"
        events.append(f"chunk {chunk}")
        result = forward(*args, **kwargs)
        loop.call_soon_threadsafe(computed[chunk].set)
        return result

    async def slow(remote: list[int], local: list[int]) -> None:
        number = len(shim.pulls)
        events.append(f"pull of {len(local)} begins")
        begun[number].release()
        if number < 4:
            await computed[number + 1].wait()

    def landed(kv_cache: Any, local: list[int]) -> None:
        events.append(f"pull of {len(local)} ends")

    def decoding(*args: Any, **kwargs: Any) -> Any:
        events.append("decode")
        return decode_forward(*args, **kwargs)

    shim.before, shim.after = slow, landed
    engine.model.forward, decode_engine.model.forward = paced, decoding
    answer = await pair.generate(request(prompt(NUM_TOKENS), max_tokens=2))
    engine.model.forward, decode_engine.model.forward = forward, decode_forward
    assert answer.error is None
    last = events.index("chunk 4")
    assert [e for e in events[:last] if e.endswith("begins")] == ["pull of 4 begins"] * 3
    assert events[last + 1 :] == [
        "pull of 4 ends", "pull of 1 begins", "pull of 1 ends", "decode",
    ]  # fmt: skip


# ------------------------------------------------------------------ V02, V03, V05, V06


async def test_a_decode_worker_that_refuses_leaves_nothing_at_p(pair: Pair) -> None:
    """V02 a: at admission, while P computes."""
    await pair.decode.drain()
    answer = await pair.generate(request(prompt(NUM_TOKENS)))
    assert any(isinstance(error, UnavailableError) for error in answer.errors)
    await pair.wait_idle(timeout_s=1.0)


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_lengths_around_a_block_without_prefix_caches(
    tiny_model_dir: Path, transport: str
) -> None:
    """V03, the other half: nothing is ever held here, each time all of it is sent."""
    config = hand_over_config(tiny_model_dir, transport, enable_prefix_caching=False)
    async with running_pair(config) as pair:
        for length in (1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK):
            alone = await pair.alone(request(prompt(length)))
            for _ in range(2):
                answer = await pair.generate(request(prompt(length)))
                assert answer.error is None and answer.tokens == alone.tokens
                assert answer.decode_started is not None
                assert answer.decode_started.num_cached_tokens == 0
                assert answer.decode_started.num_transferred_tokens == length
        await pair.wait_idle()


async def test_handles_that_lead_nowhere_are_counted_and_answer_nothing(pair: Pair) -> None:
    """V05: D alone is called, as by a router that is wrong: nothing but an error comes back."""
    done = request(prompt(20))
    await pair.generate(done)
    expired = request(prompt(24))
    call = pair.prefill_call(expired)
    assert "lease ran out" in (await error_of(call)).message
    other_tokens = request(prompt(20, seed=3), request_id=done.request_id)
    handles = {
        "never prefilled": (request(prompt(20)), pair.source()),
        "consumed": (done, pair.source()),
        "of another prompt": (other_tokens, pair.source()),
        "expired": (expired, pair.source()),
        "of an earlier life": (request(prompt(20)), pair.source(incarnation="earlier")),
        "at an address with nobody": (
            request(prompt(20)),
            pair.source(worker_id="prefill-9", address="127.0.0.1:1"),
        ),
    }
    for name, (wrong, source) in handles.items():
        before = pair.decode.runtime.transfers_failed
        error = await error_of(pair.decode_call(wrong, source))
        assert isinstance(error, (UnavailableError, DeadlineError)), name
        assert pair.decode.runtime.transfers_failed == before + 1, name
    await serves(pair)


async def test_a_connection_that_cannot_be_opened_ends_both_legs(pair: Pair) -> None:
    """V06: nobody waits for a timeout, and P's blocks are free."""
    pair.via = "127.0.0.1:1"
    answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=5)
    assert isinstance(answer.error, UnavailableError)
    await pair.wait_idle(timeout_s=1.0)
    pair.via = ""
    await serves(pair)


# ------------------------------------------------------------------ V08: D restarts


async def restarted_decode(pair: Pair) -> None:
    """Another incarnation of D at the same address."""
    old = pair.decode
    port = int(old.info.address.rpartition(":")[2])
    await stop_worker(old)
    await pair.channels.pop(old).close()
    fresh = await start_worker(old.runtime.settings.config, Role.DECODE, port=port)
    assert isinstance(fresh, DecodeWorker)
    assert fresh.info.address == old.info.address
    assert fresh.info.incarnation != old.info.incarnation
    pair.decode = fresh
    pair.channels[fresh] = make_channel(fresh.info.address)


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_a_decode_worker_restarts_at_the_same_address(
    tiny_model_dir: Path, transport: str
) -> None:
    """V08: P has no state about D that could be stale; who means the old D is refused."""
    async with running_pair(hand_over_config(tiny_model_dir, transport)) as pair:
        await serves(pair)
        old = pair.decode.info.incarnation
        await restarted_decode(pair)
        stale = pb.DecodeRequest(incarnation=old)
        channel = pair.channels[pair.decode]
        call = channel.unary_stream(
            "/pdserve.worker.v1.DecodeService/Decode",
            request_serializer=pb.DecodeRequest.SerializeToString,
            response_deserializer=pb.DecodeEvent.FromString,
        )(stale)
        assert isinstance(await error_of(call), StalePeerError)
        for seed in range(5):
            answer = await pair.generate(request(prompt(NUM_TOKENS, seed)))
            alone = await pair.alone(request(prompt(NUM_TOKENS, seed), cache_salt="x"))
            assert answer.error is None and answer.tokens == alone.tokens
        await pair.wait_idle()


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_a_decode_worker_restarts_in_the_middle_of_a_pull(
    tiny_model_dir: Path, transport: str
) -> None:
    """V08, V01: P frees what was in flight, at once; the next D at that address is served."""
    async with running_pair(hand_over_config(tiny_model_dir, transport)) as pair:
        shim = disturb(pair)
        pulling = asyncio.Event()

        async def hang(remote: list[int], local: list[int]) -> None:
            pulling.set()
            await asyncio.Event().wait()

        shim.before = hang
        running = asyncio.create_task(pair.generate(request(prompt(NUM_TOKENS)), timeout_s=10))
        await asyncio.wait_for(pulling.wait(), 10)
        await restarted_decode(pair)
        assert (await running).error is not None
        await pair.wait_idle(timeout_s=2.0)
        await serves(pair)


# ------------------------------------------------------------------ V24, V25


@pytest.mark.parametrize("position", ["first", "middle", "last"])
async def test_a_wrong_block_at_any_position_is_named(pair: Pair, position: str) -> None:
    """V24: one clear error, which says which block; then everything goes on."""
    shim = disturb(pair)
    wanted = {"first": 0, "middle": 6, "last": 12}[position]
    seen = 0

    def flip(kv_cache: Any, local: list[int]) -> None:
        nonlocal seen
        if seen <= wanted < seen + len(local):
            kv_cache[local[wanted - seen]].view(-1)[0] += 1
        seen += len(local)

    shim.after = flip
    answer = await pair.generate(request(prompt(NUM_TOKENS)))
    (corrupt,) = [error for error in answer.errors if isinstance(error, CorruptBlockError)]
    assert f"position {wanted} of 13" in corrupt.message
    assert len(answer.tokens) <= 1
    shim.after = None
    await serves(pair)


async def test_one_client_id_for_two_requests_mixes_nothing_up(pair: Pair) -> None:
    """V25: a client's id is for logs alone."""
    from dataclasses import replace

    both = [replace(request(prompt(NUM_TOKENS, seed)), client_request_id="same") for seed in (0, 1)]
    answers = await asyncio.gather(*[pair.generate(one) for one in both])
    for seed, answer in enumerate(answers):
        alone = await pair.alone(request(prompt(NUM_TOKENS, seed), cache_salt="x"))
        assert answer.error is None and answer.tokens == alone.tokens
