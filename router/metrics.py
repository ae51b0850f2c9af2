"""What the router measures, for Prometheus. Names come from `core.metrics`."""

from collections.abc import Iterable
from time import monotonic

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from core import metrics as names
from router.attempt import Attempt
from router.registry import Registry

_BLOCK_STATES = ("free", "cached", "running", "held", "awaiting")
# Counters of WorkerStatus that are published as they are, by worker.
_WORKER_COUNTERS = (
    ("tokens_prefilled_total", "pdserve_worker_tokens_prefilled", "Prompt tokens computed"),
    ("tokens_decoded_total", "pdserve_worker_tokens_decoded", "Tokens sampled in decode steps"),
    ("kv_bytes_sent_total", "pdserve_worker_kv_bytes_sent", "KV bytes read by peers"),
    ("kv_bytes_received_total", "pdserve_worker_kv_bytes_received", "KV bytes pulled from peers"),
    ("transfers_ok_total", "pdserve_worker_transfers_ok", "Hand-overs that went well"),
    ("transfers_failed_total", "pdserve_worker_transfers_failed", "Hand-overs that failed"),
    ("preemptions_total", "pdserve_worker_preemptions", "Sequences preempted"),
    ("aborts_total", "pdserve_worker_aborts", "Sequences aborted"),
)


class Metrics:
    """Counters and histograms of one router, in a registry of its own."""

    def __init__(self, workers: Registry) -> None:
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
        self._itl = histogram(names.ITL, "Gap between two batches of one sequence")
        self._e2e = histogram(names.E2E, "Arrival to the last token of one sequence")
        self._queue_time = histogram(names.QUEUE_TIME, "Waiting on a worker", ("phase",))
        self._kv_seconds = histogram(names.KV_TRANSFER_SECONDS, "Sum of the pulls of one request")
        self._kv_bytes = counter(names.KV_TRANSFER_BYTES, "KV bytes pulled by D", ("backend",))
        self._hits = counter(names.PREFIX_HIT_TOKENS, "Prompt tokens found in P's prefix cache")
        self._prompt = counter("pdserve_prompt_tokens_total", "Prompt tokens of answered requests")
        self._output = counter("pdserve_generation_tokens_total", "Output tokens")
        self._requests = counter("pdserve_requests_total", "API requests", ("api", "outcome"))
        self._retries = counter("pdserve_retries_total", "Attempts made again", ("kind",))
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

    def count_usage(self, num_prompt: int, num_cached: int, num_output: int) -> None:
        self._prompt.inc(num_prompt)
        self._hits.inc(num_cached)
        self._output.inc(num_output)

    def observe_attempt(self, attempt: Attempt) -> None:
        started = attempt.prefill_started
        if started is not None:
            self._queue_time.labels("prefill").observe(started.queue_seconds)
        decode = attempt.decode_started
        if decode is not None:
            self._queue_time.labels("decode").observe(decode.queue_seconds)
            if attempt.placement.prefill is not None:
                self._kv_seconds.observe(decode.kv_transfer_seconds)
                status = attempt.placement.decode.status
                transport = status.transport.partition(" ")[0] if status is not None else ""
                self._kv_bytes.labels(transport or "unknown").inc(decode.kv_bytes)

    def clock(self) -> "SequenceClock":
        return SequenceClock(self._ttft, self._tpot, self._itl, self._e2e)


class SequenceClock:
    """Takes the times of one sequence, from its arrival."""

    def __init__(self, ttft: Histogram, tpot: Histogram, itl: Histogram, e2e: Histogram) -> None:
        self._ttft, self._tpot, self._itl, self._e2e = ttft, tpot, itl, e2e
        self._arrival = monotonic()
        self._first = self._last = 0.0
        self._num_tokens = 0

    def tick(self, num_tokens: int) -> None:
        now = monotonic()
        if not self._num_tokens:
            self._first = now
            self._ttft.observe(now - self._arrival)
        else:
            self._itl.observe(now - self._last)
        self._last = now
        self._num_tokens += num_tokens

    def finish(self) -> None:
        self._e2e.observe(monotonic() - self._arrival)
        if self._num_tokens > 1:
            self._tpot.observe((self._last - self._first) / (self._num_tokens - 1))


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
        yield from (ready, flying, blocks, running, waiting, *(family for _, family in counters))
