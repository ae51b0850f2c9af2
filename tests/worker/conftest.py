"""Pairs of workers, each of which must be idle when its test is over."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from support.pair import Pair, hand_over_config, running_pair


@pytest.fixture
async def pair(tiny_model_dir: Path) -> AsyncIterator[Pair]:
    async with running_pair(hand_over_config(tiny_model_dir)) as pair:
        yield pair
        await pair.wait_idle()


@pytest.fixture(params=["nixl", "grpc"])
async def any_pair(request: pytest.FixtureRequest, tiny_model_dir: Path) -> AsyncIterator[Pair]:
    async with running_pair(hand_over_config(tiny_model_dir, request.param)) as pair:
        yield pair
        await pair.wait_idle()
