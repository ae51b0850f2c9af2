import pytest
from rich.console import Console

from cli.top import frame, look_at, quantile
from core import metrics as names

INF = float("inf")


def metrics(*counts: int) -> str:
    lines = [f"# TYPE {names.TTFT} histogram"]
    for bound, count in zip(("0.1", "0.2", "+Inf"), counts, strict=True):
        lines.append(f'{names.TTFT}_bucket{{le="{bound}"}} {count}')
    return "\n".join([*lines, f"{names.TTFT}_count {counts[-1]}", ""])


def worker(**changes) -> dict:
    return {
        "id": "prefill-0", "role": "prefill", "state": "ready", "incarnation": "a",
        "kv_blocks": {"total": 100, "running": 20, "held": 5, "awaiting": 0},
        "requests_running": 3, "requests_waiting": 2, "tokens_prefilled_total": 1000,
        "kv_bytes_sent_total": 5_000_000, **changes,
    }  # fmt: skip


def shown(before, now) -> list[list[str]]:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(frame(before, now))
    console.file.close()
    return [line.split() for line in console.export_text().splitlines()]


def test_rates_and_latencies_are_of_the_time_between_two_looks():
    before = look_at({"workers": [worker()]}, metrics(100, 100, 100), at=10.0)
    now = look_at(
        {
            "model": "m",
            "workers": [worker(tokens_prefilled_total=3000, kv_bytes_sent_total=9_000_000)],
        },
        metrics(100, 110, 110),
        at=12.0,
    )
    title, _, row = shown(before, now)
    assert title == ["m:", "1", "of", "1", "workers", "ready"]
    assert row == ["prefill", "1/1", "3", "2", "25%", "150", "ms", "190", "ms", "-", "-", "1000",
                   "2.0", "MB"]  # fmt: skip


def test_a_restarted_worker_counts_from_its_own_beginning():
    before = look_at({"workers": [worker()]}, "", at=0.0)
    now = look_at(
        {"workers": [worker(incarnation="b", tokens_prefilled_total=500, kv_bytes_sent_total=0)]},
        "", at=1.0,
    )  # fmt: skip
    assert shown(before, now)[2][-3:] == ["500", "0.0", "MB"]


@pytest.mark.parametrize(
    ("after", "q", "expected"),
    [
        ({}, 0.5, None),
        ({0.1: 0.0, INF: 0.0}, 0.5, None),
        ({0.1: 4.0, INF: 4.0}, 0.5, 0.05),
        ({0.1: 0.0, 0.2: 4.0, INF: 4.0}, 0.25, 0.125),
        ({0.1: 1.0, INF: 4.0}, 0.9, 0.1),  # beyond the last bound: that bound
    ],
)
def test_quantiles_are_those_of_prometheus(after, q, expected):
    assert quantile({}, after, q) == (expected if expected is None else pytest.approx(expected))
