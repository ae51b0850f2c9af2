"""A real router on free ports, in front of fake workers, in the test's own loop."""

import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from core.config import parse_config
from core.types import Role
from router.request.pipeline import Waits
from router.server import RouterServer
from router.text.tokenizer import Tokenizer
from support.byte_tokenizer import byte_tokenizer
from support.fake_cluster import FakeCluster
from support.fake_workers import FakeWorker
from support.waiting import eventually

MODEL = "fake"


@dataclass(slots=True)
class Running:
    """A router and its cluster. `http` is a client with the router as its base."""

    server: RouterServer
    cluster: FakeCluster
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.http_port}"

    def worker(self, worker_id: str) -> FakeWorker:
        return self.cluster.workers[worker_id]

    async def post(self, path: str = "/v1/completions", **fields: object) -> httpx.Response:
        return await self.http.post(path, json={"model": MODEL, **fields})

    async def complete(self, prompt: object, **fields: object) -> dict:
        response = await self.post(prompt=prompt, temperature=0, **fields)
        assert response.status_code == 200, response.text
        return response.json()

    async def ready(self) -> None:
        """Until the router knows every worker that the cluster says is ready."""
        ours = self.server.registry.workers

        def known() -> bool:
            return all(
                worker.id in ours
                and ours[worker.id].incarnation == worker.incarnation
                and ours[worker.id].is_ready
                for worker in self.cluster.workers.values()
            )

        await eventually(known)

    async def synced(self) -> None:
        """Until the router has heard of every KV block that a worker has."""

        def same() -> bool:
            ours = self.server.registry.workers
            return all(
                (holdings := ours[worker.id].holdings) is not None
                and len(holdings) == len(worker.cached)
                for worker in self.cluster.workers.values()
            )

        await eventually(same)

    async def idle(self) -> None:
        """Until nothing is in flight anywhere."""
        await eventually(lambda: self.cluster.is_quiet)
        await eventually(lambda: not self.in_flight)

    @property
    def in_flight(self) -> float:
        workers = self.server.registry.workers.values()
        return self.server.admission.in_flight + sum(worker.num_passengers for worker in workers)


@asynccontextmanager
async def running(
    *settings: str,
    prefills: int = 1,
    decodes: int = 1,
    colocated: int = 0,
    prepare: Callable[[FakeWorker], None] | None = None,
    waits: Waits = Waits(first_s=0.3, again_s=5.0),
    tokenizer: Tokenizer | None = None,
    scheme: str = "http",
    ca_file: str | None = None,
) -> AsyncIterator[Running]:
    """A router over that many fake workers; `settings` as for --set. `ca_file`: of https."""
    cluster = FakeCluster()
    await cluster.start()
    counts = {Role.PREFILL: prefills, Role.DECODE: decodes, Role.COLOCATED: colocated}
    config = parse_config(
        "model: fake\nrouter: {http: '127.0.0.1:0', grpc: '127.0.0.1:0'}",
        [*settings, *(["mode=colocated"] if colocated else [])],
    )
    try:
        for role, count in counts.items():
            for index in range(count):
                await cluster.add(f"{role.value}-{index}", role, prepare)
        tokenizer = tokenizer or byte_tokenizer()
        server = RouterServer(config, MODEL, tokenizer, cluster.controller, waits)
        await server.start()
        url = f"{scheme}://127.0.0.1:{server.http_port}"
        context = ssl.create_default_context(cafile=ca_file) if ca_file is not None else True
        async with httpx.AsyncClient(base_url=url, timeout=30, verify=context) as http:
            it = Running(server, cluster, http)
            try:
                await it.ready()
                yield it
            finally:
                await server.close(grace_s=0.2)
    finally:
        await cluster.close()
