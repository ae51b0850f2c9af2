"""`pdserve up` from start to Ctrl-C, as a user meets it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import grpc
import httpx
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc
from support.live import PDSERVE, deployment, shm_files


def test_whole_life(tmp_path: Path) -> None:
    """Everything that a first user does, in one deployment of its own; then nothing is left."""
    before = shm_files()
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path), "XDG_STATE_HOME": str(tmp_path)}
    with deployment("local.yaml", tmp_path / "up.log", ("kv_transfer.transport=auto",)) as live:
        family = [live.process.pid] + [
            child.pid for child in psutil.Process(live.process.pid).children(recursive=True)
        ]
        _check_views(live.url, env)
        _check_http(live.url)
        _check_grpc(live.grpc_address)
        _check_second_up_is_refused(live.url)
        live.wait_idle()
        live.process.send_signal(signal.SIGINT)
        assert live.process.wait(30) == 0
        output = live.log.read_text()
    assert "Traceback" not in output
    assert f"curl {live.url}" in output
    alive = [pid for pid in family if psutil.pid_exists(pid) and not _is_zombie(pid)]
    assert alive == []
    assert shm_files() - before == set()


def _is_zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _check_views(url: str, env: dict[str, str]) -> None:
    view = httpx.get(f"{url}/cluster").json()
    status = subprocess.run(
        [str(PDSERVE), "status", "--url", url, "--json"], capture_output=True, text=True, check=True
    )
    printed = json.loads(status.stdout)
    for shown in (view, printed):
        assert {w["role"] for w in shown["workers"]} == {"prefill", "decode"}
        for worker in shown["workers"]:
            assert worker["state"] == "ready"
            assert set(worker["kv_blocks"]) == {
                "total", "free", "cached", "running", "held", "awaiting",
            }  # fmt: skip
            for key in (
                "id", "host", "pid", "address", "incarnation", "transport", "requests_running",
                "requests_waiting", "tokens_prefilled_total", "tokens_decoded_total",
            ):  # fmt: skip
                assert key in worker
    table = subprocess.run(
        [str(PDSERVE), "status", "--url", url], capture_output=True, text=True, check=True
    )
    assert "prefill-0" in table.stdout and "decode-0" in table.stdout


def _check_http(url: str) -> None:
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/ready").status_code == 200
    body = {
        "model": "smollm2-135m",
        "prompt": "The capital of France is",
        "temperature": 0,
        "max_tokens": 8,
    }
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()
    assert "Paris" in answer["choices"][0]["text"]
    metrics = httpx.get(f"{url}/metrics").text
    assert "pdserve_time_to_first_token_seconds_count" in metrics
    workers = httpx.get(f"{url}/cluster").json()["workers"]
    decode = next(w for w in workers if w["role"] == "decode")
    assert decode["transport"].startswith("nixl")
    chat = subprocess.run(
        [str(PDSERVE), "chat", "Say hi.", "--url", url, "--max-tokens", "8"],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert len(chat.stdout.strip()) > 0


def _check_grpc(address: str) -> None:
    with grpc.insecure_channel(address) as channel:
        health = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        stub = inference_pb2_grpc.InferenceStub(channel)
        models = stub.Models(pb.ModelsRequest())
        assert [model.id for model in models.models] == ["smollm2-135m"]
        request = pb.GenerateRequest(
            model="smollm2-135m", prompt="The capital of France is", max_tokens=6, temperature=0
        )
        messages = list(stub.Generate(request, timeout=60))
        assert "Paris" in "".join(message.text for message in messages)
        assert messages[-1].usage.completion_tokens == 6
        names = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")])
        )
        services = [s.name for s in next(names).list_services_response.service]
        assert "pdserve.v1.Inference" in services


def _check_second_up_is_refused(url: str) -> None:
    address = url.removeprefix("http://")
    second = subprocess.run(
        [str(PDSERVE), "up", "configs/local.yaml", "--set", f"router.http={address}"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
    )
    assert second.returncode == 1
    assert address in second.stderr
    assert "Traceback" not in second.stderr + second.stdout
