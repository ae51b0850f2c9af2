"""What `pdserve doctor` finds in a deployment that runs: workers, who fits whom, clocks."""

import ctypes
import email.utils
import time
from collections.abc import Iterator, Mapping
from typing import Any

from cli.client import get_json, router_client
from cli.findings import Finding, Verdict
from core.errors import PdserveError
from core.kv_compatibility import differences

_MOST_SECONDS_APART = 5.0
_TIME_ERROR = 5  # adjtimex(2): the clock is not synchronised
_TIMEX_BYTES = 512  # more than struct timex has


def check_deployment(url: str) -> Iterator[Finding]:
    """Asks the router alone. One that does not answer is a finding."""
    try:
        with router_client(url) as client:
            cluster = get_json(client, "/cluster")
            date = client.get("/health").headers.get("date", "")
    except PdserveError as error:
        yield Finding(Verdict.BAD, error.message, "pdserve logs router, if it runs here")
        return
    yield from check_controller(cluster)
    yield from check_workers(cluster.get("workers", []))
    yield from check_pairs(cluster.get("workers", []))
    yield from check_clock_of(url, date, time.time())


def check_controller(cluster: dict[str, Any]) -> Iterator[Finding]:
    """By the word of the router, which hears from it every 5 s."""
    where = f"the controller at {cluster.get('controller')}"
    if cluster.get("controller_reachable", True):
        yield Finding(Verdict.GOOD, f"the router hears from {where}")
    else:
        yield Finding(
            Verdict.BAD, f"the router does not hear from {where}",
            "requests go on, but no worker is replaced; pdserve logs controller. Ray starts it "
            "again by itself; where its machine is gone: pdserve up",
        )  # fmt: skip


def check_workers(workers: list[dict[str, Any]]) -> Iterator[Finding]:
    ready = [w for w in workers if w.get("state") == "ready"]
    verdict = Verdict.GOOD if ready and len(ready) == len(workers) else Verdict.NOTE
    advice = "" if verdict is Verdict.GOOD else "pdserve status; pdserve logs WORKER"
    yield Finding(verdict, f"{len(ready)} of {len(workers)} workers are ready", advice)
    for worker in workers:
        if worker not in ready:
            detail = worker.get("detail") or "no word of it"
            yield Finding(
                Verdict.NOTE, f"{worker.get('id')} is {worker.get('state')}: {detail}", advice
            )
        elif not worker.get("reachable", True):
            yield Finding(
                Verdict.BAD,
                f"{worker['id']} at {worker.get('address')} is not reached by the router",
                "a firewall or network policy between them, or other certificates or tokens",
            )


def check_pairs(workers: list[dict[str, Any]]) -> Iterator[Finding]:
    """KV can pass only between workers whose descriptions agree (core/kv_compatibility.py)."""
    pools: dict[str, list[dict[str, Any]]] = {}
    for worker in workers:
        if worker.get("compatibility"):
            pools.setdefault(str(worker.get("role")), []).append(worker)
    pairs = [(p, d) for p in pools.get("prefill", []) for d in pools.get("decode", [])]
    parted = 0
    for prefill, decode in pairs:
        ours, theirs = prefill["compatibility"], decode["compatibility"]
        if names := differences(ours, theirs):
            parted += 1
            what = ", ".join(_difference(name, ours, theirs) for name in names)
            yield Finding(
                Verdict.BAD,
                f"{prefill['id']} and {decode['id']} can be no pair: {what}",
                "start both with one file, one model and one version: pdserve rollout",
            )
    if pairs and not parted:
        yield Finding(Verdict.GOOD, f"KV can pass between the workers of every pair ({len(pairs)})")


def _difference(name: str, ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    return f"{name} ({ours.get(name, 'none')} and {theirs.get(name, 'none')})"


def check_clock_of(url: str, date: str, now: float) -> Iterator[Finding]:
    """`date`: of an HTTP answer, to the second."""
    try:
        apart = email.utils.parsedate_to_datetime(date).timestamp() - now
    except (TypeError, ValueError):
        return
    if abs(apart) > _MOST_SECONDS_APART:
        yield Finding(
            Verdict.NOTE,
            f"the clock at {url} is {apart:+.0f} s from this one",
            "requests do not care, certificates and logs do: run chrony or another NTP client",
        )
    else:
        yield Finding(Verdict.GOOD, f"the clock at {url} agrees with this one")


def check_clock() -> Iterator[Finding]:
    """Whether the kernel is told the time by somebody. Linux."""
    try:
        state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    except (OSError, AttributeError):
        return
    if state == _TIME_ERROR:
        yield Finding(
            Verdict.NOTE,
            "nobody sets this machine's clock",
            "of no matter on one machine; on several, certificates and logs want chrony or "
            "another NTP client",
        )
    elif state >= 0:
        yield Finding(Verdict.GOOD, "the clock is synchronised")
