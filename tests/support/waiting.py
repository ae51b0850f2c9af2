"""Waiting for what must come."""

import asyncio
from collections.abc import Callable


async def eventually(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Returns when `condition` holds; fails the test if it does not in `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
