"""The `pdserve` command: what a person types. Each command imports what it needs when it runs."""

import importlib.metadata
import json
from pathlib import Path
from typing import Annotated

import typer

from cli.bench import bench
from cli.compare import compare
from cli.operate import apply, doctor, drain, logs, rollout, scale, switch, top
from cli.options import Overrides, Url
from cli.terminal import Reporter, clear_errors

app = typer.Typer(
    help="Serve a language model with prefill and decode on separate pools of workers.\n\n"
    "Start: pdserve up configs/local.yaml. Talk: pdserve chat 'Why is the sky blue?'.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
models_app = typer.Typer(help="Get models ahead of time and see what is here.",
                         no_args_is_help=True)  # fmt: skip
app.add_typer(models_app, name="models")
keys_app = typer.Typer(help="API keys of the HTTP and gRPC endpoints.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")


@app.command(epilog="Example: pdserve up configs/local.yaml --set pools.decode.replicas=2")
def up(
    config: Annotated[Path, typer.Argument(help="The YAML file of the deployment.")],
    overrides: Overrides = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Show logs, and tracebacks of errors.")
    ] = False,
    bind: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="Where the controller listens, for routers elsewhere. Default: here alone.",
        ),
    ] = None,
    no_router: Annotated[
        bool, typer.Option("--no-router", help="Workers and controller only, as on Kubernetes.")
    ] = False,
) -> None:
    """Start a deployment and keep it in the foreground until Ctrl-C."""
    with clear_errors(verbose):
        from cli.up import UpOptions, run_up

        run_up(UpOptions(config, tuple(overrides or ()), verbose, bind, not no_router))


@app.command(epilog="Example: pdserve down 127.0.0.1:8000")
def down(
    http: Annotated[
        str | None,
        typer.Argument(help="The HTTP address of the one to stop, if several run here."),
    ] = None,
) -> None:
    """Stop a deployment that runs on this machine."""
    with clear_errors():
        from cli.down import stop_deployment
        from cli.state import find_deployment
        from core.errors import UnavailableError

        deployment = find_deployment(http)
        if deployment is None:
            raise UnavailableError(f"nothing runs here{f' at {http}' if http else ''}")
        with Reporter() as reporter:
            reporter.doing(f"Stopping {deployment.url} (pid {deployment.pid})")
            ended = stop_deployment(deployment)
            reporter.done("Stopped" if ended else "It did not stop when asked, and was killed")


app.command(epilog="Example: pdserve apply configs/local.yaml --set pools.decode.replicas=2")(apply)
app.command(epilog="Example: pdserve scale prefill=3 decode=1")(scale)
app.command(epilog="Example: pdserve switch worker-1 --to decode")(switch)
app.command(epilog="Example: pdserve drain prefill-0 --grace 60")(drain)
app.command(epilog="Example: pdserve rollout decode")(rollout)
app.command(epilog="Example: pdserve logs prefill-0 -f")(logs)
app.command(epilog="Example: pdserve top --interval 1")(top)
app.command(epilog="Example: pdserve doctor configs/local.yaml")(doctor)


@app.command(epilog="Example: pdserve status --json | jq '.workers[].kv_blocks'")
def status(
    url: Url = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The router's /cluster as it is.")
    ] = False,
) -> None:
    """Show the workers, their KV blocks and what they have done."""
    with clear_errors():
        from cli.client import find_url, get_json, router_client
        from cli.status import print_cluster

        address = find_url(url)
        with router_client(address) as client:
            cluster = get_json(client, "/cluster")
        if as_json:
            print(json.dumps(cluster, indent=2))
        else:
            print_cluster(cluster, address)


@app.command(epilog="Example: pdserve chat 'Write a haiku about caches' --max-tokens 60")
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="What to ask. Without it, a conversation begins.")
    ] = None,
    url: Url = None,
    system: Annotated[str | None, typer.Option(help="A system message to start with.")] = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="The longest answer.")] = None,
) -> None:
    """Talk to the model in the terminal; the answer streams."""
    with clear_errors():
        from cli.chat import run_chat
        from cli.client import find_url

        run_chat(find_url(url), prompt, system, max_tokens)


app.command(epilog="Example: pdserve bench --rate 1,2,4 --input-len normal:512:128 --plots out")(
    bench
)
app.command(epilog="Example: pdserve compare configs/local.yaml --concurrency 8 --plots out")(
    compare
)


@app.command(
    epilog="Example: pdserve plan --trace azure.csv --hardware h100 --model llama-3.1-8b "
    "--slo-ttft 0.5 --slo-tpot 0.03 --gpus 8"
)
def plan(
    trace: Annotated[
        Path, typer.Option(help="Azure 2023 CSV, Mooncake JSONL, or a CSV of lengths; .gz too.")
    ],
    hardware: Annotated[
        str, typer.Option(help="a100, h100, h200, or a .json that `pdserve profile` wrote.")
    ],
    slo_ttft: Annotated[float, typer.Option(min=0, help="Seconds to the first token.")],
    slo_tpot: Annotated[float, typer.Option(min=0, help="Seconds for each further token.")],
    gpus: Annotated[
        int, typer.Option(min=1, help="The most that the plan may use; of a profile, workers.")
    ],
    model: Annotated[
        str | None,
        typer.Option(help="One whose shape is known, like llama-3.1-8b; a profile has its own."),
    ] = None,
    attainment: Annotated[
        float, typer.Option(min=0, max=1, help="The share of requests that must meet both.")
    ] = 0.9,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="Requests/s, at random, instead of the trace's arrivals."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=1, help="How long each rate is simulated, at least.")
    ] = 60.0,
    requests: Annotated[
        int, typer.Option(min=10, help="How many requests each rate has, at least.")
    ] = 1000,
    cost_per_gpu_hour: Annotated[
        float | None, typer.Option(min=0, help="Adds costs in this currency.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of arrivals and placement.")] = 0,
    exact: Annotated[
        bool, typer.Option("--exact", help="Ask the engine's scheduler for every step; slow.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write the deployment's YAML here.")] = None,
    autoscale: Annotated[
        str | None,
        typer.Option(
            metavar="MIN..MAX", help="Let each pool follow the load, and say what that costs."
        ),
    ] = None,
    switch_roles: Annotated[
        bool, typer.Option("--switch-roles", help="With workers that may change their pool.")
    ] = False,
) -> None:
    """Find the pools that serve a trace best, by simulation: goodput, cost and a configuration."""
    with clear_errors():
        from cli.plan import PlanOptions, run_plan
        from planner.result import Slo

        run_plan(
            PlanOptions(
                trace, hardware, model, Slo(slo_ttft, slo_tpot), gpus,
                attainment=attainment, rate=rate, seconds=seconds, requests=requests,
                cost_per_gpu_hour=cost_per_gpu_hour, seed=seed, exact=exact, as_json=as_json,
                out=out, autoscale=autoscale, switch_roles=switch_roles,
            )
        )  # fmt: skip


@app.command(epilog="Example: pdserve profile --out here.json")
def profile(
    out: Annotated[Path, typer.Option(help="A .json for `pdserve plan --hardware`.")],
    url: Url = None,
) -> None:
    """Measure a deployment of one prefill and one decode worker, for `plan` to simulate more."""
    with clear_errors():
        from cli.client import find_url
        from cli.profile import run_profile

        run_profile(find_url(url), out)


@models_app.command("pull", epilog="Example: pdserve models pull smollm2-135m")
def models_pull(
    name: Annotated[str, typer.Argument(help="A built-in name, a hub id, a folder or a file.")],
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Show tracebacks.")] = False,
) -> None:
    """Get a model now, so that `up` need not."""
    with clear_errors(verbose):
        from core.model_files import resolve_model

        with Reporter() as reporter:
            reporter.doing(f"Looking for model {name}")
            files = resolve_model(name, progress=reporter.doing)
            reporter.done(f"{files.name} is at {files.path}")


@models_app.command("list", epilog="Example: pdserve models list")
def models_list() -> None:
    """List the built-in models and whether they are here already."""
    with clear_errors():
        from core.errors import ModelError
        from core.model_files import built_in_models, resolve_model

        for name in built_in_models():
            try:
                where = str(resolve_model(name, download=False).path)
            except ModelError:
                where = f"not here yet; pdserve models pull {name}"
            print(f"{name}\t{where}")


@keys_app.command("new", epilog="Example: pdserve keys new alice --requests-per-minute 60")
def keys_new(
    name: Annotated[str, typer.Argument(help="Whose key it is.")],
    file: Annotated[
        Path, typer.Option(help="The file that router.api_keys_file names; made if needed.")
    ] = Path("api-keys.yaml"),
    requests_per_minute: Annotated[
        float | None, typer.Option(min=0.001, help="The most; without it, no limit.")
    ] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    tokens_per_minute: Annotated[
        float | None, typer.Option(min=1, help="Prompt and output together.")
    ] = None,
) -> None:
    """Make a key. It is printed once, the file keeps its hash; a running router sees it."""
    with clear_errors():
        from cli.keys import add_key

        print(add_key(file, name, requests_per_minute, concurrency, tokens_per_minute))


@app.command(epilog="Example: pdserve version")
def version() -> None:
    """Print the version."""
    print(importlib.metadata.version("pdserve"))


def main() -> None:
    """The console script. Ctrl-C outside `up` ends with 130, as a shell expects."""
    try:
        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
