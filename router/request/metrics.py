"""What the router measures, for Prometheus. Names come from `core.metrics`."""

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from core import metrics as names
from core.config import SloConfig
from core.errors import OverloadedError, PdserveError, UnavailableError
from router.placement.registry import Registry
from router.request.attempt import Attempt
from router.request.timeline import AttemptTimeline, SequenceTimeline

MAX_WORKER_LABELS = 256
_BLOCK_STATES = ("free", "cached", "running", "held", "awaiting")
# Counters of WorkerStatus that are published as they are, by worker.
_WORKER_COUNTERS = (
    ("tokens_prefilled_total", "pdserve_worker_tokens_prefilled", "Prompt tokens computed"),
    ("tokens_decoded_total", "pdserve_worker_tokens_decoded", "Tokens sampled in decode steps"),
    ("kv_bytes_sent_total", "pdserve_worker_kv_bytes_sent", "KV bytes read by peers"),
    ("kv_bytes_received_total", "pdserve_worker_kv_bytes_received", "KV bytes pulled from peers"),
    ("transfers_ok_total", "pdserve_worker_transfers_ok", "Hand-overs that went well"),
    ("transfers_failed_total", "pdserve_worker_transfers_failed", "Hand-overs that failed"),
    ("rdma_fallbacks_total", "pdserve_worker_rdma_fallbacks", "TCP where UCX_TLS asks for RDMA"),
    ("prefix_hit_tokens_total", "pdserve_worker_prefix_hit_tokens", "Prompt tokens found cached"),
    ("preemptions_total", "pdserve_worker_preemptions", "Sequences preempted"),
    ("aborts_total", "pdserve_worker_aborts", "Sequences aborted"),
)
# Also by the method of speculative decoding, of workers that have one.
_DRAFT_COUNTERS = (
    ("tokens_drafted_total", "pdserve_worker_tokens_drafted", "Proposed by speculative decoding"),
    ("tokens_draft_accepted_total", "pdserve_worker_tokens_draft_accepted", "Of those, accepted"),
    ("draft_pauses_total", "pdserve_worker_draft_pauses", "Sequences that paused their guesses"),
)

# Families whose values every router process has from the same workers or the same configuration.
SEEN_BY_ALL = frozenset(
    (
        "pdserve_worker_ready", names.KV_BLOCKS, names.REQUESTS_RUNNING, names.REQUESTS_WAITING,
        names.SLO_TARGET, *(name for _, name, _ in (*_WORKER_COUNTERS, *_DRAFT_COUNTERS)),
    )
)  # fmt: skip


class Metrics:
    """Counters and histograms of one router, in a registry of its own."""

    def __init__(self, workers: Registry, slo: SloConfig = SloConfig()) -> None:
        self._slo = slo
        self._registry = CollectorRegistry()
        self._registry.register(_WorkerCollector(workers))

        def histogram(name: str, help: str, labels: tuple[str, ...] = ()) -> Histogram:
            return Histogram(
                name, help, labels, buckets=names.LATENCY_BUCKETS, registry=self._registry
            )

        def counter(name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(name, help, labels, registry=self._registry)

        self._ttft = histogram(names.TTFT, "Arrival to the first token")
        self._tpot = histogram(names.TPOT, "(e2e - ttft) / (tokens - 1) of one sequence")
        itl = TokenHistogram(names.ITL, "Gap between two batches of one sequence")
        self.gaps = itl.child(())
        self._e2e = histogram(names.E2E, "Arrival to the last token of one sequence")
        self._queue_time = histogram(names.QUEUE_TIME, "Waiting on a worker", ("phase",))
        self._kv_seconds = histogram(names.KV_TRANSFER_SECONDS, "Sum of the pulls of one request")
        self._kv_bytes = counter(names.KV_TRANSFER_BYTES, "KV bytes pulled by D", ("backend",))
        self._hits = counter(names.PREFIX_HIT_TOKENS, "Prompt tokens found in P's prefix cache")
        self._prompt = counter(names.PROMPT_TOKENS, "Prompt tokens of answered requests")
        self._output = counter(names.OUTPUT_TOKENS, "Output tokens")
        self._requests = counter(names.REQUESTS, "API requests", ("api", "outcome"))
        self._retries = counter(names.RETRIES, "Attempts made again", ("kind",))
        self._rejections = counter(names.REJECTIONS, "Refused before a worker heard", ("reason",))
        self._decisions = counter(names.DECISIONS, "Attempts by who prefills", ("decision",))
        by = ("role", "worker")
        self._by_worker = {
            name: histogram(name, help, by)
            for name, help in (
                (names.WORKER_TTFT, "Arrival to the first token, by who sent it"),
                (names.WORKER_TPOT, "Time per output token, by who sent the last"),
                (names.WORKER_QUEUE_TIME, "Waiting on this worker"),
                (names.WORKER_PREFILL_SECONDS, "First chunk to the first token"),
                (names.WORKER_KV_TRANSFER_SECONDS, "Sum of this worker's pulls of one request"),
            )
        }
        self._worker_itl = TokenHistogram(
            names.WORKER_ITL, "Gap before a batch of tokens, by who sent it", by
        )
        for collector in (itl, self._worker_itl):
            self._registry.register(collector)
        self._slo_requests = counter(names.SLO_REQUESTS, "Sequences by whether both SLOs were met",
                                     ("met",))  # fmt: skip
        self._seen_workers: set[str] = set()
        target = Gauge(names.SLO_TARGET, "What router.slo asks for", ("of",),
                       registry=self._registry)  # fmt: skip
        for of, seconds in (("ttft", slo.ttft), ("tpot", slo.tpot)):
            if seconds is not None:
                target.labels(of).set(seconds)
        if slo.is_set:
            for met in ("yes", "no"):
                self._slo_requests.labels(met)
        self.queued = Gauge(
            "pdserve_router_requests_queued",
            "Sequences that wait for a worker to have room",
            registry=self._registry,
        )
        self.in_flight = Gauge(
            "pdserve_router_requests_in_flight",
            "Sequences that this router is working on",
            registry=self._registry,
        )

    @property
    def content_type(self) -> str:
        return CONTENT_TYPE_LATEST

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def count_request(self, api: str, outcome: str) -> None:
        self._requests.labels(api, outcome).inc()

    def count_retry(self, resumed: bool) -> None:
        self._retries.labels("resume" if resumed else "retry").inc()

    def count_rejection(self, error: PdserveError) -> None:
        """`error` refused a request that no worker had heard of."""
        if isinstance(error, OverloadedError):
            reason = "overloaded"
        elif isinstance(error, UnavailableError):
            reason = "unavailable"
        else:
            reason = "invalid"
        self._rejections.labels(reason).inc()

    def count_usage(self, num_prompt: int, num_cached: int, num_output: int) -> None:
        self._prompt.inc(num_prompt)
        self._hits.inc(num_cached)
        self._output.inc(num_output)

    def observe_attempt(self, attempt: Attempt) -> None:
        prefill, worker = attempt.placement.prefill, attempt.placement.decode
        self._decisions.labels("local" if prefill is None else "disaggregated").inc()
        started = attempt.prefill_started
        if started is not None and prefill is not None:
            self._queue_time.labels("prefill").observe(started.queue_seconds)
            source = ("prefill", prefill.id)
            self.observe_worker(names.WORKER_QUEUE_TIME, source, started.queue_seconds)
            if attempt.prefilled is not None:
                seconds = attempt.prefilled.prefill_seconds
                self.observe_worker(names.WORKER_PREFILL_SECONDS, source, seconds)
        decode = attempt.decode_started
        if decode is not None:
            self._queue_time.labels("decode").observe(decode.queue_seconds)
            target = (worker.role.value, worker.id)
            self.observe_worker(names.WORKER_QUEUE_TIME, target, decode.queue_seconds)
            if prefill is not None:
                seconds = decode.kv_transfer_seconds
                self.observe_worker(names.WORKER_KV_TRANSFER_SECONDS, target, seconds)
                self._kv_seconds.observe(decode.kv_transfer_seconds)
                status = worker.status
                transport = status.transport.partition(" ")[0] if status is not None else ""
                self._kv_bytes.labels(transport or "unknown").inc(decode.kv_bytes)

    def observe_worker(self, name: str, worker: tuple[str, str], seconds: float) -> None:
        """`worker`: role and id."""
        self._by_worker[name].labels(*self._label(worker)).observe(seconds)

    def worker_gaps(self, worker: tuple[str, str]) -> "Gaps":
        return self._worker_itl.child(self._label(worker))

    def _label(self, worker: tuple[str, str]) -> tuple[str, str]:
        """Ids of a pool are used again; should somebody scale through hundreds of them, the rest
        share one name."""
        role, worker_id = worker
        if worker_id not in self._seen_workers:
            if len(self._seen_workers) >= MAX_WORKER_LABELS:
                worker_id = "other"
            else:
                self._seen_workers.add(worker_id)
        return role, worker_id

    def count_goodput(self, ttft: float, tpot: float | None) -> None:
        """One sequence has ended well; a single token has no tpot and meets any."""
        slo = self._slo
        if not slo.is_set:
            return
        met = slo.ttft is None or ttft <= slo.ttft
        met = met and (slo.tpot is None or tpot is None or tpot <= slo.tpot)
        self._slo_requests.labels("yes" if met else "no").inc()

    def clock(self, timeline: SequenceTimeline) -> "SequenceClock":
        return SequenceClock(self, timeline)

    def observe_first(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def observe_end(self, e2e: float, tpot: float | None) -> None:
        self._e2e.observe(e2e)
        if tpot is not None:
            self._tpot.observe(tpot)


class SequenceClock:
    """Puts the times of one sequence into the histograms, as its timeline takes them."""

    def __init__(self, metrics: Metrics, timeline: SequenceTimeline) -> None:
        self._metrics = metrics
        self._timeline = timeline
        self._last: float | None = None
        # Whose gaps these are, and from which attempt on nobody else will send.
        self._emitter_gaps = metrics.gaps
        self._settled: AttemptTimeline | None = None

    def tick(self) -> None:
        """After the timeline's own tick."""
        metrics, now = self._metrics, self._timeline.last_token
        attempt = self._timeline.attempts[-1]
        assert now is not None
        if self._last is None:
            metrics.observe_first(now)
            metrics.observe_worker(names.WORKER_TTFT, attempt.emitter, now)
        else:
            if attempt is not self._settled:
                self._emitter_gaps = metrics.worker_gaps(attempt.emitter)
                if attempt.decode_started is not None:
                    self._settled = attempt
            metrics.gaps.observe(now - self._last)
            self._emitter_gaps.observe(now - self._last)
        self._last = now

    def finish(self) -> None:
        """After the timeline's own finish."""
        metrics, timeline = self._metrics, self._timeline
        assert timeline.finished is not None
        tpot, worker = timeline.tpot, timeline.emitter
        metrics.observe_end(timeline.finished, tpot)
        if tpot is not None and worker is not None:
            metrics.observe_worker(names.WORKER_TPOT, worker, tpot)
        if timeline.first_token is not None:
            metrics.count_goodput(timeline.first_token, tpot)


class Gaps:
    """One series of a TokenHistogram."""

    __slots__ = ("counts", "total")

    def __init__(self) -> None:
        self.counts = [0] * (len(names.LATENCY_BUCKETS) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(names.LATENCY_BUCKETS, seconds)] += 1
        self.total += seconds


class TokenHistogram(Collector):
    """A histogram that every token goes into. The library's own takes a lock for the sum and for
    the bucket, and a search through all buckets, which is a fifth of what a token costs; here all
    happens in the event loop's thread."""

    def __init__(self, name: str, help: str, labels: tuple[str, ...] = ()) -> None:
        self._describe = name, help, labels
        self._series: dict[tuple[str, ...], Gaps] = {}
        if not labels:
            self.child(())

    def child(self, labels: tuple[str, ...]) -> Gaps:
        if labels not in self._series:
            self._series[labels] = Gaps()
        return self._series[labels]

    def describe(self) -> Iterable[Metric]:
        name, help, labels = self._describe
        return [HistogramMetricFamily(name, help, labels=labels)]

    def collect(self) -> Iterable[Metric]:
        name, help, labels = self._describe
        family = HistogramMetricFamily(name, help, labels=labels)
        bounds = [*map(floatToGoString, names.LATENCY_BUCKETS), "+Inf"]
        for values, gaps in self._series.items():
            cumulative = accumulate(gaps.counts)
            family.add_metric(values, list(zip(bounds, cumulative, strict=True)), gaps.total)
        yield family


class _WorkerCollector(Collector):
    """Gauges and counters of every worker, from its last status, at the time of the scrape."""

    def __init__(self, workers: Registry) -> None:
        self._workers = workers

    def collect(self) -> Iterable[Metric]:
        labels = ["worker", "role"]
        ready = GaugeMetricFamily("pdserve_worker_ready", "1: takes requests", labels=labels)
        flying = GaugeMetricFamily(
            "pdserve_router_attempts_in_flight", "Attempts of this router there", labels=labels
        )
        blocks = GaugeMetricFamily(names.KV_BLOCKS, "KV blocks", labels=[*labels, "state"])
        running = GaugeMetricFamily(names.REQUESTS_RUNNING, "Sequences scheduled", labels=labels)
        waiting = GaugeMetricFamily(names.REQUESTS_WAITING, "Sequences waiting", labels=labels)
        counters = [
            (field, CounterMetricFamily(name, help, labels=labels))
            for field, name, help in _WORKER_COUNTERS
        ]
        draft_counters = [
            (field, CounterMetricFamily(name, help, labels=[*labels, "method"]))
            for field, name, help in _DRAFT_COUNTERS
        ]
        for worker in self._workers.workers.values():
            own = [worker.id, worker.role.value]
            ready.add_metric(own, worker.is_ready)
            flying.add_metric(own, worker.num_passengers)
            status = worker.status
            if status is None:
                continue
            for state in _BLOCK_STATES:
                blocks.add_metric([*own, state], getattr(status.kv_blocks, state))
            running.add_metric(own, status.requests_running)
            waiting.add_metric(own, status.requests_waiting)
            for field, family in counters:
                family.add_metric(own, getattr(status, field))
            method = status.speculative_method
            for field, family in draft_counters if method else ():
                family.add_metric([*own, method], getattr(status, field))
        families = [family for _, family in (*counters, *draft_counters)]
        yield from (ready, flying, blocks, running, waiting, *families)
