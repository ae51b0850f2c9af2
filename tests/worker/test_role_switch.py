"""Workers that change their role under a real router: streams go on, nothing is loaded again."""

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
import pytest
from test_placed_on_real_workers import Listed, complete, predicted, synced

import worker.engine_setup
from core.config import Config, parse_config
from core.errors import EngineError, RequestError
from core.types import Role, WorkerState
from core.worker_settings import WorkerSettings
from dual_worker import DualWorker
from router.server import RouterServer
from rpc import worker_pb2
from support.byte_tokenizer import byte_tokenizer
from support.fake_cluster import FakeCluster
from support.pair import Pair, prompt, request, with_rendezvous
from support.waiting import eventually
from worker.follower import FollowerWorker

READY, DRAINING = worker_pb2.WORKER_STATE_READY, worker_pb2.WORKER_STATE_DRAINING
TEXT = """
model: {folder}
dtype: float32
engine: {{block_size: 8, num_kv_blocks: 160, threads: 1}}
pools:
  prefill: {{roles: [prefill, decode], engine: {{max_num_batched_tokens: 64, max_num_seqs: 8}}}}
  decode: {{roles: [prefill, decode], engine: {{max_num_batched_tokens: 32, max_num_seqs: 16}}}}
router: {{http: "127.0.0.1:0", grpc: "127.0.0.1:0"}}
"""


async def started(config: Config, role: Role, worker_id: str) -> DualWorker:
    roles = (Role.PREFILL, Role.DECODE)
    made = DualWorker(WorkerSettings(worker_id, role, config, roles=roles))
    await made.start(lambda text: None)
    return made


@dataclass
class Pools:
    cluster: FakeCluster
    server: RouterServer
    http: httpx.AsyncClient
    workers: dict[str, DualWorker]

    async def switch(self, worker_id: str, role: Role, grace_s: float) -> float:
        """As the controller does it. Returns the seconds until the router places on it."""
        began = time.monotonic()
        self.cluster.set_state(worker_id, DRAINING)
        await self.workers[worker_id].switch(role, grace_s)
        self.cluster.set_state(worker_id, READY)
        ours = self.server.registry
        await eventually(lambda: worker_id in [w.id for w in ours.ready(role)])
        return time.monotonic() - began

    async def answers(self) -> tuple[list[list[int]], int]:
        """Of four requests, and how many attempts they took."""
        asked = (self._answer(prompt(40, seed)) for seed in range(4))
        answers = await asyncio.gather(*asked)
        return [tokens for tokens, _ in answers], sum(count for _, count in answers)

    async def _answer(self, tokens: list[int]) -> tuple[list[int], int]:
        body = {"model": "tiny", "prompt": tokens, "max_tokens": 150, "temperature": 0,
                "return_token_ids": True, "ignore_eos": True, "timings": True}  # fmt: skip
        response = await self.http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer = response.json()
        (sequence,) = answer["timings"]["sequences"]
        return answer["choices"][0]["token_ids"], len(sequence["attempts"])

    async def streaming(self, worker_id: str) -> "asyncio.Task[tuple[list[list[int]], int]]":
        """Answers under way, all on this decode worker, and well past their first tokens."""
        engine = self.workers[worker_id].runtime.engine
        before = engine.stats().tokens_decoded_total
        task = asyncio.create_task(self.answers())
        await eventually(lambda: len(engine.scheduler.running) == 4)
        await eventually(lambda: engine.stats().tokens_decoded_total > before + 100)
        return task

    async def check_nothing_left(self) -> None:
        for each in self.workers.values():
            await eventually(lambda each=each: not each.num_requests and not len(each.leases))
            async with asyncio.timeout(10):
                while await each.runtime.run_on_engine(lambda engine: engine.num_sequences):
                    await asyncio.sleep(0.01)
            counts = await each.runtime.run_on_engine(lambda engine: engine.block_counts())
            assert counts.running == counts.held == counts.awaiting == 0
            assert counts.free + counts.cached == counts.total
            await each.runtime.run_on_engine(lambda engine: engine.check_integrity())


@asynccontextmanager
async def pools(folder: Path) -> AsyncIterator[Pools]:
    """worker-0 and worker-1 prefill, worker-2 decodes."""
    config = parse_config(TEXT.format(folder=folder))
    cluster = FakeCluster()
    await cluster.start()
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE)
    made = [await started(config, role, f"worker-{i}") for i, role in enumerate(roles)]
    for each in made:
        cluster.workers[each.info.id] = Listed(each)
        cluster.set_state(each.info.id, READY)
    server = RouterServer(config, "tiny", byte_tokenizer(), cluster.controller)
    await server.start()
    try:
        url = f"http://127.0.0.1:{server.http_port}"
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            ours = server.registry.workers
            await eventually(lambda: len(ours) == 3 and all(w.is_ready for w in ours.values()))
            yield Pools(cluster, server, http, {each.info.id: each for each in made})
    finally:
        await server.close(grace_s=0.2)
        for each in made:
            await each.stop()
        await cluster.stop_controller()


async def test_workers_change_pools_under_load_without_loading_again(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="dual_worker")
    loads = []
    load_model = worker.engine_setup.load_model
    monkeypatch.setattr(
        worker.engine_setup,
        "load_model",
        lambda *args, **kwargs: loads.append(args) or load_model(*args, **kwargs),
    )
    async with pools(tiny_model_dir) as it:
        assert len(loads) == 3
        engines = {i: (w.runtime.engine, w.runtime.engine.kv_cache.data_ptr())
                   for i, w in it.workers.items()}  # fmt: skip
        expected, _ = await it.answers()

        # One that idles, while the decode worker is busy: its streams notice nothing.
        running, old = await it.streaming("worker-2"), it.workers["worker-1"].info.incarnation
        seconds = await it.switch("worker-1", Role.DECODE, grace_s=10)
        assert not running.done()
        print(f"switched under load of the other pool in {seconds:.3f} s")
        info = it.workers["worker-1"].info
        assert info.incarnation != old and info.role == worker_pb2.ROLE_DECODE
        assert (info.max_batched_tokens, info.max_num_seqs) == (32, 16)
        assert it.workers["worker-1"].runtime.engine.scheduler._max_num_batched_tokens == 32
        assert await running == (expected, 4)

        # One with four streams and no grace: they go on where the first one went.
        it.cluster.set_state("worker-1", DRAINING)
        await eventually(lambda: len(it.server.registry.ready(Role.DECODE)) == 1)
        running = await it.streaming("worker-2")
        it.cluster.set_state("worker-1", READY)
        await eventually(lambda: len(it.server.registry.ready(Role.DECODE)) == 2)
        await it.switch("worker-2", Role.PREFILL, grace_s=0)
        assert await running == (expected, 8)

        # All in their new places: what the caches held is known and found.
        await synced(it.server, list(it.workers.values()))
        assert predicted(it.server, prompt(40, 0)).keys() == it.workers.keys()
        assert predicted(it.server, prompt(40, 0))["worker-2"] >= 32
        sent_before = it.workers["worker-2"].runtime.kv_bytes_sent
        it.cluster.set_state("worker-0", DRAINING)
        await eventually(lambda: len(it.server.registry.ready(Role.PREFILL)) == 1)
        _, cached, attempt = await complete(it.http, prompt(40, 0), max_tokens=150)
        assert (attempt["prefill_worker"], attempt["decode_worker"]) == ("worker-2", "worker-1")
        assert cached >= 32
        assert await it.answers() == (expected, 4)
        new, _, _ = await complete(it.http, prompt(60, 9))  # that no cache holds
        assert it.workers["worker-2"].runtime.kv_bytes_sent > sent_before
        await it.switch("worker-2", Role.DECODE, grace_s=5)
        it.cluster.set_state("worker-0", READY)
        await eventually(lambda: it.server.registry.can_serve())
        assert await it.answers() == (expected, 4)
        assert (await complete(it.http, prompt(60, 9)))[0] == new

        await it.check_nothing_left()
        assert len(loads) == 3
        assert caplog.text.count("switched in") == 3  # with the seconds that it took
        for worker_id, (engine, address) in engines.items():
            assert it.workers[worker_id].runtime.engine is engine
            assert engine.kv_cache.data_ptr() == address


@asynccontextmanager
async def of_two_ranks(config: Config, role: Role, worker_id: str) -> AsyncIterator[DualWorker]:
    roles = (Role.PREFILL, Role.DECODE)
    settings = with_rendezvous(WorkerSettings(worker_id, role, config, roles=roles))
    follower = FollowerWorker(replace(settings, rank=1, rendezvous_fd=None))
    made = DualWorker(settings)
    await asyncio.gather(*(part.start(lambda text: None) for part in (made, follower)))
    try:
        yield made
    finally:
        await asyncio.gather(made.stop(), follower.stop())
        assert not follower.failed.done()


async def test_workers_of_two_ranks_change_places(tiny_model_dir: Path) -> None:
    """Each rank reads its part of the KV out of ranks whose worker has just become a prefill
    worker; what is computed stays the same."""
    text = TEXT.replace("roles: [", "tensor_parallel_size: 2, roles: [")
    config = parse_config(text.format(folder=tiny_model_dir))
    asked = [prompt(60, seed) for seed in range(3)]
    async with (
        of_two_ranks(config, Role.PREFILL, "worker-0") as first,
        of_two_ranks(config, Role.DECODE, "worker-1") as second,
    ):
        before, after = Pair(first, second), Pair(second, first)
        answers = [await before.generate(request(tokens)) for tokens in asked[:2]]
        assert not any(answer.errors for answer in answers)
        await before.wait_idle()
        await asyncio.gather(first.switch(Role.DECODE, 5.0), second.switch(Role.PREFILL, 5.0))
        sent = second.runtime.kv_bytes_sent
        again = [await after.generate(request(tokens)) for tokens in asked]
        assert not any(answer.errors for answer in again)
        assert [a.tokens for a in again[:2]] == [a.tokens for a in answers]
        assert again[2].tokens == (await after.alone(request(asked[2]))).tokens
        assert second.runtime.kv_bytes_sent > sent
        await after.wait_idle()
        for pair in (before, after):
            for channel in pair.channels.values():
                await channel.close()


async def test_a_worker_whose_blocks_are_in_use_stays_what_it_is(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dual_worker.worker._END_S", 0.05)
    config = parse_config(TEXT.format(folder=tiny_model_dir))
    it = await started(config, Role.DECODE, "worker-0")
    try:
        old = it.info.incarnation
        # As a copy in doubt leaves them: reserved, and nobody there who waits.
        await it.runtime.run_on_engine(lambda e: e.add_remote(request(prompt(20), 4, "doubt")))
        with pytest.raises(EngineError, match="1 sequences still have blocks"):
            await it.switch(Role.PREFILL, 0.0)
        assert it.runtime.state is WorkerState.READY
        assert (it.role, it.info.incarnation) == (Role.DECODE, old)
        it.runtime.abort("doubt")
        with pytest.raises(RequestError, match="worker-0 cannot be a colocated worker"):
            await it.switch(Role.COLOCATED, 0.0)
        await it.switch(Role.DECODE, 0.0)
        assert it.info.incarnation == old
        await it.switch(Role.PREFILL, 0.0)
        assert it.role is Role.PREFILL and it.info.incarnation != old
    finally:
        await it.stop()
