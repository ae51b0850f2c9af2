"""A whole deployment with mutual TLS inside and two router processes."""

import shutil
import subprocess
from pathlib import Path

import grpc
import pytest

from rpc import worker_pb2, worker_pb2_grpc
from support.certificates import Authority
from support.live import PDSERVE, deployment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl"),
]


@pytest.mark.parametrize("transport", ["grpc", "nixl"])
def test_a_deployment_with_mutual_tls(tmp_path: Path, transport: str) -> None:
    files = Authority.make(tmp_path / "ca").issue("part")
    tls = ", ".join(
        f"{name}: '{getattr(files, name)}'" for name in ("ca_file", "cert_file", "key_file")
    )
    settings = (f"tls={{{tls}}}", "router.workers=2", f"kv_transfer.transport={transport}",
                "dtype=float32", "engine.num_kv_blocks=512")  # fmt: skip
    with deployment("local.yaml", tmp_path / "up.log", settings) as live:
        answer = live.complete("Hello", max_tokens=4, temperature=0)
        assert answer["usage"]["completion_tokens"] == 4
        decode = live.workers("decode")[0]
        with grpc.insecure_channel(decode["address"]) as channel:
            stub = worker_pb2_grpc.WorkerServiceStub(channel)
            with pytest.raises(grpc.RpcError):
                stub.GetInfo(worker_pb2.GetInfoRequest(), timeout=5)
        # An operator's command speaks to the controller by the same certificates.
        done = subprocess.run(
            [str(PDSERVE), "scale", "decode=1"], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
