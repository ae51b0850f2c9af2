"""The router process: `python -m router --config FILE --controller HOST:PORT [--set KEY=VALUE]`.

HTTP and gRPC run in one asyncio loop. SIGTERM or SIGINT stops it: nothing new is admitted, running
streams have some seconds to end, the rest end with an error event; then it exits with 0. What
keeps it from starting is one line on stderr and exit code 1. With `router.workers` above 1 this
process serves nothing itself: `router.processes.supervisor` starts that many of its kind.
"""

import argparse
import asyncio
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import uvloop

from core.config import Config, load_config
from core.errors import ConfigError, ModelError
from core.host import spare_collector
from core.logs import use_format
from core.model_files import resolve_model
from router.processes.share import Share
from router.processes.supervisor import Supervisor
from router.server import RouterServer
from router.text.tokenizer import Tokenizer, load_tokenizer
from rpc.tls import use_internal_tls

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = load_config(options.config, options.set)
        use_format(config.log_format)
        use_internal_tls(config)
        share = None
        if options.share_folder is not None:
            share = Share(options.share_index, config.router.workers, options.share_folder)
        elif config.router.workers > 1:
            command = ["--config", options.config, "--controller", options.controller]
            command += [part for override in options.set for part in ("--set", override)]
            return uvloop.run(Supervisor(config, command).run())
        files = resolve_model(config.model)
        tokenizer = load_tokenizer(files, config.router.chat_template)
        uvloop.run(_serve(config, files.name, tokenizer, options.controller, share))
    except (ConfigError, ModelError) as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _serve(
    config: Config, model_name: str, tokenizer: Tokenizer, controller: str, share: Share | None
) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    if share is not None:  # a supervisor that is gone has closed the other end
        loop.add_reader(sys.stdin.fileno(), stop.set)
    server = RouterServer(config, model_name, tokenizer, controller, share=share)
    spare_collector()
    await server.start()
    logger.info(
        "serving %s on http://%s and grpc://%s",
        server.frontend.model_name, config.router.http, config.router.grpc,
    )  # fmt: skip
    await stop.wait()
    if share is not None:
        loop.remove_reader(sys.stdin.fileno())
    logger.info("stopping")
    await server.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router", description="The pdserve router.")
    parser.add_argument("--config", required=True, help="the deployment's YAML file")
    parser.add_argument("--controller", required=True, help="host:port of the cluster controller")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key"
    )
    # Of processes that a supervisor starts.
    parser.add_argument("--share-folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--share-index", type=int, default=0, help=argparse.SUPPRESS)
    return parser
