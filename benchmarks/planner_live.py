"""Holds `pdserve plan`'s simulator against a live deployment: measures one prefill and one decode
worker, puts loads on them, simulates the very same requests, and prints both.

    python -m benchmarks.planner_live [CONFIG] [--rates 0.7,1.2,1.8] [--num-requests 30]

Takes about three minutes with SmolLM2-135M on two cores, which should have nothing else to do: how
much others took is printed.
Exits with 1 if any figure is more than 15 percent off.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.planner_side_by_side import TOLERANCE, Figure, side_by_side
from cli.bench_options import LoadOptions, run_async
from cli.deployed import Deployed, deployed
from cli.profile import describe
from cluster.process_tree import descendants
from core.errors import PdserveError
from loadgen.benchmark import Service, measure, prepare
from loadgen.record import RequestRecord
from loadgen.report import write_json
from planner.measure import Measurer, Samples
from planner.profile import Profile, profile_of, save_profile

_WARM_UP = 3


@dataclass(frozen=True, slots=True)
class Use:
    """Of all processors since boot, in ticks: by everybody, by this process and those below it,
    and there to be used."""

    everybody: int
    ours: int
    total: int

    @classmethod
    def now(cls) -> "Use":
        fields = [int(field) for field in Path("/proc/stat").read_text().split()[1:9]]
        idle = fields[3] + fields[4]  # what a hypervisor gave to others counts as used
        pids = [os.getpid(), *(process.pid for process in descendants(os.getpid()))]
        return cls(sum(fields) - idle, sum(_ticks(pid) for pid in pids), sum(fields))

    def others_since(self, before: "Use") -> float:
        """The share that neither we nor nobody had."""
        others = (self.everybody - self.ours) - (before.everybody - before.ours)
        return max(0.0, others / max(1, self.total - before.total))


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def main() -> int:
    parser = argparse.ArgumentParser(description="the simulator against a live deployment")
    parser.add_argument("config", nargs="?", type=Path, default=Path("configs/local.yaml"))
    parser.add_argument("--rates", default="0.7,1.2,1.8", help="requests/s, one run each")
    parser.add_argument("--num-requests", type=int, default=30, help="of each run")
    parser.add_argument("--input-len", default="lognormal:250:0.6")
    parser.add_argument("--output-len", default="uniform:16:64")
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--profile", type=Path, help="keep what was measured of the workers here")
    parser.add_argument("--json", type=Path, help="keep everything that was measured here")
    parser.add_argument("--exact", action="store_true", help="with the engine's scheduler")
    options = parser.parse_args()
    load = LoadOptions(
        num_requests=options.num_requests, rate=options.rates, seed=options.seed,
        input_len=options.input_len, output_len=options.output_len,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "up.log"
        with deployed(options.config, ("mode=disaggregated",), log) as running:
            running.wait_ready()
            samples, profile, runs = run_async(_measure(running, load))
    if options.profile is not None:
        save_profile(options.profile, profile)
    if options.json is not None:
        requests = {label: [asdict(record) for record in records] for label, records in runs}
        write_json(options.json, {"samples": asdict(samples), "requests": requests})
    worst = 0.0
    for label, records in runs:
        figures = side_by_side(records, profile, options.exact)
        _print(label, len(records), figures)
        worst = max([worst, *(abs(figure.error) for figure in figures)])
    print(f"the largest error is {worst:.0%}")
    return 0 if worst <= TOLERANCE else 1


async def _measure(
    running: Deployed, load: LoadOptions
) -> tuple[Samples, Profile, list[tuple[str, list[RequestRecord]]]]:
    prepared = await prepare(Service(running.url), _WARM_UP)
    samples = await Measurer(prepared, print).measure()
    profile, found = profile_of(samples)
    print(describe(profile, found))
    runs = []
    for number, arrivals in enumerate(load.loads()):
        before = Use.now()
        run = await measure(
            prepared, load.workload(), arrivals, load.slo(), salt=f".{number}", label=str(arrivals)
        )
        print(f"{arrivals}: others took {Use.now().others_since(before):.0%} of the machine")
        good = [record for record in run.records if record.is_ok]
        if len(good) < len(run.records):
            raise PdserveError(f"{arrivals}: {len(run.records) - len(good)} requests failed")
        runs.append((str(arrivals), good))
    return samples, profile, runs


def _print(label: str, count: int, figures: Sequence[Figure]) -> None:
    cells = [
        f"{f.name} {f.measured * 1e3:.1f} / {f.simulated * 1e3:.1f} ms ({f.error:+.0%})"
        for f in figures
    ]
    print(f"{label}, {count} requests, measured / simulated: " + "; ".join(cells))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except PdserveError as error:
        sys.exit(f"pdserve: error: {error}")
