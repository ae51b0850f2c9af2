"""`pdserve up`: one deployment in the foreground, from the checks to the last process gone."""

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from cli.preflight import claim_addresses
from cli.state import log_dir_for
from cli.stop_signals import StopSignals
from cli.terminal import Reporter
from core.config import Config, load_config
from core.host import available_memory
from core.logs import LogFormat, formatter
from core.model_files import resolve_model

# Before grpc is loaded: its notes about our starting of processes are no news for a terminal.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@dataclass(frozen=True, slots=True)
class UpOptions:
    config_path: Path
    overrides: tuple[str, ...] = ()
    verbose: bool = False
    # Where the controller listens, "host:port"; None: any free port of this machine.
    bind: str | None = None
    has_router: bool = True  # False: routers run elsewhere and are told the controller's address
    # Other programs in the places of the real ones.
    router_module: str = "router"
    worker_classes: dict[str, str] = field(default_factory=dict)


def run_up(options: UpOptions) -> None:
    """Runs a deployment until Ctrl-C, SIGTERM or `pdserve down`. Raises PdserveError for whatever
    keeps it from running; then, as after a normal end, nothing that it started is left."""
    with Reporter() as reporter, StopSignals() as signals:
        try:
            checked = _check(options, reporter)
            _run(options, checked, reporter, signals)
        except (KeyboardInterrupt, SystemExit):  # the latter is Ray's answer to a SIGTERM
            pass
        reporter.rest()
        reporter.say("stopped")


@dataclass(frozen=True, slots=True)
class _Checked:
    config: Config
    overrides: tuple[str, ...]  # that make `config` out of the file
    model_name: str
    model_path: Path


def _check(options: UpOptions, reporter: Reporter) -> _Checked:
    """Everything that can be checked before a process is started, and the model fetched."""
    config = load_config(options.config_path, options.overrides)
    claimed = claim_addresses(config) if options.has_router else {}
    overrides = (*options.overrides, *(f"{key}='{value}'" for key, value in claimed.items()))
    config = load_config(options.config_path, overrides)
    reporter.doing(f"Looking for model {config.model}")
    model = resolve_model(config.model, progress=reporter.doing)
    reporter.done(f"Model {model.name} at {model.path}")
    for name in {config.draft_model_of(pool) for pool in config.active_pools} - {None}:
        draft = resolve_model(str(name), progress=reporter.doing)
        reporter.done(f"Draft model {draft.name} at {draft.path}")
    if config.ray.address is None:
        from cluster.sizing import check_memory

        check_memory(config, model.path, available_memory())
    return _Checked(config, overrides, model.name, model.path)


def _run(
    options: UpOptions,
    checked: _Checked,
    reporter: Reporter,
    signals: StopSignals,
) -> None:
    config = checked.config
    log_dir = log_dir_for(config.router.http)
    with _logging_to(log_dir, options.verbose, config.log_format):
        reporter.doing("Starting Ray" if config.ray.address is None else "Connecting to Ray")
        from cli.foreground import Foreground  # imports ray
        from cluster.ray_session import ray_session
        from rpc.cluster_token import fresh_cluster_token
        from rpc.tls import use_internal_tls

        with contextlib.ExitStack() as stack:
            stack.enter_context(fresh_cluster_token())  # before a process is started
            use_internal_tls(config)
            with signals.deferred():
                session = stack.enter_context(ray_session(config))
            foreground = Foreground(
                config,
                checked.model_name,
                checked.model_path,
                log_dir,
                reporter,
                options.worker_classes,
                options.verbose,
                session,
                options.bind or "127.0.0.1:0",
            )
            router: list[str] = []
            if options.has_router:
                router = [options.router_module, "--config", str(options.config_path)]
                for override in checked.overrides:
                    router += ["--set", override]
            try:
                asyncio.run(foreground.run(router, str(options.config_path), signals))
            finally:
                reporter.doing("Stopping Ray")
                signals.stopping()


@contextlib.contextmanager
def _logging_to(log_dir: Path, verbose: bool, log_format: LogFormat) -> Iterator[None]:
    """Logs of this process go to a file, and to the terminal too if `verbose`. So do the lines
    that Ray prints to stdout. The file of an earlier run is kept once, as *.old."""
    log_dir.mkdir(parents=True, exist_ok=True)
    path = log_dir / "up.log"
    if path.exists():
        path.replace(path.with_suffix(".log.old"))
    root, level = logging.getLogger(), logging.getLogger().level
    with path.open("a", buffering=1) as file:
        handlers: list[logging.Handler] = [logging.StreamHandler(file)]
        if verbose:
            handlers.append(logging.StreamHandler(sys.stderr))
        for handler in handlers:
            handler.setFormatter(formatter(log_format))
            root.addHandler(handler)
        root.setLevel(logging.INFO)
        logging.getLogger("httpx").setLevel(logging.WARNING)  # it logs every poll
        try:
            with contextlib.redirect_stdout(sys.stderr if verbose else file):
                yield
        finally:
            root.setLevel(level)
            for handler in handlers:
                root.removeHandler(handler)
