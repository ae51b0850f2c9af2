"""`router.workers`: several processes on one port, seen as one."""

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.errors import OverloadedError, RateLimitError
from core.types import Role
from router.access.api_keys import KeyStore, hash_key
from router.access.usage import UsageFile
from router.placement.registry import Registry
from router.processes.share import Share, merged_metrics
from router.processes.tally import TallyFile
from router.request.admission import Admission
from router.request.metrics import SEEN_BY_ALL, Metrics
from support.byte_tokenizer import TEMPLATE, byte_tokenizer
from support.fake_answers import answer_text
from support.fake_cluster import FakeCluster
from support.ports import free_port
from support.waiting import eventually

KEY = "pd-one"


def write_model(folder: Path) -> None:
    folder.mkdir()
    byte_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"")


def children_of(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


async def test_two_processes_are_one_router(tmp_path: Path) -> None:
    """A live one: both serve, one /metrics counts both, a key's limit holds over both, a killed
    one comes back, and all of them end with a signal."""
    write_model(tmp_path / "bytes")
    keys = [
        {"name": "one", "sha256": hash_key(KEY), "requests_per_minute": 30},
        {"name": "ops", "sha256": hash_key("pd-ops")},
    ]
    (tmp_path / "keys.yaml").write_text(json.dumps(keys))
    port = free_port()
    config = tmp_path / "config.yaml"
    config.write_text(
        f"model: {tmp_path / 'bytes'}\nrouter: {{http: '127.0.0.1:{port}', grpc: "
        f"'127.0.0.1:{free_port()}', workers: 2, api_keys_file: '{tmp_path / 'keys.yaml'}'}}\n"
    )
    cluster = FakeCluster()
    await cluster.start()
    await cluster.add("prefill-0", Role.PREFILL)
    await cluster.add("decode-0", Role.DECODE)
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", "--config", str(config),
        "--controller", cluster.controller,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"

    async def fresh(path: str, key: str = "pd-ops", **post: object) -> httpx.Response:
        """By a connection of its own: the kernel chooses the process."""
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            headers = {"authorization": f"Bearer {key}"}
            if post:
                return await http.post(path, json={"model": "bytes", **post}, headers=headers)
            return await http.get(path, headers=headers)

    async def until(condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(40):
            while True:
                try:
                    if condition() and all(
                        [(await fresh("/ready")).status_code == 200 for _ in range(20)]
                    ):
                        return
                except httpx.TransportError:
                    pass
                assert child.returncode is None
                await asyncio.sleep(0.05)

    try:
        assert child.stderr is not None
        said = b""
        async with asyncio.timeout(40):
            while b"2 router processes" not in (line := await child.stderr.readline()):
                assert line, said.decode()
                said += line
        await until(lambda: len(children_of(child.pid)) == 2)
        ids, refused = [], 0
        for _ in range(40):
            answer = await fresh("/v1/completions", KEY, prompt="hello", max_tokens=2)
            if answer.status_code == 429:
                refused += 1
                continue
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
        assert 30 <= len(ids) <= 32 and refused == 40 - len(ids), "30 a minute, over both"
        metrics = (await fresh("/metrics")).text
        values = {
            (s.name, *sorted(s.labels.values())): s.value
            for family in text_string_to_metric_families(metrics)
            for s in family.samples
        }
        assert values["pdserve_requests_total", "completions", "ok"] == len(ids)
        assert values["pdserve_time_to_first_token_seconds_count",] == len(ids)
        assert values["pdserve_worker_ready", "decode", "decode-0"] == 1
        assert metrics.count("# TYPE pdserve_requests_total ") == 1
        shown = (await fresh("/debug/requests?limit=100")).json()["requests"]
        assert {one["response_id"] for one in shown} == set(ids)
        for response_id in (ids[0], ids[-1]):
            assert (await fresh(f"/debug/requests/{response_id}")).status_code == 200
        assert (await fresh("/debug/requests/nobody")).status_code == 404
        async with httpx.AsyncClient(base_url=url, timeout=20) as http:
            headers = {"authorization": "Bearer pd-ops"}
            async with http.stream("GET", "/dashboard/events", headers=headers) as feed:
                lines = (line async for line in feed.aiter_lines() if line)
                first = json.loads((await anext(lines)).removeprefix("data: "))
                assert {one["response_id"] for one in first["requests"]} == set(ids)
                assert first["window"]["ttft"] and not first["events"]
                more = [await fresh("/v1/completions", prompt="hello", max_tokens=2)
                        for _ in range(8)]  # fmt: skip
                wanted = {one.headers["x-request-id"] for one in more}
                finished: set[str] = set()
                async with asyncio.timeout(20):
                    while finished != wanted:
                        told = json.loads((await anext(lines)).removeprefix("data: "))["events"]
                        finished |= {one["id"] for one in told if one["kind"] == "finished"}

        before = children_of(child.pid)
        os.kill(before[0], signal.SIGKILL)
        await until(lambda: len(children_of(child.pid)) == 2 and children_of(child.pid) != before)
        answer = await fresh("/v1/completions", "pd-ops", prompt="hello", max_tokens=3,
                             temperature=0)  # fmt: skip
        assert answer.json()["choices"][0]["text"] == answer_text("hello", 3)
        processes = children_of(child.pid)
        child.send_signal(signal.SIGTERM)
        _, err = await child.communicate()
        assert child.returncode == 0, err.decode()
        assert b"Traceback" not in err
        await eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))
    finally:
        if child.returncode is None:
            child.kill()
            await child.communicate()
        await cluster.close()


async def test_what_keeps_one_from_starting_is_said_once(tmp_path: Path) -> None:
    write_model(tmp_path / "bytes")
    config = tmp_path / "config.yaml"
    for key in ("http", "grpc"):
        other = "grpc" if key == "http" else "http"
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            config.write_text(
                f"model: {tmp_path / 'bytes'}\nrouter: {{{key}: '127.0.0.1:{port}', "
                f"{other}: '127.0.0.1:0', workers: 3}}\n"
            )
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "router", "--config", str(config), "--controller", "x:1",
                stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
            )  # fmt: skip
            _, err = await child.communicate()
        assert child.returncode == 1
        assert err.decode().startswith(f"router: router.{key}: cannot listen on 127.0.0.1:{port}")


def test_what_all_processes_have_counts_against_the_limits(tmp_path: Path) -> None:
    """A place that one has taken is taken for all; one that is killed gives back its places when it
    is started again."""
    first, second = (TallyFile(share) for share in shares(tmp_path, 2))
    metrics = Metrics(Registry("x:1", ()))
    ours, theirs = (Admission(3, metrics, tally=file.in_flight) for file in (first, second))

    async def check() -> None:
        with theirs.slot(2), ours.slot(1):
            for one in (ours, theirs):
                with pytest.raises(OverloadedError), one.slot(1):
                    pass
        with ours.slot(3):
            pass

    asyncio.run(check())
    second.in_flight.set(3)
    second.queued.set(7)
    assert (first.in_flight.elsewhere(), first.queued.elsewhere()) == (3, 7)
    assert second.queued.elsewhere() == 0
    again = TallyFile(second.share)
    assert (first.in_flight.elsewhere(), first.queued.elsewhere()) == (0, 0)
    for file in (first, second, again):
        file.close()


def shares(folder: Path, count: int) -> list[Share]:
    return [Share(index, count, folder) for index in range(count)]


def test_limits_of_a_key_are_shared(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    entry = {"name": "a", "sha256": hash_key("k"), "requests_per_minute": 3, "concurrency": 2,
             "tokens_per_minute": 100}  # fmt: skip
    path.write_text(json.dumps([entry]))
    now = 1000.0
    files = [UsageFile(share) for share in shares(tmp_path, 2)]
    stores = [KeyStore(path, lambda: now, file) for file in files]
    one, two = (store.account("Bearer k") for store in stores)
    with one.request(), two.request():
        assert one.in_flight == two.in_flight == 2
        for account in (one, two):
            with pytest.raises(RateLimitError, match="2 requests at once"), account.request():
                pass
    with one.request():
        pass
    with pytest.raises(RateLimitError, match="requests per minute"), two.request():
        pass
    now += 60
    one.spend_tokens(150)
    with pytest.raises(RateLimitError, match="tokens per minute"), two.request():
        pass
    now += 60
    with two.request():
        assert one.in_flight == 1
    for file in files:
        file.close()


def test_a_process_that_was_killed_holds_no_places(tmp_path: Path) -> None:
    first, second = shares(tmp_path, 2)
    dead, alive = UsageFile(first), UsageFile(second)
    digest = hash_key("k")
    dead.of(digest).add_in_flight(3)
    alive.of(digest).add_in_flight(1)
    assert alive.of(digest).in_flight() == 4
    again = UsageFile(first)
    assert again.of(digest).in_flight() == 1
    assert (tmp_path / "usage").stat().st_mode & 0o077 == 0
    for file in (dead, alive, again):
        file.close()


def test_metrics_of_processes_are_added_up_and_those_of_workers_are_not() -> None:
    def text(requests: int, ready: int, extra: str = "") -> str:
        return (
            "# HELP pdserve_requests_total API requests\n# TYPE pdserve_requests_total counter\n"
            f'pdserve_requests_total{{api="chat",outcome="ok"}} {requests}\n{extra}'
            "# HELP pdserve_worker_ready x\n# TYPE pdserve_worker_ready gauge\n"
            f'pdserve_worker_ready{{worker="a",role="decode"}} {ready}\n'
            "# HELP h x\n# TYPE h histogram\n"
            f'h_bucket{{le="1.0"}} {requests}\nh_bucket{{le="+Inf"}} {requests}\n'
            f"h_count {requests}\nh_sum {requests / 2}\n"
        )

    other = 'pdserve_requests_total{api="chat",outcome="error"} 7\n'
    merged = merged_metrics([text(2, 1), text(3, 1, other)], SEEN_BY_ALL).decode()
    samples = {
        (s.name, tuple(sorted(s.labels.values()))): s.value
        for family in text_string_to_metric_families(merged)
        for s in family.samples
    }
    assert samples["pdserve_requests_total", ("chat", "ok")] == 5
    assert samples["pdserve_requests_total", ("chat", "error")] == 7
    assert samples["pdserve_worker_ready", ("a", "decode")] == 1
    assert samples["h_count", ()] == 5 and samples["h_sum", ()] == 2.5
    assert samples["h_bucket", ("1.0",)] == 5
