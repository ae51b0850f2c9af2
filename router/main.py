"""The router process: `python -m router --config FILE --controller HOST:PORT [--set KEY=VALUE]`.

HTTP and gRPC run in one asyncio loop. SIGTERM or SIGINT stops it: nothing new is admitted, running
streams have some seconds to end, the rest end with an error event; then it exits with 0. What
keeps it from starting is one line on stderr and exit code 1.
"""

import argparse
import asyncio
import gc
import logging
import signal
import sys
from collections.abc import Sequence

import uvloop

from core.config import Config, load_config
from core.errors import ConfigError, ModelError
from core.model_files import resolve_model
from router.server import RouterServer
from router.tokenizer import Tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        config = load_config(options.config, options.set)
        files = resolve_model(config.model)
        tokenizer = load_tokenizer(files, config.router.chat_template)
        uvloop.run(_serve(config, files.name, tokenizer, options.controller))
    except (ConfigError, ModelError) as error:
        print(f"router: {error.message}", file=sys.stderr)
        return 1
    return 0


async def _serve(config: Config, model_name: str, tokenizer: Tokenizer, controller: str) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    server = RouterServer(config, model_name, tokenizer, controller)
    # What is there now stays. The collector need not look at it again, and not after every few
    # hundred objects of the requests that come: nearly all are freed without it.
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    await server.start()
    logger.info(
        "serving %s on http://%s and grpc://%s",
        server.frontend.model_name, config.router.http, config.router.grpc,
    )  # fmt: skip
    await stop.wait()
    logger.info("stopping")
    await server.close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m router", description="The pdserve router.")
    parser.add_argument("--config", required=True, help="the deployment's YAML file")
    parser.add_argument("--controller", required=True, help="host:port of the cluster controller")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="override a key"
    )
    return parser
