"""The commands of the rendered pods, run here as processes: Ray's head, the controller beside it, a
node for each worker group, a router. What a pod would find at a service name or in a volume is on
this machine's loopback and in a folder; nothing else of the commands is changed."""

import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from manifests import deployment_yaml, needs_kubectl, pod_templates, render

from support.certificates import Authority
from support.live import wait_until
from support.ports import free_port

pytestmark = [needs_kubectl, pytest.mark.slow]


class Pods:
    """Runs containers as processes. Owns them, and the folder that they write to."""

    def __init__(self, overlay: str, folder: Path, stack: ExitStack) -> None:
        self.objects = render(overlay)
        self.folder = folder
        self.has_tls = overlay == "gpu-tls"
        self._stack = stack
        self.http, self.grpc, gcs, controller = (free_port() for _ in range(4))
        config = deployment_yaml(self.objects)
        config = config.replace("0.0.0.0:8000", f"127.0.0.1:{self.http}")
        config = config.replace("0.0.0.0:8001", f"127.0.0.1:{self.grpc}")
        if self.has_tls:
            config = self._as_here(config)
        (folder / "pdserve.yaml").write_text(config)
        self._here = {
            "/etc/pdserve/pdserve.yaml": str(folder / "pdserve.yaml"),
            "pdserve-head-svc:6379": f"127.0.0.1:{gcs}",
            "--port=6379": f"--port={gcs}",
            "pdserve-controller:8002": f"127.0.0.1:{controller}",
            "0.0.0.0:8002": f"127.0.0.1:{controller}",
        }

    def _as_here(self, config: str) -> str:
        """The secrets as files, and a small model on CPUs. The GPUs are only claimed."""
        tls = self.folder / "tls"
        part = Authority.make(tls).issue("tls", alt="DNS:pdserve.internal,IP:127.0.0.1")
        assert (part.cert_file, part.ca_file) == (f"{tls}/tls.crt", f"{tls}/ca.crt")
        for there, here in (
            ("/etc/pdserve-tls/internal", str(tls)),
            ("/etc/pdserve-tls/router", str(tls)),
            ("/models/model", "smollm2-135m"),
            ("max_model_len: 32768", "device: cpu\n  max_model_len: 2048"),
            ("replicas: 2", "replicas: 1"),
        ):
            assert there in config
            config = config.replace(there, here)
        return config

    @property
    def client(self) -> httpx.Client:
        ca = self.folder / "tls" / "ca.crt"
        verify = ssl.create_default_context(cafile=str(ca)) if self.has_tls else True
        scheme = "https" if self.has_tls else "http"
        return httpx.Client(
            base_url=f"{scheme}://127.0.0.1:{self.http}", verify=verify, timeout=120
        )

    def container(self, pod: str, name: str) -> dict:
        (template,) = [t for n, t in pod_templates(self.objects) if n == pod]
        (found,) = [c for c in template["spec"]["containers"] if c["name"] == name]
        return found

    def command(self, words: list[str]) -> list[str]:
        """On this machine: several nodes of Ray share one network, so their ports differ."""
        command = []
        for word in words:
            for there, here in self._here.items():
                word = word.replace(there, here)
            if re.match(r"--(node|object)-manager-port=", word):
                word = f"{word.partition('=')[0]}={free_port()}"
            command.append(word)
        if command[:2] == ["ray", "start"]:
            command.append("--node-ip-address=127.0.0.1")
        return command

    def environment(self, container: dict) -> dict[str, str]:
        cache = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
        own = {}
        for variable in container.get("env", []):
            value = variable.get("value", "")
            own[variable["name"]] = value.replace("/etc/pdserve-tls/internal", f"{self.folder}/tls")
            if "valueFrom" in variable:
                key = variable["valueFrom"]["secretKeyRef"]["key"]
                own[variable["name"]] = f"the secret {key} of this test"
        return {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "HOSTNAME": socket.gethostname(),
            "XDG_CACHE_HOME": cache,  # where the model is
            "RAY_TMPDIR": str(self.folder),
            "RAY_USAGE_STATS_ENABLED": "0",
            **own,
        }

    def start(self, pod: str, name: str) -> None:
        container = self.container(pod, name)
        log = self._stack.enter_context((self.folder / f"{pod}-{name}.log").open("w"))
        process = subprocess.Popen(
            self.command(container["command"]), env=self.environment(container),
            stdout=log, stderr=subprocess.STDOUT, cwd=self.folder, start_new_session=True,
        )  # fmt: skip
        self._stack.callback(end, process)
        if container["command"][:2] == ["ray", "start"]:
            # Nodes that share a machine must not start at the same moment.
            path = Path(log.name)
            wait_until(lambda: "Ray runtime started" in path.read_text(), 90, f"{pod}'s node")

    def logs(self) -> str:
        return "\n".join(f"== {p.name}\n{p.read_text()[-1500:]}" for p in self.folder.glob("*.log"))


def end(process: subprocess.Popen) -> None:
    """As the kubelet does: SIGTERM, then SIGKILL, to all that the container runs."""
    family = [psutil.Process(process.pid)] if process.poll() is None else []
    family += [child for p in family for child in p.children(recursive=True)]
    process.terminate()
    _, left = psutil.wait_procs(family, timeout=20)
    for survivor in left:
        survivor.kill()
    process.wait(10)


@contextmanager
def pods(overlay: str) -> Iterator[Pods]:
    folder = Path(tempfile.mkdtemp(prefix="pd-k8s-", dir="/tmp"))  # short: sockets go below it
    try:
        with ExitStack() as stack:
            yield Pods(overlay, folder, stack)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.parametrize("overlay", ["cpu-demo", "gpu-tls"])
def test_the_rendered_commands_serve_and_a_pod_that_goes_loses_no_request(overlay):
    with pods(overlay) as running, running.client as client:

        def is_ready() -> bool:
            try:
                return client.get("/ready", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        try:
            running.start("head", "ray-head")
            running.start("head", "controller")
            running.start("pdserve-router", "router")
            for group in ("prefill", "decode"):
                running.start(group, "ray-worker")
            wait_until(is_ready, 120, "the router's /ready")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{running.logs()}") from error
        probe = running.container("pdserve-router", "router")["livenessProbe"]["httpGet"]["path"]
        assert client.get(probe, timeout=5).status_code == 200

        texts: list[str] = []

        def stream() -> None:
            body = {"model": "smollm2-135m", "prompt": "One, two,", "max_tokens": 150,
                    "temperature": 0, "stream": True, "ignore_eos": True}  # fmt: skip
            with client.stream("POST", "/v1/completions", json=body) as answer:
                texts.extend(answer.iter_lines())

        streaming = threading.Thread(target=stream)
        streaming.start()
        wait_until(lambda: len(texts) > 4, 60, "the first tokens")
        before = {w["id"]: w["incarnation"] for w in client.get("/cluster").json()["workers"]}

        # Every worker is on this host: one preStop drains them all, as if both pods went.
        container = running.container("decode", "ray-worker")
        stop = running.command(container["lifecycle"]["preStop"]["exec"]["command"])
        done = subprocess.run(stop, env=running.environment(container), timeout=110, check=False,
                              capture_output=True, text=True)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        streaming.join(120)
        events = [line.removeprefix("data: ") for line in texts if line.startswith("data: ")]
        assert events[-1] == "[DONE]", events[-3:]
        assert not [e for e in events[:-1] if "error" in json.loads(e)]

        def are_replaced() -> bool:
            workers = client.get("/cluster").json()["workers"]
            now = {w["id"]: w["incarnation"] for w in workers if w["state"] == "ready"}
            return len(now) == 2 and not set(now.values()) & set(before.values())

        wait_until(are_replaced, 120, "fresh workers")
        wait_until(is_ready, 30, "the router's /ready")
        body = {"model": "smollm2-135m", "prompt": "One, two,", "max_tokens": 4}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
