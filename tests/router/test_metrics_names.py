"""Every name that is scraped is one that is agreed on, and its labels are bounded."""

import re

from prometheus_client.parser import text_string_to_metric_families

from core import metrics as names
from core.errors import UnavailableError
from router.request.metrics import MAX_WORKER_LABELS
from support.fake_workers import Fault
from support.router import Running, running

_LABELS = {
    "worker", "role", "state", "phase", "backend", "api", "outcome", "kind", "reason", "decision",
    "of", "met", "le",
}  # fmt: skip


async def scrape(it: Running) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Values by sample name and labels."""
    text = (await it.http.get("/metrics")).text
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation, family.name
        for sample in family.samples:
            labels = tuple(sorted(sample.labels.items()))
            series = found.setdefault(sample.name, {})
            assert labels not in series, f"{sample.name}{labels} is there twice"
            series[labels] = sample.value
    return found


async def test_names_labels_and_numbers() -> None:
    settings = ("router.slo.ttft=60", "router.slo.tpot=60", "router.max_concurrent_requests=2")
    async with running(*settings) as it:
        faults = iter([Fault("error", 2, UnavailableError("no power"))])
        it.worker("decode-0").next_fault = lambda: next(faults, None)
        await it.complete("hello", max_tokens=6)
        await it.complete("hello", max_tokens=1)
        assert (await it.post(prompt="hello", temperature=9)).status_code == 400
        assert (await it.post(prompt="hello", n=2, max_tokens=2)).status_code == 200
        assert (await it.post(prompt="hello", n=3)).status_code == 400
        found = await scrape(it)
    for name in (value for key, value in vars(names).items() if key.isupper()):
        if isinstance(name, str):
            assert name in found or f"{name}_count" in found, name
    for name, samples in found.items():
        assert re.fullmatch(r"pdserve_[a-z_]+", name), name
        for labels in samples:
            assert {label for label, _ in labels} <= _LABELS, (name, labels)
    assert sum(found[f"{names.E2E}_count"].values()) == 4
    assert sum(found[f"{names.TTFT}_count"].values()) == 4
    assert sum(found[f"{names.TPOT}_count"].values()) == 3
    by_worker = found[f"{names.WORKER_TTFT}_count"]
    assert by_worker[(("role", "prefill"), ("worker", "prefill-0"))] == 4
    itl = found[f"{names.WORKER_ITL}_count"]
    assert itl[(("role", "decode"), ("worker", "decode-0"))] == 6
    assert found[names.DECISIONS] == {(("decision", "disaggregated"),): 5}
    assert found[names.RETRIES] == {(("kind", "resume"),): 1}
    assert found[names.REJECTIONS][(("reason", "invalid"),)] >= 1
    assert found[names.SLO_REQUESTS] == {(("met", "no"),): 0, (("met", "yes"),): 4}
    assert found[names.SLO_TARGET] == {(("of", "tpot"),): 60, (("of", "ttft"),): 60}


async def test_a_missed_slo_is_no_goodput_and_without_one_nothing_is_counted() -> None:
    async with running("router.slo.ttft=0.000001") as it:
        await it.complete("hello", max_tokens=2)
        assert (await scrape(it))[names.SLO_REQUESTS][(("met", "no"),)] == 1
    async with running() as it:
        await it.complete("hello", max_tokens=2)
        assert names.SLO_REQUESTS not in await scrape(it)


async def test_an_overload_is_a_rejection() -> None:
    async with running("router.max_concurrent_requests=1") as it:
        with it.server.admission.slot(1):
            assert (await it.post(prompt="hello")).status_code == 429
        assert (await scrape(it))[names.REJECTIONS] == {(("reason", "overloaded"),): 1}


async def test_workers_that_come_and_go_make_no_endless_labels(router: Running) -> None:
    metrics = router.server.frontend.metrics
    for number in range(MAX_WORKER_LABELS + 50):
        metrics.observe_worker(names.WORKER_TTFT, ("prefill", f"prefill-{number}"), 0.1)
    found = (await scrape(router))[f"{names.WORKER_TTFT}_count"]
    assert len(found) == MAX_WORKER_LABELS + 1
    assert found[(("role", "prefill"), ("worker", "other"))] == 50
