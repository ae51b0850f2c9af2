"""A real router on free ports, in front of fake workers, in the test's own loop."""

import asyncio
import functools
import inspect
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from support.router import Running, running

_HANG_S = 150.0


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that hangs fails, and says where it and every other task wait."""
    here = Path(__file__).parent
    for item in items:  # of the whole run
        if not item.path.is_relative_to(here):
            continue
        if isinstance(item, pytest.Function) and inspect.iscoroutinefunction(item.obj):
            item.obj = _bounded(item.obj)


def _bounded(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    @functools.wraps(test)
    async def bounded(*args: object, **fixtures: object) -> None:
        work = asyncio.ensure_future(test(*args, **fixtures))
        done, _ = await asyncio.wait({work}, timeout=_HANG_S)
        if not done:
            for task in asyncio.all_tasks():
                task.print_stack(file=sys.stderr)
            work.cancel()
            await asyncio.wait({work}, timeout=5)
            pytest.fail(f"no end after {_HANG_S:.0f} s")
        await work

    return bounded


@pytest.fixture
async def router() -> AsyncIterator[Running]:
    """1P1D."""
    async with running() as it:
        yield it


@pytest.fixture
async def router_2p2d() -> AsyncIterator[Running]:
    async with running(prefills=2, decodes=2) as it:
        yield it
