"""Commands that change or watch a running deployment: `pdserve apply`, `scale`, `switch`, `drain`,
`rollout`, `logs`, `top`; and `doctor`, for one that does not run."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from cli.options import Controller, Grace, Overrides, Url
from cli.terminal import Reporter, clear_errors

_WORDS = {1: "scale", 2: "replace the workers one by one", 3: "not while the deployment runs"}


def apply(
    config: Annotated[Path, typer.Argument(help="The changed YAML file.")],
    overrides: Overrides = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the difference, change nothing.")
    ] = False,
    controller: Controller = None,
) -> None:
    """Show how a file differs from what runs, then make it so."""
    with clear_errors(), Reporter() as reporter:
        from cli.control import find_controller, planned_changes, run_operation
        from core.config import load_config
        from rpc import cluster_pb2 as pb

        sets = list(overrides or ())
        load_config(config, sets)  # its errors name the file and the line
        text = config.read_text(encoding="utf-8")
        target = find_controller(controller)
        changes = planned_changes(target, text, sets)
        if not changes:
            reporter.done("Nothing to change")
            return
        for change in changes:
            word = _WORDS.get(change.kind, "?")
            reporter.say(f"  {change.key}: {change.before} -> {change.after}  ({word})")
        if not dry_run:
            request = pb.ApplyRequest(config_yaml=text, overrides=sets)
            run_operation(target, lambda stub: stub.Apply(request), reporter)
            reporter.done("Done")


def scale(
    wishes: Annotated[list[str], typer.Argument(metavar="POOL=NUMBER...", help="prefill=3")],
    controller: Controller = None,
) -> None:
    """Change how many workers pools have. Idle ones go first, and none loses a request."""
    with clear_errors(), Reporter() as reporter:
        from cli.control import find_controller, parse_replicas, run_operation
        from rpc import cluster_pb2 as pb

        request = pb.ScaleRequest(replicas=parse_replicas(wishes))
        target = find_controller(controller)
        if not run_operation(target, lambda stub: stub.Scale(request), reporter):
            reporter.done("Nothing to change")


def drain(
    worker: Annotated[
        str | None, typer.Argument(help="As `pdserve status` names it: prefill-0.")
    ] = None,
    grace: Grace = None,
    host: Annotated[
        str | None,
        typer.Option(help="Instead of one worker: all of a host, until they are gone."),
    ] = None,
    controller: Controller = None,
) -> None:
    """End a worker without losing a request; a fresh one takes its place."""
    with clear_errors(), Reporter() as reporter:
        from cli.control import drain_host, find_controller, run_operation
        from core.errors import ConfigError
        from rpc import cluster_pb2 as pb

        if (worker is None) == (host is None):
            raise ConfigError("expected either a worker or --host")
        if worker is None:
            target = find_controller(controller)
            drain_host(target, str(host), 30.0 if grace is None else grace, reporter)
            return
        request = pb.DrainWorkerRequest(worker_id=worker, grace_seconds=grace)
        reporter.doing(f"Draining {worker}")
        run_operation(find_controller(controller), lambda stub: stub.DrainWorker(request), reporter)


class Pool(StrEnum):
    PREFILL = "prefill"
    DECODE = "decode"


def switch(
    worker: Annotated[str, typer.Argument(help="As `pdserve status` names it: worker-1.")],
    to: Annotated[Pool, typer.Option("--to", help="The pool that it goes to.")],
    grace: Grace = None,
    controller: Controller = None,
) -> None:
    """Move a worker to the other pool; it keeps its process and its weights. Its pool must have
    `roles: [prefill, decode]`."""
    with clear_errors(), Reporter() as reporter:
        from cli.control import find_controller, run_operation
        from core.types import Role
        from rpc import cluster_pb2 as pb
        from rpc import codec

        role = codec.role_to_pb(Role(to.value))
        request = pb.SwitchWorkerRequest(worker_id=worker, role=role, grace_seconds=grace)
        run_operation(
            find_controller(controller), lambda stub: stub.SwitchWorker(request), reporter
        )


def rollout(
    pools: Annotated[
        list[str] | None, typer.Argument(metavar="[POOL]...", help="Default: all pools.")
    ] = None,
    controller: Controller = None,
) -> None:
    """Replace workers one by one; the new one is ready before the old one drains."""
    with clear_errors(), Reporter() as reporter:
        from cli.control import find_controller, run_operation
        from rpc import cluster_pb2 as pb

        request = pb.RolloutRequest(pools=pools or [])
        run_operation(find_controller(controller), lambda stub: stub.Rollout(request), reporter)


def logs(
    name: Annotated[
        str | None, typer.Argument(help="controller, router or a worker like prefill-0.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until Ctrl-C.")] = False,
    lines: Annotated[
        int, typer.Option("--lines", "-n", min=0, help="How many to begin with.")
    ] = 20,
    http: Annotated[
        str | None, typer.Option(help="The HTTP address of the deployment, if several run here.")
    ] = None,
) -> None:
    """Show what controller, router and workers have logged on this machine."""
    with clear_errors():
        from cli.logs import print_logs
        from cli.state import find_deployment, log_dir_for

        deployment = find_deployment(http)
        # One that has ended has left its logs where the next one will write.
        folder = deployment.log_dir if deployment else log_dir_for(http or "127.0.0.1:8000")
        print_logs(Path(folder), name, lines, follow)


def top(
    url: Url = None,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    count: Annotated[
        int | None, typer.Option(min=1, help="End after so many tables. Default: Ctrl-C ends it.")
    ] = None,
) -> None:
    """Watch the pools: latency, queue, KV use and transfer rate, live."""
    with clear_errors():
        import time

        from cli.client import find_url, get_json, raise_for_error, router_client
        from cli.top import Look, look_at, run_top

        with router_client(find_url(url)) as client:

            def look() -> Look:
                answer = client.get("/metrics")
                raise_for_error(answer)
                return look_at(get_json(client, "/cluster"), answer.text, time.monotonic())

            run_top(look, interval, count)


def doctor(
    config: Annotated[
        Path | None, typer.Argument(help="A deployment's YAML, to check it against this machine.")
    ] = None,
    overrides: Overrides = None,
    url: Annotated[
        str | None,
        typer.Option("--url", help="A router, to check its workers too. Default: what runs here."),
    ] = None,
) -> None:
    """Check this machine (versions, GPU, NIXL, shared memory, ports, model, clock) and the
    deployment that runs (workers, which of them fit, clocks). Says what to do."""
    with clear_errors(), Reporter() as reporter:
        from cli.client import find_url
        from cli.doctor import Verdict, examine

        is_well = True
        for finding in examine(config, tuple(overrides or ()), url and find_url(url)):
            if finding.verdict is Verdict.GOOD:
                reporter.done(finding.what)
            else:
                is_well = is_well and finding.verdict is not Verdict.BAD
                mark = "problem: " if finding.verdict is Verdict.BAD else ""
                reporter.warn(f"{mark}{finding.what}")
                reporter.say(f"    -> {finding.advice}")
        if not is_well:
            raise typer.Exit(1)
