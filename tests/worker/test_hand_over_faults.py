"""The hand-over over a bad connection, between peers that stall, restart and fail midway; and that
pulls overlap with the prefill.

Each test ends with `wait_idle` on both sides and a next request that is served.
"""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.errors import HandoverError, IncompatiblePeerError, RequestError, UnavailableError
from core.types import Role
from decode_worker.kv_import import KVImport
from kv_transfer.receive import ReceiveState
from prefill_worker import PrefillWorker
from rpc.channel import make_channel
from support.kv_proxy import FaultyProxy
from support.pair import (
    BLOCK,
    Answer,
    Pair,
    disturb,
    hand_over_config,
    prompt,
    request,
    running_pair,
    serves,
    start_worker,
)

NUM_TOKENS = 100  # 13 blocks in 4 chunks
CHUNK_BLOCKS = 4


@asynccontextmanager
async def proxied(pair: Pair) -> AsyncIterator[FaultyProxy]:
    """D reaches P through a proxy; afterwards both must be idle, and serve."""
    proxy = await FaultyProxy(pair.prefill.info.address).start()
    pair.via = proxy.address
    try:
        yield proxy
        proxy.resume()
        await pair.wait_idle(timeout_s=3)
        await serves(pair)
        assert proxy.num_connections > 0
    finally:
        await proxy.close()


def is_right_or_failed(answer: Answer, tokens: list[int]) -> bool:
    """One outcome; and never a wrong token, whichever it is."""
    if answer.error is None:
        return answer.tokens == tokens
    return answer.tokens == tokens[: len(answer.tokens)]


# ------------------------------------------------------------------ overlap


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_blocks_are_pulled_while_later_chunks_are_computed(
    tiny_model_dir: Path, transport: str
) -> None:
    """Chunk n + 1 is held inside P's model until D has all the blocks of chunk n: that can only
    end if they are announced and pulled while the engine computes."""
    async with running_pair(hand_over_config(tiny_model_dir, transport)) as pair:
        shim = disturb(pair)
        engine = pair.prefill.runtime.engine
        forward = engine.model.forward
        events: list[str] = []
        arrived = threading.Semaphore(0)
        num_chunks = 0

        def after(kv_cache: object, local: list[int]) -> None:
            events.append(f"pulled {len(local)}")
            arrived.release()

        def paced(*args: object, **kwargs: object) -> object:
            nonlocal num_chunks
            num_chunks += 1
            if num_chunks > 1 and not arrived.acquire(timeout=5):
                events.append("no overlap")
            events.append(f"chunk {num_chunks}")
            return forward(*args, **kwargs)

        shim.after = after
        engine.model.forward = paced
        answer = await pair.generate(request(prompt(NUM_TOKENS)))
        engine.model.forward = forward
        assert answer.error is None
        assert events == [
            "chunk 1", "pulled 4", "chunk 2", "pulled 4", "chunk 3", "pulled 4", "chunk 4",
            "pulled 1",
        ]  # fmt: skip
        # The same as P and D report it: after the commit, only the last chunk's blocks.
        assert answer.decode_started is not None
        block_bytes = pair.decode.info.kv_block_bytes
        sizes = [pull.bytes // block_bytes for pull in answer.decode_started.pulls]
        assert sizes == [CHUNK_BLOCKS, CHUNK_BLOCKS, CHUNK_BLOCKS, 1]
        await pair.wait_idle()


async def test_a_link_slower_than_the_prefill_sends_nothing_twice(pair: Pair) -> None:
    """Blocks that became ready during a pull go as one; each block travels once."""
    shim = disturb(pair)
    engine = pair.prefill.runtime.engine
    forward = engine.model.forward
    pulling = threading.Event()
    num_chunks = 0

    def paced(*args: object, **kwargs: object) -> object:
        nonlocal num_chunks
        num_chunks += 1
        assert num_chunks == 1 or pulling.wait(5)
        return forward(*args, **kwargs)

    async def slowly(remote: list[int], local: list[int]) -> None:
        pulling.set()
        (lease,) = pair.prefill.leases._leases.values()
        while lease.num_ready_blocks < 13:
            await asyncio.sleep(0.005)

    shim.before = slowly
    engine.model.forward = paced
    answer = await pair.generate(request(prompt(NUM_TOKENS)))
    engine.model.forward = forward
    assert answer.error is None
    assert [len(local) for _, local in shim.pulls] == [CHUNK_BLOCKS, 13 - CHUNK_BLOCKS]
    local = [block for _, blocks in shim.pulls for block in blocks]
    assert len(set(local)) == len(local) == 13
    await pair.wait_idle()


# ------------------------------------------------------------------ the connection


@pytest.mark.parametrize("num_bytes", [0, 300, 1500, 9_000, 30_000, 50_000])
async def test_connection_cut_after_some_bytes(pair: Pair, num_bytes: int) -> None:
    """V01, V06: in the greeting, between events, in the middle of a block."""
    tokens = (await pair.alone(request(prompt(NUM_TOKENS), cache_salt="x"))).tokens
    async with proxied(pair) as proxy:
        proxy.break_after(num_bytes)
        answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=8)
        assert is_right_or_failed(answer, tokens)


@pytest.mark.parametrize("fault", ["drop", "duplicate", "flip"])
async def test_garbled_connection(pair: Pair, fault: str) -> None:
    """V24: whatever a broken middlebox does, no wrong block is decoded."""
    tokens = (await pair.alone(request(prompt(NUM_TOKENS), cache_salt="x"))).tokens
    pair.decode.runtime.transports["grpc"]._stall_s = 1.0  # type: ignore[attr-defined]
    async with proxied(pair) as proxy:
        await serves(pair)  # the connection stands
        proxy.break_after(20_000, fault)
        answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=25)
        assert is_right_or_failed(answer, tokens)
        proxy.cut()


async def test_slow_connection_only_takes_longer(pair: Pair) -> None:
    async with proxied(pair) as proxy:
        proxy.delay_s = 0.01
        answer = await pair.generate(request(prompt(NUM_TOKENS)))
        assert answer.error is None
        proxy.delay_s = 0.0


@pytest.mark.parametrize(
    "state",
    [
        ReceiveState.ATTACHED,
        ReceiveState.RESERVING,
        ReceiveState.RESERVED,
        ReceiveState.COMMITTED,
        ReceiveState.RELEASING,
    ],
)
async def test_attach_stream_breaks_in_each_state(
    pair: Pair, state: ReceiveState, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = KVImport._advance
    cuts = 0

    async def cutting(self: KVImport, peer: Any) -> None:
        nonlocal cuts
        if self._machine.state is state and not cuts:
            cuts += 1
            proxy.cut()
        await advance(self, peer)

    tokens = (await pair.alone(request(prompt(NUM_TOKENS), cache_salt="x"))).tokens
    async with proxied(pair) as proxy:
        monkeypatch.setattr(KVImport, "_advance", cutting)
        answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=8)
        assert cuts == 1
        assert is_right_or_failed(answer, tokens)


async def test_attach_stream_breaks_during_a_pull(pair: Pair) -> None:
    shim = disturb(pair)
    async with proxied(pair) as proxy:

        async def cutting(remote: list[int], local: list[int]) -> None:
            shim.before = None
            proxy.cut()
            # The pull does not end by itself: the end of the lease must cancel it.
            await asyncio.Event().wait()

        shim.before = cutting
        answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=8)
        assert isinstance(answer.error, UnavailableError)


async def test_answer_to_the_release_is_lost(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """P has unpinned, D cannot know: it must not decode."""
    leases = pair.prefill.leases
    release = leases.release
    answers = []

    def cutting(request_id: str) -> bool:
        answers.append(release(request_id))
        proxy.cut()
        return answers[-1]

    async with proxied(pair) as proxy:
        with monkeypatch.context() as patch:
            patch.setattr(leases, "release", cutting)
            answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=8)
        assert answers == [True]
        assert isinstance(answer.error, UnavailableError)
        assert answer.decode_started is None


async def test_peer_that_stalls_during_a_pull(pair: Pair) -> None:
    """As after SIGSTOP: everything is open, nothing moves. The bound is the transport's."""
    pair.decode.runtime.transports["grpc"]._stall_s = 0.3  # type: ignore[attr-defined]
    shim = disturb(pair)
    async with proxied(pair) as proxy:

        async def stall(remote: list[int], local: list[int]) -> None:
            proxy.stall()

        shim.before = stall
        answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=5)
        assert isinstance(answer.error, HandoverError)
        assert any("sent no KV" in error.message for error in answer.errors)
        shim.before = None


# ------------------------------------------------------------------ the peer


async def test_prefill_worker_restarts_in_the_middle_of_a_pull(
    pair: Pair, tiny_model_dir: Path
) -> None:
    """V08: what was in flight fails once; the next request finds the new incarnation."""
    shim = disturb(pair)
    old = pair.prefill

    async def stop(remote: list[int], local: list[int]) -> None:
        shim.before = None
        await old.stop()

    shim.before = stop
    answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=10)
    assert answer.error is not None
    assert answer.decode_started is None
    port = int(old.info.address.rpartition(":")[2])
    await pair.channels.pop(old).close()
    fresh = await start_worker(hand_over_config(tiny_model_dir), Role.PREFILL, port=port)
    assert isinstance(fresh, PrefillWorker)
    pair.prefill = fresh
    pair.channels[fresh] = make_channel(fresh.info.address)
    await pair.wait_idle()
    await serves(pair)


@pytest.mark.parametrize("chunk", [1, 2, 3, 4])
async def test_engine_error_at_each_chunk(pair: Pair, chunk: int) -> None:
    """V07: the real cause reaches the caller, and D waits for nothing."""
    engine = pair.prefill.runtime.engine
    forward = engine.model.forward
    steps = 0

    def failing(*args: object, **kwargs: object) -> object:
        nonlocal steps
        steps += 1
        if steps == chunk:
            raise RuntimeError("out of magic smoke")
        return forward(*args, **kwargs)

    engine.model.forward = failing
    answer = await pair.generate(request(prompt(NUM_TOKENS)), timeout_s=5)
    engine.model.forward = forward
    assert any("magic smoke" in error.message for error in answer.errors)
    assert answer.tokens == []
    await pair.wait_idle()
    await serves(pair)


async def test_one_failure_blacklists_nobody(pair: Pair) -> None:
    """V09: the pair serves the very next request, and all after it."""
    shim = disturb(pair)

    async def fail(remote: list[int], local: list[int]) -> None:
        shim.before = None
        raise HandoverError("the wire hiccuped")

    shim.before = fail
    assert (await pair.generate(request(prompt(NUM_TOKENS)))).error is not None
    answers = await asyncio.gather(
        *[pair.generate(request(prompt(20, seed), max_tokens=2)) for seed in range(50)]
    )
    assert [answer.error for answer in answers] == [None] * 50
    await pair.wait_idle()


# ------------------------------------------------------------------ identity


async def test_one_id_used_twice_at_once(pair: Pair) -> None:
    """V25: an attempt has one life; the second use is refused and disturbs nothing."""
    first = request(prompt(NUM_TOKENS), request_id="same")
    second = request(prompt(NUM_TOKENS, 1), request_id="same")
    tokens = (await pair.alone(request(prompt(NUM_TOKENS), cache_salt="x"))).tokens
    call = pair.prefill_call(second)
    running = asyncio.create_task(pair.generate(first))
    await asyncio.sleep(0)
    call.cancel()
    answer = await running
    assert is_right_or_failed(answer, tokens)
    again = await pair.generate(second)
    assert isinstance(again.error, RequestError)
    assert again.tokens == []
    await pair.wait_idle()
    await serves(pair)


async def test_every_field_of_the_handshake_counts(pair: Pair) -> None:
    """V14, V15: dtype, layout, tensor-parallel degree, model, protocol: the refusal names it."""
    ours = pair.decode.runtime.compatibility
    assert {"protocol", "kv_dtype", "num_kv_heads", "block_size", "model"} <= ours.keys()
    for name in [*ours, "a_field_that_P_does_not_know"]:
        pair.decode.runtime.compatibility = {**ours, name: "another"}
        await pair.decode.peers.close()
        answer = await pair.generate(request(prompt(20)))
        refusal = next(e for e in answer.errors if isinstance(e, IncompatiblePeerError))
        assert name in refusal.message
        assert answer.decode_started is None
    pair.decode.runtime.compatibility = ours
    await pair.wait_idle()
    await serves(pair)


@pytest.mark.parametrize("transport", ["nixl", "grpc"])
async def test_more_kv_than_a_message_may_hold(tiny_model_dir: Path, transport: str) -> None:
    """V56: 17 MB in one pull, over gRPC's limits of 4 MiB by default and 16 MiB here."""
    from kv_transfer.wire import PIECE_BYTES
    from rpc.channel import MAX_MESSAGE_BYTES

    config = hand_over_config(
        tiny_model_dir, transport, block_size=256, num_kv_blocks=140, max_num_batched_tokens=512
    )
    async with running_pair(config) as pair:
        transfer = pair.decode.runtime.transports[transport]
        assert transfer.kv_cache.nbytes > MAX_MESSAGE_BYTES > PIECE_BYTES
        lease = pair.prefill.leases.open("big", b"digest", 1)
        pair.prefill.leases.admitted("big", list(range(140)))
        pair.prefill.leases.ready("big", 140)
        pair.prefill.leases.attach("big", b"digest")
        peer = await pair.decode.peers.get(pair.source())
        pair.prefill.runtime.engine.kv_cache.fill_(3.0)
        await transfer.pull(
            peer.source.peer(0, transport), "big", list(range(140)), list(range(140))
        )
        assert bool((transfer.kv_cache == 3.0).all())
        pair.prefill.leases.detach(lease)


def test_keepalive_of_both_ends_agrees() -> None:
    """V55: a client never pings more often than a server allows, streams without data included."""
    from rpc.channel import _CLIENT, _SERVER

    client, server = dict(_CLIENT), dict(_SERVER)
    ping_ms = client["grpc.keepalive_time_ms"]
    assert ping_ms > server["grpc.http2.min_ping_interval_without_data_ms"]
    assert server["grpc.http2.max_ping_strikes"] == 0  # however a proxy bunches them up
    assert client["grpc.http2.max_pings_without_data"] == 0  # pings through any silence
    for end in (client, server):  # the liveness bound, for dead hosts and for stopped processes
        for timeout in ("grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms"):
            assert end["grpc.keepalive_time_ms"] + end[timeout] <= 15_000


def test_blocks_and_chunks_of_this_file() -> None:
    assert -(-NUM_TOKENS // BLOCK) == 13
    assert 32 // BLOCK == CHUNK_BLOCKS
