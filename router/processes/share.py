"""What the router processes of one deployment have together, besides their ports.

Each has a number and serves its own view of things on a Unix socket in a folder that only their
user may enter. Whoever is asked for metrics or for a request asks the others and adds up.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry, Metric, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

logger = logging.getLogger(__name__)

_ASK_TIMEOUT_S = 2.0
MAX_PROCESSES = 64


@dataclass(frozen=True, slots=True)
class Share:
    """`index` of `count` processes. `folder` is theirs alone."""

    index: int
    count: int
    folder: Path

    @property
    def socket_path(self) -> Path:
        return socket_path(self.folder, self.index)

    @property
    def usage_path(self) -> Path:
        """What API keys are using."""
        return self.folder / "usage"

    async def ask(self, path: str) -> list[httpx.Response]:
        """GET `path` of every other process. One that does not answer in time, since it is just
        being started again, is left out."""
        return list((await self.ask_each(lambda index: path)).values())

    async def ask_each(self, path_of: Callable[[int], str]) -> dict[int, httpx.Response]:
        """As `ask`, with a path for each, and the answers by process."""
        others = [index for index in range(self.count) if index != self.index]
        answers = await asyncio.gather(*(self._ask(index, path_of(index)) for index in others))
        found = zip(others, answers, strict=True)
        return {index: answer for index, answer in found if answer is not None}

    async def _ask(self, index: int, path: str) -> httpx.Response | None:
        transport = httpx.AsyncHTTPTransport(uds=str(socket_path(self.folder, index)))
        try:
            async with httpx.AsyncClient(transport=transport, timeout=_ASK_TIMEOUT_S) as client:
                return await client.get(f"http://router{path}")
        except httpx.HTTPError as error:
            logger.warning("router process %d does not answer: %r", index, error)
            return None


def socket_path(folder: Path, index: int) -> Path:
    return folder / f"{index}.sock"


def merged_metrics(texts: list[str], seen_by_all: frozenset[str]) -> bytes:
    """One exposition out of one for each process. Counts and gauges are added up; those of the
    families `seen_by_all`, which every process knows alike, are taken once."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[Any, float]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            merged = families.setdefault(family.name, family)
            known = values.setdefault(family.name, {})
            if merged is not family:
                merged.samples += [s for s in family.samples if _key(s) not in known]
            for sample in family.samples:
                key = _key(sample)
                if key not in known:
                    known[key] = sample.value
                elif family.name.endswith("_created"):
                    known[key] = min(known[key], sample.value)
                elif family.name in seen_by_all:
                    known[key] = max(known[key], sample.value)
                else:
                    known[key] += sample.value
    for name, family in families.items():
        family.samples = [s._replace(value=values[name][_key(s)]) for s in family.samples]
    registry = CollectorRegistry()
    registry.register(_Given(list(families.values())))
    return generate_latest(registry)


def _key(sample: Any) -> Any:
    return sample.name, tuple(sorted(sample.labels.items()))


class _Given(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families

    def describe(self) -> list[Metric]:
        return []
