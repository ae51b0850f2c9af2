"""Whatever the Grafana dashboard and the alert rules ask for is there when a router is scraped."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from core.errors import UnavailableError
from support.fake_workers import Fault
from support.router import running

_FOLDER = Path(__file__).parents[2] / "k8s" / "observability"
_ALERTS = _FOLDER / "alerts.yaml"
_METRIC = re.compile(r"\bpdserve_[a-z_]+")
_GROUPED = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")
_MATCHED = re.compile(r"(\w+)=~?\"")


def _panels() -> list[dict[str, Any]]:
    return json.loads((_FOLDER / "grafana-dashboard.json").read_text())["panels"]


def _expressions() -> Iterator[str]:
    for panel in _panels():
        yield from (target["expr"] for target in panel.get("targets", ()))
    for group in yaml.safe_load(_ALERTS.read_text())["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.fixture
async def scraped() -> dict[str, set[str]]:
    """Labels by sample name, from a router that has seen a bit of everything."""
    async with running("router.slo.ttft=60") as it:
        it.worker("decode-0").status.speculative_method = "ngram"
        it.worker("decode-0").report()
        faults = iter([Fault("error", 2, UnavailableError("no power"))])
        it.worker("decode-0").next_fault = lambda: next(faults, None)
        await it.complete("hello", max_tokens=4)
        assert (await it.post(prompt="hello", temperature=9)).status_code == 400
        text = (await it.http.get("/metrics")).text
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    return labels


async def test_every_metric_and_label_in_use_exists(scraped: dict[str, set[str]]) -> None:
    expressions = list(_expressions())
    assert len(expressions) > 30
    for expression in expressions:
        metrics = set(_METRIC.findall(expression))
        assert metrics and metrics <= set(scraped), (expression, metrics - set(scraped))
        known = set.union(*(scraped[name] for name in metrics))
        wanted = set(_MATCHED.findall(expression))
        for group in _GROUPED.findall(expression):
            wanted |= {label.strip() for label in group.split(",")}
        assert wanted <= known, (expression, wanted - known)


async def test_every_metric_of_requests_is_on_the_dashboard(scraped: dict[str, set[str]]) -> None:
    shown = "\n".join(_expressions())
    for name in scraped:
        if name.startswith("pdserve_worker_") or not name.endswith(("_total", "_bucket")):
            continue
        if name != "pdserve_queue_time_seconds_bucket":  # shown by worker
            assert name in shown, name


def test_panels_do_not_overlap_and_have_ids_of_their_own() -> None:
    panels = _panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for x in range(panel["gridPos"]["x"], panel["gridPos"]["x"] + panel["gridPos"]["w"])
        for y in range(panel["gridPos"]["y"], panel["gridPos"]["y"] + panel["gridPos"]["h"])
    ]
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24


def test_promtool_accepts_the_rules_and_every_query(tmp_path: Path) -> None:
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("promtool is not on PATH (Debian: apt install prometheus)")
    # The dashboard's queries as rules of their own, so that promtool parses them too.
    queries = [
        {"record": f"panel:{i}", "expr": e.replace("$__rate_interval", "5m")}
        for i, e in enumerate(_expressions())
    ]
    rules = tmp_path / "panels.yaml"
    rules.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": queries}]}))
    for path in (_ALERTS, rules):
        done = subprocess.run(
            [promtool, "check", "rules", str(path)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stdout + done.stderr
