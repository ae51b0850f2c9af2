"""A live deployment's latencies beside those of a simulation of the very same requests."""

from collections.abc import Sequence
from dataclasses import dataclass

from loadgen.record import RequestRecord
from loadgen.summary import percentile
from planner.layout import Layout, Pool
from planner.machines import machine_of
from planner.profile import Profile
from planner.simulate import Options, simulate
from planner.trace import Trace, TraceRequest

PERCENTILES = (50, 90)
TOLERANCE = 0.15


@dataclass(frozen=True, slots=True)
class Figure:
    """One percentile, seconds."""

    name: str
    measured: float
    simulated: float

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.simulated / self.measured - 1


def trace_of(records: Sequence[RequestRecord]) -> Trace:
    """The requests as they were really sent. Prefixes are not known: nothing may repeat."""
    start = min(record.sent_s for record in records)
    return Trace(
        tuple(
            TraceRequest(r.sent_s - start, r.num_prompt_tokens, r.num_output_tokens)
            for r in sorted(records, key=lambda record: record.sent_s)
        )
    )


def side_by_side(
    records: Sequence[RequestRecord], profile: Profile, exact: bool = False
) -> list[Figure]:
    """TTFT and TPOT of one prefill and one decode worker. All records succeeded, and have two
    tokens at least."""
    options = Options(exact=exact, holds_back=True)
    result = simulate(Layout(Pool(1), Pool(1)), machine_of(profile), trace_of(records), options)
    measured = {
        "TTFT": [record.ttft_s for record in records],
        "TPOT": [record.tpot_s or 0.0 for record in records],
    }
    simulated = {"TTFT": list(result.recorder.ttft), "TPOT": list(result.recorder.tpot)}
    return [
        Figure(f"{name} p{p}", percentile(values, p), percentile(simulated[name], p))
        for name, values in measured.items()
        for p in PERCENTILES
    ]
