"""What a worker tells routers of its prefix cache and its speeds."""

import asyncio
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from core.block_hash import block_hashes, short_hash
from core.errors import OverloadedError
from engine.meter import StepMeter
from router.placement.prefix_index import Holdings, PrefixIndex
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from support.pair import BLOCK, Pair, prompt, request, running_pair, tiny_config
from worker import kv_events
from worker.kv_events import KvEventHub
from worker.link_speed import LinkSpeeds
from worker.status import status_of


def names(tokens: list[int]) -> list[int]:
    return [short_hash(value) for value in block_hashes(tokens, BLOCK)]


async def follow(pair: Pair, worker, holdings: Holdings) -> None:
    """What a router does with the stream."""
    stub = pair.stub(worker_pb2_grpc.WorkerServiceStub, worker)
    due = 1
    asked = pb.WatchKvBlocksRequest(incarnation=worker.info.incarnation)
    async for event in stub.WatchKvBlocks(asked):
        assert (event.incarnation, event.sequence) == (worker.info.incarnation, due)
        assert event.is_snapshot == (due == 1)
        due += 1
        holdings.apply(event)


async def agree(pair: Pair, worker, holdings: Holdings) -> None:
    """Waits until the index has exactly what the worker's pool can find."""

    def found(engine) -> set[int]:
        return {short_hash(value) for value in engine.pool._block_of}

    async with asyncio.timeout(10):
        while holdings._stored != await worker.runtime.run_on_engine(found):
            await asyncio.sleep(0.01)


async def test_an_index_that_listens_is_exact_through_hits_and_evictions(tiny_model_dir: Path):
    config = tiny_config(tiny_model_dir, num_kv_blocks=24)
    async with running_pair(config) as pair:
        index = PrefixIndex()
        workers = (pair.prefill, pair.decode)
        first = [*prompt(40), 1]
        await pair.generate(request(first))
        assert (await pair.alone(request(prompt(30, 1)))).error is None  # as colocated
        holdings = [index.open(24) for _ in workers]
        streams = [
            asyncio.create_task(follow(pair, worker, held))
            for worker, held in zip(workers, holdings, strict=True)
        ]
        for worker, held in zip(workers, holdings, strict=True):
            await agree(pair, worker, held)
        assert index.match(names(first)) == dict.fromkeys(holdings, 5)
        for seed in range(2, 9):  # more than fits: blocks are handed out again
            await pair.generate(request(prompt(70, seed)))
        for worker, held in zip(workers, holdings, strict=True):
            await agree(pair, worker, held)
            # Prompts are found again as far as the index says, and no further.
            known = held.match(names([*first][:-1]))
            hits = await worker.runtime.run_on_engine(
                lambda engine: len(engine.pool.find(block_hashes(first[:-1], BLOCK)))
            )
            assert known == hits
        await pair.wait_idle()
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_the_stream_names_its_incarnation_and_the_status_has_speeds(tiny_model_dir: Path):
    async with running_pair(tiny_config(tiny_model_dir)) as pair:
        stub = pair.stub(worker_pb2_grpc.WorkerServiceStub, pair.prefill)
        with pytest.raises(grpc.aio.AioRpcError, match="has restarted"):
            await stub.WatchKvBlocks(pb.WatchKvBlocksRequest(incarnation="old")).read()
        before = status_of(pair.prefill.runtime)
        assert before.prefill_tokens_per_second == before.decode_step_seconds == 0
        answer = await pair.generate(request(prompt(60), max_tokens=8))
        assert answer.error is None
        for worker in (pair.prefill, pair.decode):
            await worker.runtime._take_snapshot()
        prefill, decode = status_of(pair.prefill.runtime), status_of(pair.decode.runtime)
        assert prefill.prefill_tokens_per_second > 0
        assert prefill.decode_step_seconds == decode.prefill_tokens_per_second == 0
        assert decode.decode_step_seconds + decode.decode_sequence_seconds > 0
        assert [link.peer_incarnation for link in decode.links] == [pair.prefill.info.incarnation]
        assert decode.links[0].bytes_per_second > 0


def note(hub: KvEventHub, start: int, end: int, is_stored: bool = True) -> None:
    for number in range(start, end):
        hub.note(number.to_bytes(32, "little"), is_stored)


async def test_a_reader_that_falls_behind_gets_a_fresh_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_events, "_MIN_SECONDS", 0)
    hub = KvEventHub("me", 1024)
    note(hub, 0, 10_000)
    async with aclosing(hub.messages()) as messages:
        first = await anext(messages)
        await asyncio.sleep(0)
        assert (first.is_snapshot, first.sequence, len(first.stored)) == (True, 1, 0)
        # Before anything else was read, everything came and most of it went again.
        note(hub, 0, 9_000, is_stored=False)
        (reader,) = hub._readers
        await asyncio.sleep(0)
        assert not reader.changes and reader.needs_snapshot
        second = await anext(messages)
        assert (second.is_snapshot, second.sequence) == (True, 2)
        assert set(second.stored) == set(range(9_000, 10_000))
        note(hub, 20_000, 20_002)
        note(hub, 20_001, 20_002, is_stored=False)
        note(hub, 9_999, 10_000, is_stored=False)
        third = await anext(messages)
        assert (third.is_snapshot, third.sequence) == (False, 3)
        assert list(third.stored) == [20_000] and set(third.removed) == {20_001, 9_999}
    assert not hub._readers


async def test_the_first_change_goes_at_once_and_those_behind_it_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A message for each block costs worker and router as much as the step's tokens."""
    monkeypatch.setattr(kv_events, "_MIN_SECONDS", 1.0)
    hub = KvEventHub("me", 1024)
    async with aclosing(hub.messages()) as messages:
        await anext(messages)
        note(hub, 0, 1)
        async with asyncio.timeout(0.9):
            assert list((await anext(messages)).stored) == [0]
        for number in range(1, 6):
            note(hub, number, number + 1)
            await asyncio.sleep(0.01)
        assert list((await anext(messages)).stored) == [1, 2, 3, 4, 5]


async def test_a_big_snapshot_comes_in_pieces():
    hub = KvEventHub("me", 50_000)
    note(hub, 0, 20_000)
    await asyncio.sleep(0)
    found: set[int] = set()
    async with aclosing(hub.messages()) as messages:
        for sequence in (1, 2, 3):
            piece = await anext(messages)
            assert (piece.sequence, piece.is_snapshot) == (sequence, sequence == 1)
            found.update(piece.stored)
    assert found == set(range(20_000))


async def test_readers_are_bounded():
    hub = KvEventHub("me", 16)
    readers = [hub.messages() for _ in range(65)]
    for reader in readers[:64]:
        await anext(reader)
    with pytest.raises(OverloadedError):
        await anext(readers[64])
    await readers[0].aclose()
    again = hub.messages()
    await anext(again)
    for reader in (*readers[1:64], again):
        await reader.aclose()


def test_the_meter_finds_prefill_speed_and_the_line_of_decode_steps():
    meter = StepMeter()
    assert meter.prefill_tokens_per_second == 0 and meter.decode_line == (0.0, 0.0)
    for batch in (1, 4, 2, 8, 3):
        meter.note(0, batch, 0.010 + 0.002 * batch)
    assert meter.decode_line == pytest.approx((0.010, 0.002))
    for _ in range(2000):
        meter.note(0, 6, 0.030)
    # No slope can be told from one size of batch.
    assert meter.decode_line == pytest.approx((0.030, 0.0), rel=1e-3)
    meter.note(500, 0, 0.5)
    assert meter.prefill_tokens_per_second == pytest.approx(1000)
    for _ in range(200):
        meter.note(100, 3, 0.2)  # decoding beside a prompt makes it slower
    assert meter.prefill_tokens_per_second == pytest.approx(500)


def test_link_speeds_move_and_are_bounded():
    links = LinkSpeeds()
    links.note("a", 1000, 0.0)
    links.note("a", 0, 1.0)
    assert links.items() == []
    for _ in range(40):
        links.note("a", 1000, 1.0)
    links.note("b", 500, 0.1)
    assert dict(links.items()) == pytest.approx({"a": 1000, "b": 5000})
    for _ in range(40):
        links.note("a", 3000, 1.0)
    assert dict(links.items())["a"] == pytest.approx(3000, rel=1e-3)
    for number in range(300):
        links.note(str(number), 1, 1.0)
    assert len(links.items()) == 256 and links.items()[-1][0] == "299"
