"""From options to measured runs: what `pdserve bench` and `pdserve compare` have in common."""

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from core.errors import ConfigError
from loadgen.chart import LabelledRun
from loadgen.client import StreamingClient, Target, base_url, probe, server_info
from loadgen.prompt import PromptMaker, TokenPrompts, WordPrompts, fit_words
from loadgen.record import PlannedRequest, RequestRecord, Segment
from loadgen.runner import Run
from loadgen.summary import Slo, summarize
from loadgen.trace import TraceEntry
from loadgen.workload import (
    Arrivals,
    Synthetic,
    prefix_share,
    synthetic_requests,
    trace_requests,
    with_arrivals,
)

PromptKind = Literal["auto", "ids", "words"]
_PROBE_WORDS = (32, 160)


@dataclass(frozen=True, slots=True)
class Workload:
    """What is asked for, independent of who is asked. Either `synthetic` or `trace` is set."""

    synthetic: Synthetic | None = None
    trace: tuple[TraceEntry, ...] | None = None
    length_scale: float = 1.0
    seed: int = 0

    def requests(self, salt: str) -> list[PlannedRequest]:
        """Without arrivals, or with the trace's. Each salt has texts of its own, so that one run
        does not warm the server's prefix cache for the next."""
        if self.trace is not None:
            return trace_requests(self.trace, self.seed, salt, self.length_scale)
        assert self.synthetic is not None
        return synthetic_requests(self.synthetic, self.seed, salt)


@dataclass(frozen=True, slots=True)
class Service:
    """Who is asked, and how."""

    url: str
    model: str | None = None
    endpoint: str = "completions"
    api_key: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = 600.0
    prompts: PromptKind = "auto"
    vocab_size: int | None = None
    ignore_eos: bool | None = None  # None: where the server is known to understand it


@dataclass(slots=True)
class Prepared:
    """A server that has answered, and prompts that fit it. `notes`: what the user should know."""

    client: StreamingClient
    prompts: PromptMaker
    max_model_len: int | None
    notes: list[str]


async def prepare(service: Service, num_warmup: int) -> Prepared:
    """Finds the model, measures how many tokens words make if prompts are words, and warms up.
    Raises PdserveError if the server cannot be used."""
    url = base_url(service.url)
    info = await server_info(url, service.model, service.api_key)
    extra = dict(service.extra)
    ignores_eos = info.is_extended if service.ignore_eos is None else service.ignore_eos
    notes = []
    if ignores_eos:
        extra.setdefault("ignore_eos", True)
    else:
        notes.append("answers may end early: this server is not known to take ignore_eos")
    client = StreamingClient(
        Target(url, info.model, service.endpoint, service.api_key, extra, service.timeout_s)
    )
    prompts = await _prompts(service, client, info.is_extended, notes)
    for i in range(num_warmup):
        await probe(client, prompts.make([Segment(f"warm-up/{i}", 64)]), 8)
    return Prepared(client, prompts, info.max_model_len, notes)


async def _prompts(
    service: Service, client: StreamingClient, is_extended: bool, notes: list[str]
) -> PromptMaker:
    kind = service.prompts
    if kind == "ids" and service.endpoint == "chat":
        raise ConfigError("--prompts ids: a chat has no token ids, only words")
    if kind == "auto":
        kind = "ids" if is_extended and service.endpoint == "completions" else "words"
    if kind == "ids":
        if service.vocab_size is None:
            return TokenPrompts()
        high = service.vocab_size
        return TokenPrompts(min(1000, high // 2), high)
    counted = []
    for num_words in _PROBE_WORDS:
        record = await probe(client, WordPrompts().make([Segment("probe", num_words)]), 1)
        if record.prompt_tokens is None:
            notes.append("the server reports no usage: one word is taken for one token")
            return WordPrompts()
        counted.append((num_words, record.prompt_tokens))
    return fit_words(counted[0], counted[1])


def fitting(
    requests: Sequence[PlannedRequest], max_model_len: int | None
) -> tuple[list[PlannedRequest], int]:
    """Those that the model can serve at all, and how many were left out."""
    if max_model_len is None:
        return list(requests), 0
    fit = [r for r in requests if r.num_prompt_tokens + r.num_output_tokens <= max_model_len]
    return fit, len(requests) - len(fit)


async def measure(
    prepared: Prepared,
    workload: Workload,
    arrivals: Arrivals,
    slo: Slo,
    *,
    salt: str,
    label: str,
    on_start: Callable[[int], None] = lambda total: None,
    on_done: Callable[[RequestRecord], None] = lambda record: None,
) -> LabelledRun:
    """One run. Ctrl-C ends it early, and what was measured so far is returned; a second Ctrl-C
    is a KeyboardInterrupt."""
    requests, num_left_out = fitting(workload.requests(salt), prepared.max_model_len)
    if not requests:
        raise ConfigError(f"no request fits into the model's {prepared.max_model_len} tokens")
    plan = with_arrivals(requests, arrivals, workload.seed)
    run = Run(
        prepared.client, plan, prepared.prompts, concurrency=arrivals.concurrency, on_done=on_done
    )
    on_start(len(plan))
    with _stopped_by_ctrl_c(run):
        result = await run.run()
    summary = summarize(result, slo)
    summary["prefix_share"] = prefix_share(plan)
    summary["left_out"] = num_left_out
    load = arrivals.rate if arrivals.concurrency is None else float(arrivals.concurrency)
    return LabelledRun(label, result.records, summary, load)


@contextlib.contextmanager
def _stopped_by_ctrl_c(run: Run) -> Iterator[None]:
    loop = asyncio.get_running_loop()

    def stop() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        run.stop()

    try:
        loop.add_signal_handler(signal.SIGINT, stop)
    except (ValueError, RuntimeError, NotImplementedError):  # not the main thread, or no Unix
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
