"""One comparison of the planner with a published result, and the files that results come in."""

import csv
from collections.abc import Iterable
from pathlib import Path

Row = tuple[str, str, str, str]  # what, published, simulated, verdict


def within(value: float, published: float, tolerance: float) -> str:
    close = abs(value / published - 1) <= tolerance
    return "reproduced" if close else f"not reproduced ({value / published - 1:+.0%})"


def rows_of(path: Path) -> Iterable[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)
