"""The router's own OpenAPI document, fuzzed against real workers with a tiny model (V30, V76)."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis.errors import Unsatisfiable

from router.server import RouterServer
from rpc import worker_pb2
from rpc.cluster_pb2 import WorkerEntry
from support.byte_tokenizer import byte_tokenizer
from support.fake_cluster import FakeCluster
from support.pair import Pair, running_pair, tiny_config
from support.waiting import eventually

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")

NUM_REQUESTS = int(os.environ.get("PDSERVE_FUZZ_REQUESTS", "6000"))
NEVER_ENDS = "/dashboard/events"


@dataclass
class RealWorker:
    """A worker of a pair as FakeCluster lists it."""

    worker: Any
    id: str = ""
    active: int = 0
    held: set[str] = field(default_factory=set)

    def entry(self, state: worker_pb2.WorkerState) -> WorkerEntry:
        info = self.worker.info
        return WorkerEntry(id=info.id, role=info.role, state=state, host="127.0.0.1", pid=1,
                           address=info.address, incarnation=info.incarnation)  # fmt: skip


@dataclass
class Target:
    pair: Pair
    url: str
    document: dict[str, Any]


@pytest.fixture
async def target(tiny_model_dir: Path) -> AsyncIterator[Target]:
    config = tiny_config(tiny_model_dir)
    section = config.router.model_copy(update={"http": "127.0.0.1:0", "grpc": "127.0.0.1:0"})
    config = config.model_copy(update={"router": section})
    cluster = FakeCluster()
    await cluster.start()
    try:
        async with running_pair(config) as pair:
            for worker in (pair.prefill, pair.decode):
                real: Any = RealWorker(worker, worker.info.id)
                cluster.workers[real.id] = real
                cluster.set_state(real.id, worker_pb2.WORKER_STATE_READY)
            server = RouterServer(config, "tiny", byte_tokenizer(), cluster.controller)
            await server.start()
            try:
                await eventually(server.registry.can_serve)
                url = f"http://127.0.0.1:{server.http_port}"
                async with httpx.AsyncClient(base_url=url) as http:
                    document = (await http.get("/openapi.json")).json()
                yield Target(pair, url, document)
            finally:
                await server.close(grace_s=1.0)
    finally:
        await cluster.close()


def modest(case: Any) -> None:
    """Small answers, many requests: what is within the limits is made smaller. A model's name is
    the right one: all else would end with it."""
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model", ""), str):
        body["model"] = "tiny"
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        if type(body.get(name)) is int and body[name] > 4:
            body[name] = 4
    if type(body.get("n")) is int and 4 < body["n"] <= 128:
        body["n"] = 4
    if case.path != "/v1/responses" and "max_tokens" not in body:
        body["max_tokens"] = 2


def fuzz(target: Target, num_requests: int) -> Counter[int]:
    """Sends what the document allows, and what it does not. Fails on any 5xx."""
    schema = schemathesis.openapi.from_dict(target.document)
    operations = [result.ok() for result in schema.get_all_operations()]
    operations = [one for one in operations if one.path != NEVER_ENDS]
    modes = list(schemathesis.GenerationMode)
    posts = [one for one in operations if one.method.upper() == "POST"]
    rest = [one for one in operations if one not in posts]
    statuses: Counter[int] = Counter()

    def send(operation: Any, mode: Any, count: int) -> None:
        @seed(1)
        @settings(max_examples=count, database=None, deadline=None,
                  suppress_health_check=list(HealthCheck))  # fmt: skip
        @given(operation.as_strategy(generation_mode=mode))
        def one(case: Any) -> None:
            modest(case)
            answer = case.call(base_url=target.url, timeout=60)
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (case.method, case.path, case.body, answer.text)

        try:
            one()
        except (schemathesis.errors.SchemathesisError, Unsatisfiable):
            statuses[0] += 1  # the operation takes nothing that could be wrong

    for mode in modes:
        for operation in posts:
            send(operation, mode, max(1, round(0.9 * num_requests / len(posts) / len(modes))))
        for operation in rest:
            send(operation, mode, max(1, round(0.1 * num_requests / len(rest) / len(modes))))
    return statuses


async def check_alive(target: Target) -> None:
    """Every block is free or cached, and a request is answered as ever."""
    await target.pair.wait_idle()
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    async with httpx.AsyncClient(base_url=target.url, timeout=60) as http:
        answers = [await http.post("/v1/completions", json=body) for _ in range(2)]
        texts = [answer.json()["choices"][0]["text"] for answer in answers]
    assert texts[0] == texts[1] and all(answer.status_code == 200 for answer in answers)
    await target.pair.wait_idle()


async def test_a_little_fuzz(target: Target) -> None:
    statuses = await asyncio.to_thread(fuzz, target, 100)
    assert statuses[200] and statuses[400], statuses
    await check_alive(target)


@pytest.mark.slow
async def test_fuzz(target: Target) -> None:
    statuses = await asyncio.to_thread(fuzz, target, NUM_REQUESTS)
    print(dict(statuses))
    assert statuses[200] and statuses[400], statuses
    await check_alive(target)
