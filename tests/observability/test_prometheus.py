"""A real Prometheus scrapes a router, loads the alert rules and answers the dashboard's queries."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

from support.ports import free_port
from support.router import running
from support.waiting import eventually

_FOLDER = Path(__file__).parents[2] / "k8s" / "observability"
_PROMETHEUS = shutil.which("prometheus")

pytestmark = pytest.mark.skipif(
    _PROMETHEUS is None, reason="prometheus is not on PATH (Debian: apt install prometheus)"
)


@asynccontextmanager
async def prometheus(target: str, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(_FOLDER / "alerts.yaml")],
        "scrape_configs": [{"job_name": "pdserve", "static_configs": [{"targets": [target]}]}],
    }
    path = folder / "prometheus.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    assert _PROMETHEUS is not None
    process = await asyncio.create_subprocess_exec(
        _PROMETHEUS, f"--config.file={path}", f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
            await _wait_ready(client)
            yield client
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _wait_ready(client: httpx.AsyncClient) -> None:
    """It listens, and answers 503, before it is ready."""
    async with asyncio.timeout(30):
        while True:
            with suppress(httpx.TransportError):
                if (await client.get("/-/ready")).status_code == 200:
                    return
            await asyncio.sleep(0.1)


async def _query(client: httpx.AsyncClient, expression: str) -> list[dict]:
    response = await client.get("/api/v1/query", params={"query": expression})
    assert response.status_code == 200, (expression, response.text)
    return response.json()["data"]["result"]


async def test_prometheus_scrapes_evaluates_and_answers(tmp_path: Path) -> None:
    async with running("router.slo.ttft=60") as it:
        target = it.url.removeprefix("http://")
        async with prometheus(target, tmp_path) as client:
            seen: list[dict] = []

            async def watch() -> None:
                while not seen:
                    seen.extend(await _query(client, "pdserve_worker_ready == 1"))
                    await asyncio.sleep(0.1)

            watching = asyncio.create_task(watch())
            await it.complete("hello", max_tokens=4)
            await eventually(watching.done, timeout_s=30)
            await watching
            assert {s["metric"]["worker"] for s in seen} == {"prefill-0", "decode-0"}
            for panel in json.loads((_FOLDER / "grafana-dashboard.json").read_text())["panels"]:
                for asked in panel.get("targets", ()):
                    await _query(client, asked["expr"].replace("$__rate_interval", "1m"))
            groups = (await client.get("/api/v1/rules")).json()["data"]["groups"]
            rules = [rule for group in groups for rule in group["rules"]]
            assert len(rules) == 10
            assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
