"""Processes and clients that die at the worst moment: one outcome for every request, nothing
left in use, and the next request succeeds."""

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import psutil
import pytest
from typer.testing import CliRunner

from cli.control import Target, run_operation
from cli.main import app
from cli.state import find_deployment
from cli.terminal import Reporter
from rpc import cluster_pb2 as pb
from support.live import Live, wait_until
from support.reference import greedy

MODEL = "smollm2-135m"


def long_prompt(seed: int, length: int = 1200) -> list[int]:
    return [1000 + (seed * 7919 + 13 * i) % 40000 for i in range(length)]


class Stream(threading.Thread):
    """One streaming completion, read in the background."""

    def __init__(self, cluster: Live, prompt: Any, max_tokens: int) -> None:
        super().__init__(daemon=True)
        self.cluster, self.prompt, self.max_tokens = cluster, prompt, max_tokens
        self.status = 0
        self.ids: list[int] = []
        self.finish_reasons: list[str] = []
        self.errors: list[dict[str, Any]] = []
        self.num_done = 0
        self.start()

    def run(self) -> None:
        body = {
            "model": MODEL,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        url = f"{self.cluster.url}/v1/completions"
        with httpx.stream("POST", url, json=body, timeout=150) as response:
            self.status = response.status_code
            if response.status_code != 200:
                self.errors.append(json.loads(response.read())["error"])
                return
            for event in _events(response):
                self._take(event)

    def _take(self, event: str) -> None:
        if event == "[DONE]":
            self.num_done += 1
            return
        chunk = json.loads(event)
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        for choice in chunk["choices"]:
            self.ids += choice.get("token_ids") or []
            if choice["finish_reason"]:
                self.finish_reasons.append(choice["finish_reason"])

    def outcome(self, timeout_s: float = 120) -> str:
        """Waits for the end; checks that it is exactly one, and names it."""
        self.join(timeout_s)
        assert not self.is_alive(), "no outcome in time"
        if self.errors:
            assert len(self.errors) == 1
            assert self.num_done == 0, "an error is no success"
            return "error"
        assert self.finish_reasons == ["length"]
        assert self.num_done == 1
        return "complete"


def _events(response: httpx.Response) -> Iterator[str]:
    for line in response.iter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def busy_worker(cluster: Live, role: str) -> dict[str, Any]:
    """The worker of a pool that has something to do."""

    def find() -> dict[str, Any] | None:
        for worker in cluster.workers(role):
            if worker["requests_running"] + worker["requests_waiting"] > 0:
                return worker
        return None

    return dict(wait_until(find, 10, f"a busy {role} worker"))


def kill(worker: dict[str, Any]) -> None:
    os.kill(worker["pid"], signal.SIGKILL)


def wait_replaced(cluster: Live, dead: dict[str, Any]) -> None:
    def is_replaced() -> bool:
        now = {w["id"]: w for w in cluster.workers()}[dead["id"]]
        return now["state"] == "ready" and now["incarnation"] != dead["incarnation"]

    wait_until(is_replaced, 60, f"a fresh {dead['id']}")


@pytest.mark.parametrize("kind", ["2p2d"])
def test_kill_prefill_during_prefill(live: Callable[[str], Live], kind: str) -> None:
    cluster = live(kind)
    prompt = long_prompt(1)
    stream = Stream(cluster, prompt, 8)
    victim = busy_worker(cluster, "prefill")
    kill(victim)
    assert stream.outcome() == "complete"
    assert stream.ids == greedy(prompt, 8)
    wait_replaced(cluster, victim)
    cluster.wait_idle()


@pytest.mark.parametrize("kind", ["2p2d"])
def test_kill_decode_before_the_first_byte(live: Callable[[str], Live], kind: str) -> None:
    cluster = live(kind)
    prompt = long_prompt(2)
    stream = Stream(cluster, prompt, 8)
    busy_worker(cluster, "prefill")
    victim = next(
        w
        for w in wait_until(
            lambda: [w for w in cluster.workers("decode") if w["kv_blocks"]["awaiting"]], 10
        )
    )
    kill(victim)
    assert stream.outcome() == "complete"
    assert stream.ids == greedy(prompt, 8)
    wait_replaced(cluster, victim)
    cluster.wait_idle()


@pytest.mark.parametrize("kind", ["2p2d"])
def test_kill_decode_in_mid_stream(live: Callable[[str], Live], kind: str) -> None:
    """The stream goes on elsewhere without a duplicated or missing token."""
    cluster = live(kind)
    prompt = long_prompt(3, 40)
    stream = Stream(cluster, prompt, 120)
    wait_until(lambda: len(stream.ids) >= 5, 30)
    victim = busy_worker(cluster, "decode")
    kill(victim)
    assert stream.outcome() == "complete"
    assert stream.ids == greedy(prompt, 120)
    wait_replaced(cluster, victim)
    cluster.wait_idle()


@pytest.mark.parametrize("kind", ["2p2d"])
def test_decode_that_is_stopped_in_mid_stream(live: Callable[[str], Live], kind: str) -> None:
    """V45: SIGSTOP. Its kernel answers for it and every connection stays open; the stream goes on
    elsewhere all the same, and the router does not use it until it runs again, or another does in
    its place."""
    cluster = live(kind)
    prompt = long_prompt(7, 40)
    stream = Stream(cluster, prompt, 120)
    wait_until(lambda: len(stream.ids) >= 5, 30)
    victim = busy_worker(cluster, "decode")
    os.kill(victim["pid"], signal.SIGSTOP)
    try:
        assert stream.outcome() == "complete"
        assert stream.ids == greedy(prompt, 120)
        after = Stream(cluster, long_prompt(8, 40), 4)
        assert after.outcome() == "complete"
    finally:
        with contextlib.suppress(ProcessLookupError):  # the controller may have replaced it
            os.kill(victim["pid"], signal.SIGCONT)
    cluster.wait_ready()
    cluster.wait_idle()


@pytest.mark.parametrize("kind", ["nixl"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_controller_is_lost_in_mid_stream(
    live: Callable[[str], Live], kind: str, how: signal.Signals
) -> None:
    """Nobody but the controller notices, and it comes back to the same workers: one that hangs is
    killed for it."""
    cluster = live(kind)
    lives = {w["id"]: (w["pid"], w["incarnation"]) for w in cluster.workers()}
    said = cluster.log.read_text()
    prompt = long_prompt(8, 40)
    stream = Stream(cluster, prompt, 120)
    wait_until(lambda: len(stream.ids) >= 5, 30)
    (controller,) = [
        process
        for process in psutil.Process(cluster.process.pid).children(recursive=True)
        if process.name().startswith("ray::ControllerA")
    ]
    controller.send_signal(how)
    assert stream.outcome() == "complete"
    assert stream.ids == greedy(prompt, 120)
    back = "the controller is back"
    wait_until(lambda: cluster.log.read_text().count(back) > said.count(back), 60)
    assert {w["id"]: (w["pid"], w["incarnation"]) for w in cluster.workers()} == lives

    status = CliRunner().invoke(app, ["status", "--url", cluster.url])
    assert "2 of 2 workers ready" in status.stdout
    if how is signal.SIGKILL:
        kill(cluster.workers("prefill")[0])  # it watches over them again
    else:
        _scale(cluster, prefill=0)
        _scale(cluster, prefill=1)
    wait_until(lambda: {w["pid"] for w in cluster.workers()} != {pid for pid, _ in lives.values()})
    cluster.wait_ready()


def _scale(cluster: Live, **replicas: int) -> None:
    deployment = find_deployment(cluster.url)
    assert deployment is not None
    request = pb.ScaleRequest(replicas=replicas)
    target = Target(deployment.controller, deployment.token)
    with Reporter() as reporter:
        run_operation(target, lambda stub: stub.Scale(request), reporter)


@pytest.mark.parametrize("kind", ["nixl"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_kill_the_only_worker_of_a_pool(live: Callable[[str], Live], kind: str, role: str) -> None:
    """Whatever the router decides, it is one outcome; then the replacement serves."""
    cluster = live(kind)
    stream = Stream(cluster, long_prompt(40 + len(role)), 8)
    busy_worker(cluster, "prefill")
    victim = cluster.workers(role)[0]
    kill(victim)
    outcome = stream.outcome()
    if outcome == "error":
        assert stream.status in (500, 502, 503, 200)
    wait_replaced(cluster, victim)
    cluster.wait_ready()
    prompt = long_prompt(5, 50)
    body = cluster.complete(prompt, max_tokens=4, ignore_eos=True, return_token_ids=True)
    assert body["choices"][0]["token_ids"] == greedy(prompt, 4)
    cluster.wait_idle()


@pytest.mark.parametrize("kind", ["nixl"])
@pytest.mark.parametrize("is_streaming", [True, False])
def test_client_leaves_during_prefill(
    live: Callable[[str], Live], kind: str, is_streaming: bool
) -> None:
    """V23: work for nobody stops at the next chunk."""
    cluster = live(kind)
    before = cluster.workers("prefill")[0]["tokens_prefilled_total"]
    body = {"model": MODEL, "prompt": long_prompt(6 + is_streaming, 4000), "max_tokens": 4}
    with (
        pytest.raises(httpx.ReadTimeout),
        httpx.stream(
            "POST",
            f"{cluster.url}/v1/completions",
            json={**body, "stream": is_streaming},
            timeout=httpx.Timeout(30, read=1.0),
        ) as response,
    ):
        response.read()
    cluster.wait_idle()
    time.sleep(0.3)  # the workers' figures reach the router ten times a second
    computed = cluster.workers("prefill")[0]["tokens_prefilled_total"] - before
    assert computed < 4000
    assert cluster.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("kind", ["nixl"])
def test_client_leaves_during_decode(live: Callable[[str], Live], kind: str) -> None:
    cluster = live(kind)
    before = cluster.workers("decode")[0]["tokens_decoded_total"]
    body = {"model": MODEL, "prompt": "Tell me a story.", "max_tokens": 1500, "stream": True}
    with httpx.stream(
        "POST", f"{cluster.url}/v1/completions", json={**body, "ignore_eos": True}, timeout=30
    ) as response:
        events = _events(response)
        for _ in range(5):
            next(events)
    cluster.wait_idle()
    time.sleep(0.3)
    assert cluster.workers("decode")[0]["tokens_decoded_total"] - before < 1000
    assert cluster.complete("Hello", max_tokens=2)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("kind", ["nixl"])
def test_cached_tokens_are_prefills_own_hits(live: Callable[[str], Live], kind: str) -> None:
    """V21: what was transferred to D is no hit."""
    cluster = live(kind)
    prompt = long_prompt(9, 100)

    def cached() -> int:
        usage = cluster.complete(prompt, max_tokens=4)["usage"]
        assert usage["prompt_tokens"] == 100
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    assert [cached(), cached()] == [0, 96]


@pytest.mark.parametrize("kind", ["nixl"])
def test_one_token_needs_no_decode(live: Callable[[str], Live], kind: str) -> None:
    """V17"""
    cluster = live(kind)
    cluster.wait_idle()
    time.sleep(0.3)  # the workers' figures reach the router ten times a second
    before = cluster.workers("decode")[0]
    body = cluster.complete("The capital of France is", max_tokens=1)
    assert body["usage"]["completion_tokens"] == 1
    assert body["choices"][0]["finish_reason"] == "length"
    cluster.wait_idle()
    after = cluster.workers("decode")[0]
    assert after["tokens_decoded_total"] == before["tokens_decoded_total"]
    assert after["kv_bytes_received_total"] == before["kv_bytes_received_total"]
