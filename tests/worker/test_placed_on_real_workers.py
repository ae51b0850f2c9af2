"""A real router in front of real workers in this process: what it predicts is what happens."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from core.block_hash import block_hashes, short_hash
from core.types import Role
from router.server import RouterServer
from rpc import cluster_pb2, codec, worker_pb2
from support.byte_tokenizer import byte_tokenizer
from support.fake_cluster import FakeCluster
from support.pair import BLOCK, prompt, start_worker, tiny_config
from support.waiting import eventually


class Listed:
    """A real worker as the fake controller lists it."""

    def __init__(self, worker) -> None:
        self.worker = worker
        self.id = worker.info.id

    def entry(self, state: worker_pb2.WorkerState) -> cluster_pb2.WorkerEntry:
        info = self.worker.info
        return cluster_pb2.WorkerEntry(
            id=info.id, role=info.role, state=state, host="127.0.0.1", pid=1,
            address=info.address, incarnation=info.incarnation,
        )  # fmt: skip


@asynccontextmanager
async def deployment(
    folder: Path, max_local: int = 0
) -> AsyncIterator[tuple[RouterServer, httpx.AsyncClient, list]]:
    """Two prefill workers and a decode worker."""
    config = tiny_config(folder, num_kv_blocks=48)
    changes = {"http": "127.0.0.1:0", "grpc": "127.0.0.1:0", "max_local_prefill_tokens": max_local}
    config = config.model_copy(update={"router": config.router.model_copy(update=changes)})
    cluster = FakeCluster()
    await cluster.start()
    workers = [
        await start_worker(config, role, name)
        for role, name in (
            (Role.PREFILL, "prefill-0"), (Role.PREFILL, "prefill-1"), (Role.DECODE, "decode-0"),
        )
    ]  # fmt: skip
    for worker in workers:
        cluster.workers[worker.info.id] = Listed(worker)
        cluster.states[worker.info.id] = codec.state_to_pb(worker.runtime.state)
    server = RouterServer(config, "tiny", byte_tokenizer(), cluster.controller)
    await server.start()
    url = f"http://127.0.0.1:{server.http_port}"
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30) as http:
            ours = server.registry.workers
            await eventually(lambda: len(ours) == 3 and all(w.is_ready for w in ours.values()))
            yield server, http, workers
    finally:
        await server.close(grace_s=0.2)
        for worker in workers:
            await worker.stop()
        await cluster.stop_controller()


async def complete(
    http: httpx.AsyncClient, tokens: list[int], **fields
) -> tuple[list[int], int, dict]:
    """Token ids of the answer, prompt tokens that were found cached, and the attempt's view."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 6, "temperature": 0,
            "return_token_ids": True, "ignore_eos": True, "timings": True, **fields}  # fmt: skip
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer = response.json()
    cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    (sequence,) = answer["timings"]["sequences"]
    (attempt,) = sequence["attempts"]
    return answer["choices"][0]["token_ids"], cached, attempt


def predicted(server: RouterServer, tokens: list[int]) -> dict[str, int]:
    """Prompt tokens that each worker is believed to have."""
    names = [short_hash(value) for value in block_hashes(tokens[:-1], BLOCK)]
    ours = server.registry.workers
    return {name: BLOCK * worker.holdings.match(names) for name, worker in ours.items()}


async def synced(server: RouterServer, workers: list) -> None:
    """Until the router's index is what the workers' pools are."""
    for worker in workers:
        holdings = server.registry.workers[worker.info.id].holdings
        async with asyncio.timeout(10):
            while holdings._stored != await worker.runtime.run_on_engine(
                lambda engine: {short_hash(value) for value in engine.pool._block_of}
            ):
                await asyncio.sleep(0.01)


async def test_predicted_hits_are_real_ones_through_evictions_and_salts(tiny_model_dir: Path):
    """V49, on real workers whose caches hold three prompts each."""
    async with deployment(tiny_model_dir) as (server, http, workers):
        hits = 0
        for seed in (0, 0, 1, 2, 1, 3, 4, 5, 0, 5, 2):
            tokens = prompt(100, seed)
            await synced(server, workers)
            expected = predicted(server, tokens)
            _, cached, attempt = await complete(http, tokens)
            assert cached == expected[attempt["prefill_worker"]], seed
            hits += cached > 0
        assert 0 < hits < 11
        _, cached, _ = await complete(http, prompt(100, 5), cache_salt="another")
        assert cached == 0
        view = {w["id"]: w for w in (await http.get("/cluster")).json()["workers"]}
        assert view["prefill-0"]["prefill_tokens_per_second"] > 0
        assert view["decode-0"]["decode_step_seconds"] > 0
        assert view["decode-0"]["kv_blocks_known"] > 0
        assert server.registry.workers["decode-0"].links


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 3}], ids=["greedy", "seed"])
async def test_a_prompt_has_the_same_answer_wherever_it_is_prefilled(
    tiny_model_dir: Path, sampling
):
    async with deployment(tiny_model_dir) as (_, http, _workers):
        pairs = [await complete(http, prompt(20, seed), **sampling) for seed in range(3)]
        assert all(attempt["decision"] == "disaggregated" for *_, attempt in pairs)
    async with deployment(tiny_model_dir, max_local=64) as (_, http, _workers):
        alone = [await complete(http, prompt(20, seed), **sampling) for seed in range(3)]
        # Which of the later ones are local depends on what the router has heard by then.
        assert alone[0][2]["decision"] == "local"
    assert [ids for ids, *_ in alone] == [ids for ids, *_ in pairs]
