"""What `peers.py` has measured, kept in a file, and the report of it: ratios against goals."""

import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peer_servers import Peer, Server

# (column, scenario, measure in the client's output)
MEASURES = [
    ("1 stream: TPOT ms", "c1", "tpot_mean_ms"),
    ("TTFT ms", "c1", "ttft_p50_ms"),
    ("8 streams: tok/s", "c8", "total_tok_s"),
    ("16 streams: tok/s", "c16", "total_tok_s"),
    ("TTFT of 1024, miss ms", "prefix", "miss_ttft_p50_ms"),
    ("hit ms", "prefix", "hit_ttft_p50_ms"),
    ("interference: ITL p99 ms", "interf", "itl_p99_ms"),
    ("p99.9 ms", "interf", "itl_p999_ms"),
    ("max ms", "interf", "itl_max_ms"),
    ("streams' tok/s", "interf", "out_tok_s"),
    ("long TTFT ms", "interf", "long_ttft_p50_ms"),
    ("ready s", "start", "ready_s"),
]


@dataclass(frozen=True, slots=True)
class Goal:
    """`ours` over the best of `others` is to be at most `ratio`, or at least, if `is_more`."""

    what: str
    ours: str
    others: tuple[str, ...]
    scenario: str
    measure: str
    ratio: float
    is_more: bool = False


_PD, _VLLM = ("vllm-pd",), ("vllm", "vllm-256")
GOALS = [
    Goal("1 stream, bf16: TPOT", "pdserve", ("llama.cpp",), "c1", "tpot_mean_ms", 1.0),
    Goal("1 stream, int8: TPOT", "pdserve-int8", ("llama.cpp-q8",), "c1", "tpot_mean_ms", 0.9),
    Goal("1 stream, int4: TPOT", "pdserve-int4", ("llama.cpp-q4",), "c1", "tpot_mean_ms", 0.9),
    Goal("8 streams: tokens/s", "pdserve", ("vllm",), "c8", "total_tok_s", 1.2, True),
    Goal("16 streams: tokens/s", "pdserve", ("vllm",), "c16", "total_tok_s", 1.2, True),
    Goal("1024 tokens: TTFT", "pdserve", ("vllm",), "prefix", "miss_ttft_p50_ms", 0.9),
    Goal("1024 tokens again: TTFT", "pdserve", ("vllm",), "prefix", "hit_ttft_p50_ms", 0.5),
    Goal("interference: ITL p99.9", "pdserve-pd", _VLLM, "interf", "itl_p999_ms", 1 / 3),
    Goal("streams' tokens/s", "pdserve-pd", ("vllm",), "interf", "out_tok_s", 0.85, True),
    Goal("ITL p99", "pdserve-pd", ("pdserve",), "interf", "itl_p99_ms", 1.0),
    Goal("ITL max", "pdserve-pd", ("pdserve",), "interf", "itl_max_ms", 1.0),
    Goal("P/D, 1 stream: TTFT", "pdserve-pd", _PD, "c1", "ttft_p50_ms", 0.5),
    Goal("P/D, 8 streams: tokens/s", "pdserve-pd", _PD, "c8", "total_tok_s", 1.3, True),
    Goal("P/D, 16 streams: tokens/s", "pdserve-pd", _PD, "c16", "total_tok_s", 1.3, True),
    Goal("P/D, interference: ITL p99.9", "pdserve-pd", _PD, "interf", "itl_p999_ms", 0.2),
    Goal("P/D, TTFT of long prompts", "pdserve-pd", _PD, "interf", "long_ttft_p50_ms", 0.6),
    Goal("P/D, 1024 tokens again: TTFT", "pdserve-pd", _PD, "prefix", "hit_ttft_p50_ms", 0.5),
    Goal("start to ready", "pdserve", ("vllm",), "start", "ready_s", 1 / 3),
]


class Results:
    """One JSON line for each scenario of each peer and round, appended as it comes. The later of
    two of the same counts."""

    def __init__(self, path: Path, is_fresh: bool = False) -> None:
        self.path = path
        self._found: dict[tuple[str, int, str], dict] = {}
        if is_fresh:
            path.unlink(missing_ok=True)
        lines = path.read_text().splitlines() if path.exists() else []
        for line in lines:
            entry = json.loads(line)
            self._found[entry["peer"], entry["round"], entry["scenario"]] = entry["measured"]

    def add(self, peer: str, rep: int, scenario: str, measured: dict) -> None:
        self._found[peer, rep, scenario] = measured
        entry = {"peer": peer, "round": rep, "scenario": scenario, "measured": measured}
        with self.path.open("a") as file:
            file.write(json.dumps(entry | {"time": time.strftime("%F %T")}) + "\n")

    def has(self, peer: str, rep: int, scenario: str) -> bool:
        return (peer, rep, scenario) in self._found

    def values(self, peer: str, scenario: str, measure: str) -> list[float]:
        return [
            measured[measure]
            for (by, _, of), measured in self._found.items()
            if (by, of) == (peer, scenario) and measured.get(measure) is not None
        ]

    def median(self, peer: str, scenario: str, measure: str) -> float | None:
        found = self.values(peer, scenario, measure)
        return statistics.median(found) if found else None


def report(results: Results, peers: dict[str, Peer]) -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.processor(),
    )  # fmt: skip
    commands = "\n".join(
        f"- {peer.name}: {', and '.join(_readable(server) for server in peer.servers)}"
        for peer in peers.values()
    )
    return (
        "# Side by side\n\n"
        f"`make bench-peers`, {time.strftime('%Y-%m-%d')}: {cpu}, two cores for every peer, "
        "SmolLM2-135M, medians over rounds in turn. Times differ from machine to machine and day "
        "to day; the ratios of one sitting count.\n\n"
        f"{_goals(results)}\n\nAll medians, of as many rounds as a row's last column says:\n\n"
        f"{_medians(results, peers)}\n\nStarted as:\n\n{commands}\n"
    )


def _goals(results: Results) -> str:
    lines = ["| | ours | theirs | ratio | goal | |", "|---|---|---|---|---|---|"]
    for goal in GOALS:
        ours = results.median(goal.ours, goal.scenario, goal.measure)
        theirs = [
            found
            for other in goal.others
            if (found := results.median(other, goal.scenario, goal.measure)) is not None
        ]
        if ours is None or not theirs:
            continue
        best = max(theirs) if goal.is_more else min(theirs)
        ratio = ours / best
        is_met = ratio >= goal.ratio if goal.is_more else ratio <= goal.ratio
        sign = "at least" if goal.is_more else "at most"
        lines.append(
            f"| {goal.what}: {goal.ours} to {' or '.join(goal.others)} | {ours:.4g} | {best:.4g} "
            f"| {ratio:.2f} | {sign} {goal.ratio:.2f} | {'met' if is_met else 'missed'} |"
        )
    return "\n".join(lines)


def _medians(results: Results, peers: dict[str, Peer]) -> str:
    titles = [title for title, _, _ in MEASURES]
    lines = [f"| | {' | '.join(titles)} | rounds |", "|---|" + "---|" * (len(MEASURES) + 1)]
    for key, peer in peers.items():
        medians = [results.median(key, scenario, measure) for _, scenario, measure in MEASURES]
        cells = ["-" if value is None else f"{value:.4g}" for value in medians]
        rounds = len(results.values(key, "start", "ready_s"))
        lines.append(f"| {peer.name} | {' | '.join(cells)} | {rounds} |")
    return "\n".join(lines)


def _readable(server: Server) -> str:
    words = [f"{k}={v}" for k, v in server.environment.items() if k.startswith("VLLM")]
    for part in server.command:
        path = Path(part)
        words.append(path.name if path.is_absolute() else part)
    return f"`{' '.join(words)}` on cores {server.cores}"
