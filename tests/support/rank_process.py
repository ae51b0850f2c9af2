"""One more rank of a tensor-parallel worker, as a process: `python -m support.rank_process`, with
the settings of the test on standard input. Ends when it has failed, or after `stop` there."""

import asyncio
import json
import os
import sys
from pathlib import Path

from core.config import parse_config
from core.types import Role
from core.worker_settings import WorkerSettings
from worker.follower import FollowerWorker


async def run() -> None:
    wanted = json.loads(sys.stdin.readline())
    settings = WorkerSettings(
        worker_id=wanted["worker_id"],
        role=Role(wanted["role"]),
        config=parse_config(Path(wanted["config"]).read_text()),
        rank=wanted["rank"],
        rendezvous=wanted["rendezvous"],
    )
    follower = FollowerWorker(settings)
    await follower.start(lambda text: None)
    stop = asyncio.ensure_future(asyncio.to_thread(sys.stdin.readline))
    await asyncio.wait([stop, follower.failed], return_when=asyncio.FIRST_COMPLETED)
    if follower.failed.done():
        print(f"failed: {follower.failed.result()}", flush=True)
        os._exit(1)
    await follower.stop()
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(run())
