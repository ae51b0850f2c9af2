"""Hand-overs between workers of several ranks, all in this process: gloo, gRPC and NIXL are real.

V14: every pairing of degrees answers like one worker alone; a rank that fails, stalls or is in
doubt ends the hand-over as one rank does.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.config import Config
from core.errors import CorruptBlockError, HandoverError
from core.types import Role
from kv_transfer.base import KVTransfer, TransferInDoubt
from prefill_worker import PrefillWorker
from rpc.cluster_token import VARIABLE
from support import pair as support
from support.pair import FaultyTransfer, Pair, prompt, request, start_worker, tiny_config
from support.tiny_models import VOCAB, make_tiny, save_tiny


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As every deployment has one: calls between ranks carry it too."""
    monkeypatch.setenv(VARIABLE, "secret")


def config_of(model_dir: Path, ranks: int, transport: str = "grpc", **engine: Any) -> Config:
    config = tiny_config(model_dir, **engine)
    pool = config.pools.prefill.model_copy(update={"tensor_parallel_size": ranks})
    return config.model_copy(
        update={
            "pools": config.pools.model_copy(update={"prefill": pool, "decode": pool}),
            "kv_transfer": config.kv_transfer.model_copy(update={"transport": transport}),
        }
    )


@asynccontextmanager
async def ranked_pair(prefill: Config, decode: Config) -> AsyncIterator[Pair]:
    p = await start_worker(prefill, Role.PREFILL)
    d = await start_worker(decode, Role.DECODE)
    assert isinstance(p, PrefillWorker)
    pair = Pair(p, d)  # type: ignore[arg-type]
    try:
        yield pair
        await pair.wait_idle()
    finally:
        await pair.close()


def disturb(pair: Pair, rank: int) -> FaultyTransfer:
    """Puts the shim into one of the decode worker's other ranks."""
    transports: dict[str, KVTransfer] = support._followers[id(pair.decode)][rank - 1]._transports
    shim = transports["grpc"] = FaultyTransfer(transports["grpc"])
    return shim


def tokens_of(length: int, seed: int = 0) -> list[int]:
    return [token % VOCAB for token in prompt(length, seed)]


async def check_equality(pair: Pair) -> None:
    for length in (1, 8, 41):
        tokens = tokens_of(length)
        alone = await pair.alone(request(tokens, cache_salt="b"))
        for _ in range(2):
            handed = await pair.generate(request(tokens, cache_salt="a"))
            assert handed.error is None and handed.tokens == alone.tokens
            assert len(handed.tokens) == 12
            assert handed.decode_started is not None
            if handed.decode_started.num_cached_tokens == 0 and length == 8:
                # What all ranks have pulled together.
                assert handed.decode_started.kv_bytes == pair.decode.info.kv_block_bytes


@pytest.mark.parametrize(
    ("ours", "theirs", "transport"),
    [(1, 2, "nixl"), (2, 1, "grpc"), (2, 2, "grpc"), (2, 4, "grpc"), (4, 1, "nixl")],
)
async def test_any_two_degrees(tmp_path: Path, ours: int, theirs: int, transport: str) -> None:
    """Two KV heads: of four ranks, two have each. P's blocks are larger, in one case."""
    save_tiny(make_tiny("llama"), tmp_path)
    sizes = (16, 8) if (ours, theirs) == (2, 1) else (8, 8)
    configs = [
        config_of(tmp_path, ranks, transport, block_size=size)
        for ranks, size in zip((ours, theirs), sizes, strict=True)
    ]
    async with ranked_pair(*configs) as pair:
        await check_equality(pair)
        assert len(pair.prefill.info.ranks) == ours - 1
        if max(ours, theirs) == 2:  # more processes than this only take longer
            burst = [request(tokens_of(20, seed), max_tokens=4) for seed in range(128)]
            answers = await asyncio.gather(*[pair.generate(r, timeout_s=60) for r in burst])
            assert [answer.error for answer in answers] == [None] * len(burst)


@pytest.mark.parametrize(("ours", "theirs"), [(1, 2), (2, 1)])
async def test_latents_are_on_every_rank(tmp_path: Path, ours: int, theirs: int) -> None:
    save_tiny(make_tiny("deepseek-v2-lite"), tmp_path)
    async with ranked_pair(*(config_of(tmp_path, ranks) for ranks in (ours, theirs))) as pair:
        await check_equality(pair)


@pytest.fixture
async def ranks(tiny_model_dir: Path) -> AsyncIterator[Pair]:
    """P has one rank, D has two."""
    configs = [config_of(tiny_model_dir, degree) for degree in (1, 2)]
    async with ranked_pair(*configs) as pair:
        yield pair


async def serves(pair: Pair) -> None:
    handed = await pair.generate(request(tokens_of(40, 5)))
    alone = await pair.alone(request(tokens_of(40, 5), cache_salt="x"))
    assert handed.error is None and handed.tokens == alone.tokens


async def test_a_pull_that_fails_at_one_rank_ends_both_legs(ranks: Pair) -> None:
    """V06: the terminal failure reaches every rank."""
    shim = disturb(ranks, 1)

    async def fail(remote: list[int], local: list[int]) -> None:
        raise HandoverError("the wire of rank 1 broke")

    shim.before = fail
    answer = await ranks.generate(request(tokens_of(40)), timeout_s=5)
    assert any("rank 1: the wire of rank 1 broke" in e.message for e in answer.errors)
    await ranks.wait_idle(timeout_s=2)
    shim.before = None
    await serves(ranks)


async def test_a_flipped_byte_at_one_rank_is_never_decoded(ranks: Pair) -> None:
    """V24"""
    shim = disturb(ranks, 1)

    def flip(kv_cache: Any, local: list[int]) -> None:
        kv_cache[local[-1]].view(-1)[3] += 1

    shim.after = flip
    answer = await ranks.generate(request(tokens_of(40)))
    assert any(isinstance(error, CorruptBlockError) for error in answer.errors)
    assert answer.decode_started is None
    await ranks.wait_idle()
    shim.after = None
    await serves(ranks)


async def test_a_client_that_leaves_stops_the_pulls_of_all_ranks(ranks: Pair) -> None:
    """V01, V04: nothing is given back before the slowest rank has stopped."""
    shim = disturb(ranks, 1)
    pulling, stopped = asyncio.Event(), asyncio.Event()

    async def wait(remote: list[int], local: list[int]) -> None:
        pulling.set()
        try:
            await asyncio.Event().wait()
        finally:
            counts = await ranks.counts(ranks.decode)
            assert counts.awaiting == 5  # still: this rank might write
            stopped.set()

    shim.before = wait
    leaving = asyncio.create_task(ranks.generate(request(tokens_of(40))))
    await asyncio.wait_for(pulling.wait(), 10)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.wait_for(stopped.wait(), 10)
    await ranks.wait_idle(timeout_s=3)
    shim.before = None
    await serves(ranks)


async def test_a_copy_in_doubt_at_one_rank_quarantines_the_blocks(ranks: Pair) -> None:
    shim = disturb(ranks, 1)
    quiet = asyncio.Event()

    async def stall(remote: list[int], local: list[int]) -> None:
        raise TransferInDoubt("no progress", quiet)

    shim.before = stall
    answer = await ranks.generate(request(tokens_of(40)))
    assert isinstance(answer.error, HandoverError)
    assert (await ranks.counts(ranks.decode)).awaiting == 5
    quiet.set()
    await ranks.wait_idle(timeout_s=3)
    shim.before = None
    await serves(ranks)


async def test_a_rank_that_breaks_off_a_pull_leaves_doubt(ranks: Pair) -> None:
    """Its process may still write: the blocks stay in quarantine for good, which ends with the
    worker. Others are served."""
    remote_rank = ranks.decode.runtime._remote_ranks[0]
    shim = disturb(ranks, 1)
    answered = asyncio.Event()

    async def break_off(remote: list[int], local: list[int]) -> None:
        shim.before = None
        for call in remote_rank._calls:
            call.cancel()
        await answered.wait()

    shim.before = break_off
    answer = await ranks.generate(request(tokens_of(40)))
    assert any("rank 1: does not say what it writes" in e.message for e in answer.errors)
    answered.set()
    assert (await ranks.counts(ranks.decode)).awaiting == 5
    await serves(ranks)
    for task in list(ranks.decode.runtime._background):  # the quarantine's, for the end's sake
        if task.get_coro().__qualname__.startswith("KVImport._watch_quarantine"):  # type: ignore[union-attr]
            task.cancel()
    for request_id in list(ranks.decode.runtime.engine.scheduler.awaiting):
        ranks.decode.runtime.abort(request_id)
