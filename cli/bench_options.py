"""The options that `pdserve bench` and `pdserve compare` share, and what becomes of them."""

import asyncio
import inspect
import json
import math
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

import typer

from core.errors import ConfigError

if TYPE_CHECKING:
    from loadgen.benchmark import Workload
    from loadgen.summary import Slo
    from loadgen.workload import Arrivals

T = TypeVar("T")
load_option = partial(typer.Option, rich_help_panel="Load")
request_option = partial(typer.Option, rich_help_panel="Requests")
result_option = partial(typer.Option, rich_help_panel="Results")

Warmup = Annotated[int, request_option(min=0, help="Requests before the measurement.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """What is sent and when, as the user gave it."""

    num_requests: Annotated[int, request_option(min=1, help="How many.")] = 100
    concurrency: Annotated[
        str | None, load_option(metavar="N", help="Closed loop: so many at a time.")
    ] = None
    rate: Annotated[
        str | None,
        load_option(
            metavar="R",
            help="Open loop: so many a second, whatever the server does; inf: all at once.",
        ),
    ] = None
    burstiness: Annotated[
        float,
        load_option(
            help="Shape of the gamma distributed gaps of --rate: 1 is Poisson, less is more bursty."
        ),
    ] = 1.0
    input_len: Annotated[
        str,
        request_option(
            metavar="LENGTH",
            help="Prompt tokens: N, normal:MEAN:STD, lognormal:MEDIAN:SIGMA, uniform:LOW:HIGH.",
        ),
    ] = "256"
    output_len: Annotated[str, request_option(metavar="LENGTH", help="Output tokens, alike.")] = (
        "64"
    )
    prefix_len: Annotated[
        int, request_option(min=0, help="So many of the prompt's tokens are a shared prefix.")
    ] = 0
    num_prefixes: Annotated[
        int, request_option(min=1, help="How many such prefixes there are.")
    ] = 1
    trace: Annotated[
        Path | None,
        request_option(
            help="Lengths, arrivals and shared prefixes of a trace: Azure or BurstGPT CSV, "
            "Mooncake JSONL, also as .gz."
        ),
    ] = None
    trace_scale: Annotated[float, load_option(help="Play a trace so many times as fast.")] = 1.0
    length_scale: Annotated[
        float, request_option(help="All lengths of a trace times this, for small models.")
    ] = 1.0
    max_requests: Annotated[
        int | None, request_option(min=1, help="The first so many of a trace.")
    ] = None
    seed: Annotated[int, request_option(help="Same seed, same requests.")] = 0
    slo_ttft: Annotated[
        float | None, result_option(help="Seconds that a good TTFT has at most.")
    ] = None
    slo_tpot: Annotated[
        float | None, result_option(help="Seconds that a good TPOT has at most.")
    ] = None

    def workload(self) -> "Workload":
        """Raises ConfigError that names the option or the trace's line."""
        from loadgen.benchmark import Workload
        from loadgen.length import parse_length
        from loadgen.trace import read_trace
        from loadgen.workload import Synthetic

        if not 0 < self.length_scale < math.inf:
            raise ConfigError(f"--length-scale {self.length_scale:g}: expected more than 0")
        if self.trace is not None:
            entries = tuple(read_trace(self.trace, self.max_requests))
            return Workload(trace=entries, length_scale=self.length_scale, seed=self.seed)
        synthetic = Synthetic(
            self.num_requests,
            parse_length(self.input_len, "--input-len"),
            parse_length(self.output_len, "--output-len"),
            self.prefix_len,
            self.num_prefixes,
        )
        return Workload(synthetic, seed=self.seed)

    def loads(self) -> list["Arrivals"]:
        """One for each point of a sweep: `--rate 1,2,4`. Raises ConfigError."""
        from loadgen.workload import Arrivals

        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate and --concurrency: an open loop or a closed one, not both")
        for name, value in (("burstiness", self.burstiness), ("trace-scale", self.trace_scale)):
            if not 0 < value < math.inf:
                raise ConfigError(f"--{name} {value:g}: expected more than 0")
        if self.rate is not None:
            rates = _positive_list(self.rate, "--rate", float)
            return [Arrivals(rate=rate, burstiness=self.burstiness) for rate in rates]
        if self.concurrency is not None:
            counts = _positive_list(self.concurrency, "--concurrency", int)
            return [Arrivals(concurrency=count) for count in counts]
        if self.trace is not None:
            return [Arrivals(speed=self.trace_scale)]
        return [Arrivals(concurrency=8)]

    def slo(self) -> "Slo":
        from loadgen.summary import Slo

        for name, value in (("ttft", self.slo_ttft), ("tpot", self.slo_tpot)):
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"--slo-{name} {value:g}: expected seconds, more than 0")
        return Slo(self.slo_ttft, self.slo_tpot)


@dataclass(frozen=True, slots=True, kw_only=True)
class AskOptions:
    """How each request asks."""

    endpoint: Annotated[str, request_option(help="completions or chat.")] = "completions"
    extra: Annotated[
        str | None,
        request_option(metavar="JSON", help="More fields for each body; null leaves a field out."),
    ] = None
    timeout: Annotated[float, load_option(help="Seconds that one request may take.")] = 600.0

    def checked_endpoint(self) -> str:
        if self.endpoint not in ("completions", "chat"):
            raise ConfigError(f"--endpoint {self.endpoint}: expected completions or chat")
        return self.endpoint

    def extra_fields(self) -> dict[str, Any]:
        try:
            extra = json.loads(self.extra) if self.extra is not None else {}
        except ValueError as error:
            raise ConfigError(f"--extra: not JSON: {error}") from error
        if not isinstance(extra, dict):
            raise ConfigError("--extra: expected an object, for example '{\"top_k\": 1}'")
        return extra


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """Where results go; None: nowhere."""

    json_file: Annotated[Path | None, result_option("--json", help="Write all figures.")] = None
    plots: Annotated[
        Path | None,
        result_option(
            metavar="DIR", help="Write report.html, and PNGs where matplotlib is installed."
        ),
    ] = None


def spread(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters of dataclass type become their fields, each an option of its
    own: several commands share options by naming the dataclass."""
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, Any] = {
        n: p.annotation for n, p in signature.parameters.items() if is_dataclass(p.annotation)
    }
    parameters: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        parameters += [
            inspect.Parameter(
                f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name]
            )
            for f in fields(groups[name])
        ]

    @wraps(command)
    def spread_out(**values: Any) -> None:
        made = {
            name: group(**{f.name: values.pop(f.name) for f in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **made)

    spread_out.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    spread_out.__annotations__ = {p.name: p.annotation for p in parameters}
    return spread_out


def run_async(main: Coroutine[Any, Any, T]) -> T:
    """On the lighter event loop where there is one: the client shares cores with the server."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    if sys.platform == "linux":
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(main)


def _positive_list(text: str, option: str, kind: Callable[[str], Any]) -> list[Any]:
    try:
        values = [kind(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(value > 0 for value in values):
        raise ConfigError(f"{option} {text}: expected a positive number, or several: 1,2,4")
    return values
