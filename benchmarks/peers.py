"""This engine and what people would use instead, in turn, on the same two cores, with one client.

    make bench-peers CLIENT=load.py [ARGS="--peers pdserve vllm --rounds 3"]

Each peer is started at its best known setting and bound to the same cores, measured alone, and
stopped; then the next, round after round, so that what the machine does hits all of them alike.
What was measured is appended to WORK/results.jsonl at once. A run goes on where the one before it
ended: what a round has measured already is not measured again (--fresh: forget it), and one round
can be run alone (--only 2). A peer that fails is left out of the run's other rounds; the next run
tries it again.

Ratios of medians against the goals, all medians, the machine and the commands go to
benchmarks/RESULTS.md. The first run makes a virtual environment for each peer under --work and
converts the weights; what each peer is for, and so which scenarios it runs, is in SCENARIOS.

The client is a neutral program: `CLIENT --url URL --model NAME --name N --rep R --out FILE --scen
c1,c8,...` with BENCH_TOKENIZER in its environment; it appends one JSON line {"res": {scenario:
{measure: value}}} a run. Without one there is nothing to measure with, and this says so.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.peer_results import Results, report  # noqa: E402
from benchmarks.peer_servers import MODEL, PEERS, PORT, Peer, Server, Workshop  # noqa: E402
from core.gguf_metadata import read_gguf_metadata  # noqa: E402
from router.text.gguf_tokenizer import tokenizer_from_gguf  # noqa: E402

_READY_SECONDS = 600.0  # vLLM compiles for minutes on its first start
_CLIENT_SECONDS = 900.0
_STOP_SECONDS = 30.0
_ALL = ("c1", "c8", "c16", "prefix", "interf")
SCENARIOS = {
    "pdserve": _ALL,
    "pdserve-int8": ("c1",),
    "pdserve-int4": ("c1",),
    "pdserve-pd": _ALL,
    "vllm": _ALL,
    "vllm-256": ("interf",),
    "vllm-pd": _ALL,
    "llama.cpp": ("c1", "c8"),
    "llama.cpp-q8": ("c1",),
    "llama.cpp-q4": ("c1",),
}


class PeerError(Exception):
    """A peer could not be measured."""


@contextmanager
def running(peer: Peer, folder: Path) -> Iterator[float]:
    """Its servers, and how many seconds it took until they answered. Raises PeerError."""
    log = folder / f"{peer.name.replace(' ', '-').replace('/', '')}.log"
    processes: list[subprocess.Popen] = []
    started = time.monotonic()
    try:
        *workers, front = peer.servers
        with log.open("ab") as stream:
            for server in workers:
                processes.append(_start(server, stream))
            for server, process in zip(workers, processes, strict=True):
                _wait_ready(process, server.ready, log)
            processes.append(_start(front, stream))
        _wait_ready(processes[-1], front.ready, log)
        yield time.monotonic() - started
    finally:
        for process in reversed(processes):
            _stop(process)


def _start(server: Server, log: object) -> subprocess.Popen:
    return subprocess.Popen(
        ["taskset", "-c", server.cores, *server.command],
        env={**os.environ, **server.environment},
        stdout=log,  # type: ignore[call-overload]
        stderr=log,
        process_group=0,  # of the client's session, else it waits while they compute
    )


def _wait_ready(server: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + _READY_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise PeerError(f"the server ended with {server.returncode}: see {log}")
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise PeerError(f"not ready after {_READY_SECONDS:.0f} s: see {log}")


def _stop(server: subprocess.Popen) -> None:
    """The whole process group of the server, hard if it does not go by itself."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(server.pid, sign)
        except ProcessLookupError:
            break
        try:
            server.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            continue
        time.sleep(1.0)  # its children
    server.wait(_STOP_SECONDS)


def run_client(client: list[str], peer: Peer, scenario: str, rep: int, out: Path) -> dict:
    """What the client measured. Raises PeerError."""
    out.unlink(missing_ok=True)
    command = [
        *client, "--url", f"http://127.0.0.1:{PORT}", "--model", MODEL, "--name", peer.name,
        "--rep", str(rep), "--scen", scenario, "--out", str(out),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, timeout=_CLIENT_SECONDS)
        measured: dict = json.loads(out.read_text())["res"][scenario]
    except (subprocess.SubprocessError, OSError, KeyError, ValueError) as error:
        raise PeerError(f"{scenario}: {error}") from error
    if measured.get("errors"):
        raise PeerError(f"{scenario}: {measured['errors']} requests failed: {measured.get('err')}")
    return measured


def measure(
    key: str, peer: Peer, scenarios: list[str], rep: int, client: list[str], results: Results
) -> None:
    """All `scenarios` of one round, each kept as soon as it is there."""
    with running(peer, results.path.parent) as ready:
        results.add(key, rep, "start", {"ready_s": ready})
        for scenario in scenarios:
            measured = run_client(client, peer, scenario, rep, results.path.with_suffix(".client"))
            results.add(key, rep, scenario, measured)


def main() -> None:
    args = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # not without stopping the servers
    if args.client is None or not args.client.exists():
        raise SystemExit(
            "error: no load client: name it with --client (make bench-peers CLIENT=load.py)"
        )
    workshop = Workshop(args.work)
    client = [str(workshop.venv("client", "aiohttp", "tokenizers") / "python"), str(args.client)]
    tokenizer = workshop.folder / "tokenizer.json"
    metadata = read_gguf_metadata(workshop.gguf, prefix="tokenizer.")
    tokenizer_from_gguf(metadata, source=workshop.gguf.name).tokenizer.save(str(tokenizer))
    os.environ["BENCH_TOKENIZER"] = str(tokenizer)
    results = Results(workshop.folder / "results.jsonl", is_fresh=args.fresh)
    peers = {name: PEERS[name](workshop) for name in args.peers}
    rounds = [args.only] if args.only else range(1, args.rounds + 1)
    wanted = set(args.scenarios.split(","))
    failed: set[str] = set()
    for rep in rounds:
        for key, peer in peers.items():
            if key in failed:
                continue
            left = [s for s in SCENARIOS[key] if s in wanted and not results.has(key, rep, s)]
            if not left:
                continue
            print(f"round {rep}: {peer.name}: {', '.join(left)}", flush=True)
            try:
                measure(key, peer, left, rep, client, results)
            except PeerError as error:
                print(f"round {rep}: {peer.name}: left out from here on: {error}", flush=True)
                failed.add(key)
            args.out.write_text(report(results, peers))
    text = report(results, peers)
    args.out.write_text(text)
    print(text)


def _arguments() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--client", type=Path, help="the load client, a Python program")
    arguments.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--only", type=int, metavar="ROUND", help="this round alone")
    arguments.add_argument("--scenarios", default=",".join(_ALL))
    arguments.add_argument("--fresh", action="store_true", help="forget earlier results")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    arguments.add_argument("--work", type=Path, default=cache / "pdserve" / "peers")
    arguments.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "RESULTS.md")
    return arguments.parse_args()


if __name__ == "__main__":
    main()
