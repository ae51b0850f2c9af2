"""The hand-over between two real workers, undisturbed and with every fault that we can think of.

Each test ends with `wait_idle`: no block in use, no lease, both engines sound.
"""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from core.errors import (
    CorruptBlockError,
    HandoverError,
    IncompatiblePeerError,
    PdserveError,
    RequestError,
    StalePeerError,
)
from core.types import FinishReason, Role
from decode_worker.peers import PeerBook
from kv_transfer.base import TransferInDoubt
from prefill_worker import PrefillWorker
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.status import error_from_rpc
from support.pair import (
    BLOCK,
    Pair,
    disturb,
    prompt,
    request,
    running_pair,
    start_worker,
    tiny_config,
)


@pytest.fixture(params=["nixl", "grpc"])
async def pair(request: pytest.FixtureRequest, tiny_model_dir: Path) -> AsyncIterator[Pair]:
    config = tiny_config(tiny_model_dir)
    transfer = config.kv_transfer.model_copy(
        update={"transport": request.param, "lease_seconds": 1.0}
    )
    async with running_pair(config.model_copy(update={"kv_transfer": transfer})) as pair:
        yield pair
        await pair.wait_idle()


@pytest.fixture
async def grpc_pair(tiny_model_dir: Path) -> AsyncIterator[Pair]:
    config = tiny_config(tiny_model_dir)
    transfer = config.kv_transfer.model_copy(update={"transport": "grpc", "lease_seconds": 1.0})
    async with running_pair(config.model_copy(update={"kv_transfer": transfer})) as pair:
        yield pair
        await pair.wait_idle()


# ------------------------------------------------------------------ equality


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 100])
async def test_equals_one_worker_cold_and_warm(pair: Pair, length: int) -> None:
    """V03: also where nothing is left to pull because D has the prefix from the first time."""
    # Salts keep D's own prefix cache from hiding the transfer, and the oracle from warming it.
    cold = await pair.generate(request(prompt(length), cache_salt="a"))
    warm = await pair.generate(request(prompt(length), cache_salt="a"))
    alone = await pair.alone(request(prompt(length), cache_salt="b"))
    assert cold.error is None and warm.error is None and alone.error is None
    assert cold.tokens == warm.tokens == alone.tokens
    assert len(cold.tokens) == 12
    assert cold.finish_reason is FinishReason.LENGTH
    num_blocks = -(-length // BLOCK)
    assert cold.decode_started is not None and warm.decode_started is not None
    assert cold.decode_started.num_transferred_tokens == length
    assert cold.decode_started.num_cached_tokens == 0
    block_bytes = pair.decode.info.kv_block_bytes
    assert cold.decode_started.kv_bytes == num_blocks * block_bytes
    held = length // BLOCK
    assert warm.decode_started.num_cached_tokens == held * BLOCK
    assert warm.decode_started.kv_bytes == (num_blocks - held) * block_bytes
    # V21: a hit is what P found in its own cache; at least one token is always computed there.
    assert cold.prefill_started is not None and warm.prefill_started is not None
    assert cold.prefill_started.num_cached_tokens == 0
    assert warm.prefill_started.num_cached_tokens == (length - 1) // BLOCK * BLOCK


async def test_salts_share_nothing_across_the_hand_over(grpc_pair: Pair) -> None:
    """V66: on neither side, also where a salt looks like another field; within a salt they do."""
    pair, tokens, answers = grpc_pair, prompt(4 * BLOCK), []
    for salt in ("a", "b", "", str(BLOCK), "a\0", f"a{tokens[0]}"):
        for _ in range(2):
            answer = await pair.generate(request(tokens, cache_salt=salt))
            assert answer.prefill_started is not None and answer.decode_started is not None
            p, d = answer.prefill_started.num_cached_tokens, answer.decode_started.num_cached_tokens
            answers.append((answer.tokens, p, d))
    cold, warm = answers[::2], answers[1::2]
    assert {(p, d) for _, p, d in cold} == {(0, 0)}
    assert {(p, d) for _, p, d in warm} == {(3 * BLOCK, 4 * BLOCK)}
    assert all(tokens == answers[0][0] for tokens, _, _ in answers)


async def test_decode_computes_no_prompt(pair: Pair) -> None:
    await pair.generate(request(prompt(100)))
    stats = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
    assert stats.tokens_prefilled_total == 0
    assert pair.decode.runtime.transport_in_use.startswith(
        pair.decode.runtime.settings.config.kv_transfer.transport
    )


async def test_many_at_once_with_equal_prompts(pair: Pair) -> None:
    """V20: n > 1 and prompt lists: one attempt, one lease, one transfer for each sequence."""
    expected = await pair.alone(request(prompt(40), cache_salt="oracle"))
    answers = await asyncio.gather(*[pair.generate(request(prompt(40))) for _ in range(8)])
    assert [a.tokens for a in answers] == [expected.tokens] * 8


async def test_sampled_tokens_do_not_depend_on_the_hand_over(pair: Pair) -> None:
    options = {"temperature": 0.9, "seed": 42, "max_tokens": 16}
    handed = await pair.generate(request(prompt(50), **options))
    alone = await pair.alone(request(prompt(50), cache_salt="x", **options))
    assert handed.tokens == alone.tokens


async def test_resumed_output_continues(grpc_pair: Pair) -> None:
    """An attempt may begin behind tokens that an earlier one emitted."""
    from dataclasses import replace

    whole = await grpc_pair.alone(request(prompt(30), max_tokens=20, cache_salt="x"))
    rest = replace(request(prompt(30), max_tokens=20), output_token_ids=tuple(whole.tokens[:7]))
    answer = await grpc_pair.generate(rest)
    assert answer.tokens == whole.tokens[7:]


# ------------------------------------------------------------------ the first token is the last


@pytest.mark.parametrize("how", ["length", "stop"])
async def test_finished_at_the_first_token_never_decodes(grpc_pair: Pair, how: str) -> None:
    """V17"""
    first = (await grpc_pair.alone(request(prompt(20), max_tokens=1, cache_salt="x"))).tokens[0]
    before = await grpc_pair.decode.runtime.run_on_engine(lambda e: e.stats())
    if how == "length":
        answer = await grpc_pair.generate(request(prompt(20), max_tokens=1))
        assert answer.finish_reason is FinishReason.LENGTH
    else:
        answer = await grpc_pair.generate(request(prompt(20), stop_token_ids=(first,)))
        assert answer.finish_reason is FinishReason.STOP
    assert answer.error is None
    assert answer.tokens == [first]
    after = await grpc_pair.decode.runtime.run_on_engine(lambda e: e.stats())
    assert after.tokens_decoded_total == before.tokens_decoded_total


async def test_max_tokens_two_is_one_of_each(grpc_pair: Pair) -> None:
    answer = await grpc_pair.generate(request(prompt(20), max_tokens=2))
    assert len(answer.tokens) == 2
    assert answer.finish_reason is FinishReason.LENGTH


# ------------------------------------------------------------------ handles


async def attach(pair: Pair, **changes: object) -> PdserveError | None:
    """Attaches directly and returns the refusal, if that is what comes."""
    fields = {
        "request_id": "nobody",
        "incarnation": pair.prefill.info.incarnation,
        "token_digest": b"x",
        "compatibility": dict(pair.decode.info.compatibility),
        **changes,
    }
    call = pair.stub(worker_pb2_grpc.KvServiceStub, pair.prefill).Attach(pb.AttachRequest(**fields))
    try:
        async with asyncio.timeout(10):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error, "prefill-0")
    finally:
        call.cancel()
    return None


async def test_handles_are_bound_and_single_use(grpc_pair: Pair) -> None:
    """V05: no handle that is unknown, used, old or for other tokens leads to an answer."""
    pair = grpc_pair
    done = request(prompt(20))
    await pair.generate(done)
    assert isinstance(await attach(pair, request_id=done.request_id), HandoverError)
    assert isinstance(await attach(pair, incarnation="an earlier life"), StalePeerError)
    unknown = await attach(pair, request_id="never prefilled")
    assert unknown is not None and "never came" in unknown.message
    again = await pair.generate(done)
    assert isinstance(again.error, RequestError)
    assert again.tokens == []
    only_decode = pair.decode_call(request(prompt(20)), pair.source())
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in only_decode:
            pass


async def test_pull_of_blocks_that_are_not_the_attempts(grpc_pair: Pair) -> None:
    stub = grpc_pair.stub(worker_pb2_grpc.KvServiceStub, grpc_pair.prefill)
    incarnation = grpc_pair.prefill.info.incarnation
    call = stub.Pull(pb.PullRequest(request_id="nobody", incarnation=incarnation, block_ids=[0, 1]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    assert isinstance(error_from_rpc(refused.value, "p"), HandoverError)


async def test_lease_without_a_decode_worker_expires(grpc_pair: Pair) -> None:
    """V02 c: nobody ever attaches and the router keeps its leg open."""
    call = grpc_pair.prefill_call(request(prompt(40)))
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        async for _ in call:
            pass
    assert "lease ran out" in expired.value.details()
    await grpc_pair.wait_idle()


async def test_router_that_leaves_frees_at_once(grpc_pair: Pair) -> None:
    """V02 a, b: far sooner than the lease."""
    call = grpc_pair.prefill_call(request(prompt(40)))
    while not (event := await call.read()).HasField("first_token"):
        assert event is not grpc.aio.EOF
    assert (await grpc_pair.counts(grpc_pair.prefill)).held > 0
    call.cancel()
    await grpc_pair.wait_idle(timeout_s=1.0)


# ------------------------------------------------------------------ faults on the KV path


async def test_flipped_byte_is_never_decoded(pair: Pair) -> None:
    """V24"""
    shim = disturb(pair)

    def flip(kv_cache: object, local: list[int]) -> None:
        kv_cache[local[-1]].view(-1)[3] += 1  # type: ignore[index]

    shim.after = flip
    answer = await pair.generate(request(prompt(40)))
    assert any(isinstance(e, CorruptBlockError) for e in answer.errors)
    assert len(answer.tokens) <= 1
    await pair.wait_idle()
    shim.after = None
    healed = await pair.generate(request(prompt(40)))
    alone = await pair.alone(request(prompt(40), cache_salt="x"))
    assert healed.tokens == alone.tokens


@pytest.mark.parametrize("position", [0, 1, 2])
async def test_failed_pull_ends_both_legs(pair: Pair, position: int) -> None:
    """V06: whichever chunk's transfer fails, both sides know at once and free everything."""
    shim = disturb(pair)

    async def fail(remote: list[int], local: list[int]) -> None:
        if len(shim.pulls) > position:
            raise HandoverError("the wire broke")

    shim.before = fail
    answer = await pair.generate(request(prompt(100)), timeout_s=5)
    if position < len(shim.pulls):
        assert answer.error is not None
    await pair.wait_idle(timeout_s=2)
    shim.before = None
    assert (await pair.generate(request(prompt(100)))).error is None


async def test_cancel_during_a_slow_pull_then_reuse(pair: Pair) -> None:
    """V01, V04: the client leaves while KV is on its way; the blocks go to the next request."""
    shim = disturb(pair)
    pulling = asyncio.Event()

    async def slowly(remote: list[int], local: list[int]) -> None:
        pulling.set()
        await asyncio.sleep(0.05)

    expected = (await pair.alone(request(prompt(100, seed=1), cache_salt="x"))).tokens
    for _ in range(12):  # more blocks in all than the pool has
        shim.before = slowly
        pulling.clear()
        leaving = asyncio.create_task(pair.generate(request(prompt(100))))
        await asyncio.wait_for(pulling.wait(), 5)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        shim.before = None
        answer = await pair.generate(request(prompt(100, seed=1)))
        assert answer.error is None
        assert answer.tokens == expected


async def test_copy_in_doubt_quarantines_its_blocks(grpc_pair: Pair) -> None:
    shim = disturb(grpc_pair)
    quiet = asyncio.Event()

    async def stall(remote: list[int], local: list[int]) -> None:
        raise TransferInDoubt("no progress", quiet)

    shim.before = stall
    answer = await grpc_pair.generate(request(prompt(40)))
    assert isinstance(answer.error, HandoverError)
    assert (await grpc_pair.counts(grpc_pair.decode)).awaiting == 5
    quiet.set()
    await grpc_pair.wait_idle()


async def test_engine_error_during_prefill_ends_the_decode_leg(grpc_pair: Pair) -> None:
    """V07: the real cause reaches the caller, and D waits for nothing."""
    engine = grpc_pair.prefill.runtime.engine
    forward = engine.model.forward
    steps = 0

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal steps
        steps += 1
        if steps == 2:
            raise RuntimeError("out of magic smoke")
        return forward(*args, **kwargs)

    engine.model.forward = failing
    answer = await grpc_pair.generate(request(prompt(100)), timeout_s=5)
    assert answer.error is not None
    assert any("magic smoke" in error.message for error in answer.errors)
    await grpc_pair.wait_idle()
    engine.model.forward = forward
    assert (await grpc_pair.generate(request(prompt(100)))).error is None


# ------------------------------------------------------------------ peers that change


async def test_restarted_prefill_worker(pair: Pair) -> None:
    """V08: same id, same address, new incarnation; the survivor must not use the old one."""
    assert (await pair.generate(request(prompt(30)))).error is None
    port = int(pair.prefill.info.address.rpartition(":")[2])
    old = pair.prefill
    old_source = pair.source()
    await pair.channels.pop(old).close()
    await old.stop()
    config = old.runtime.settings.config
    fresh = await start_worker(config, Role.PREFILL, port=port)
    assert isinstance(fresh, PrefillWorker)
    from rpc.channel import make_channel

    pair.prefill = fresh
    pair.channels[fresh] = make_channel(fresh.info.address)
    stale = pair.decode_call(request(prompt(31)), old_source)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stale:
            pass
    assert isinstance(error_from_rpc(refused.value, "d"), PdserveError)
    answer = await pair.generate(request(prompt(32)))
    alone = await pair.alone(request(prompt(32), cache_salt="x"))
    assert answer.error is None
    assert answer.tokens == alone.tokens


async def test_incompatible_peers_are_refused(tiny_model_dir: Path) -> None:
    """V15: the message names the field that differs."""
    async with running_pair(
        tiny_config(tiny_model_dir),
        tiny_config(tiny_model_dir, block_size=BLOCK + 4, num_kv_blocks=32),
    ) as pair:
        answer = await pair.generate(request(prompt(40)))
        refusal = next(e for e in answer.errors if isinstance(e, IncompatiblePeerError))
        assert "block_size" in refusal.message
        await pair.wait_idle()


async def test_peer_book_keeps_one_incarnation(grpc_pair: Pair) -> None:
    book = grpc_pair.decode.peers
    assert isinstance(book, PeerBook)
    first = await book.get(grpc_pair.source())
    assert await book.get(grpc_pair.source()) is first
    with pytest.raises(StalePeerError):
        await book.get(grpc_pair.source(incarnation="another"))
    assert await book.get(grpc_pair.source()) is first


# ------------------------------------------------------------------ cancels and pressure


async def test_cancel_reaches_prefill_at_the_next_chunk(grpc_pair: Pair) -> None:
    """V23"""
    engine = grpc_pair.prefill.runtime.engine
    forward = engine.model.forward
    chunks = 0
    first_chunk = asyncio.Event()
    loop = asyncio.get_running_loop()

    def counting(*args: object, **kwargs: object) -> object:
        nonlocal chunks
        chunks += 1
        loop.call_soon_threadsafe(first_chunk.set)
        import time

        time.sleep(0.1)
        return forward(*args, **kwargs)

    engine.model.forward = counting
    leaving = asyncio.create_task(grpc_pair.generate(request(prompt(400))))
    await asyncio.wait_for(first_chunk.wait(), 5)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    at_cancel = chunks
    engine.model.forward = forward
    await grpc_pair.wait_idle()
    assert chunks <= at_cancel + 1  # 400 tokens would be 13 chunks


async def test_more_requests_than_decode_has_room_for(tiny_model_dir: Path) -> None:
    """V13: those who wait for D's blocks keep their lease; nobody fails, nothing deadlocks."""
    config = tiny_config(tiny_model_dir, num_kv_blocks=40)
    small = tiny_config(tiny_model_dir, num_kv_blocks=24, max_num_seqs=4)
    transfer = config.kv_transfer.model_copy(update={"lease_seconds": 0.4})
    config, small = (c.model_copy(update={"kv_transfer": transfer}) for c in (config, small))
    async with running_pair(config, small) as pair:
        lengths = [5, 90, 17, 60, 33, 80, 8, 41] * 4
        answers = await asyncio.gather(
            *[
                pair.generate(request(prompt(n, seed=i), max_tokens=20), timeout_s=60)
                for i, n in enumerate(lengths)
            ]
        )
        assert [a.error for a in answers] == [None] * len(lengths)
        for i in (0, 1, 5, 31):
            alone = await pair.alone(
                request(prompt(lengths[i], seed=i), max_tokens=20, cache_salt="x")
            )
            assert answers[i].tokens == alone.tokens
        await pair.wait_idle()


async def test_burst_of_cancels_then_a_probe(grpc_pair: Pair) -> None:
    """V12: cleaning up needs no new work, and no free block."""
    shim = disturb(grpc_pair)

    async def slowly(remote: list[int], local: list[int]) -> None:
        await asyncio.sleep(0.2)

    shim.before = slowly
    for round_ in range(3):
        burst = [
            asyncio.create_task(
                grpc_pair.generate(request(prompt(60, seed=100 * round_ + i)), timeout_s=60)
            )
            for i in range(30)
        ]
        await asyncio.sleep(0.1)
        for task in burst:
            task.cancel()
        await asyncio.gather(*burst, return_exceptions=True)
    shim.before = None
    probe = await grpc_pair.generate(request(prompt(60)), timeout_s=10)
    assert probe.error is None


async def test_preempted_on_decode_recomputes_there(tiny_model_dir: Path) -> None:
    """V11: D's pool is too small for all outputs; whoever is preempted must not ask P again."""
    config = tiny_config(tiny_model_dir)
    small = tiny_config(tiny_model_dir, num_kv_blocks=20)
    async with running_pair(config, small) as pair:
        requests = [request(prompt(24, seed=i), max_tokens=60) for i in range(4)]
        answers = await asyncio.gather(*[pair.generate(r, timeout_s=60) for r in requests])
        stats = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
        assert stats.preemptions_total > 0
        for i, answer in enumerate(answers):
            alone = await pair.alone(request(prompt(24, seed=i), max_tokens=60, cache_salt=f"x{i}"))
            assert answer.tokens == alone.tokens
        await pair.wait_idle()


# ------------------------------------------------------------------ draining and identity


async def test_draining_worker_takes_nothing_new(grpc_pair: Pair) -> None:
    await grpc_pair.prefill.drain()
    answer = await grpc_pair.generate(request(prompt(20)))
    assert answer.error is not None
    assert "draining" in answer.error.message


async def test_wrong_incarnation_is_refused(grpc_pair: Pair) -> None:
    call = grpc_pair.stub(worker_pb2_grpc.DecodeServiceStub, grpc_pair.decode).Decode(
        pb.DecodeRequest(incarnation="an earlier life")
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert isinstance(error_from_rpc(refused.value, "decode-0"), StalePeerError)


async def test_prompt_too_long_for_one_side_never_decodes(tiny_model_dir: Path) -> None:
    """V22"""
    config = tiny_config(tiny_model_dir, max_model_len=64)
    big = tiny_config(tiny_model_dir, max_model_len=128)
    async with running_pair(config, big) as pair:
        for length, is_accepted in ((62, True), (63, True), (64, False), (65, False)):
            answer = await pair.generate(request(prompt(length), max_tokens=1))
            if is_accepted:
                assert answer.error is None and len(answer.tokens) == 1
            else:
                assert isinstance(answer.error, RequestError)
                assert answer.tokens == []
        await pair.wait_idle()
