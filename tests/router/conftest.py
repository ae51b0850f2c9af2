"""A real router on free ports, in front of fake workers, in the test's own loop."""

from collections.abc import AsyncIterator

import pytest

from support.router import Running, running


@pytest.fixture
async def router() -> AsyncIterator[Running]:
    """1P1D."""
    async with running() as it:
        yield it


@pytest.fixture
async def router_2p2d() -> AsyncIterator[Running]:
    async with running(prefills=2, decodes=2) as it:
        yield it
