"""Fixtures of the engine's tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from core.config import EngineConfig
from engine.engine import Engine
from support.mock_model import B, MockModel


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Tensors are tiny here, and a second thread costs more than it does."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def make_engine() -> Iterator[Callable[..., Engine]]:
    """Engines over the mock model, whose books are checked when the test is over."""
    engines: list[Engine] = []

    def make(num_blocks: int = 64, model: MockModel | None = None, **config: Any) -> Engine:
        config.setdefault("block_size", B)
        engines.append(Engine(model or MockModel(), EngineConfig(**config), num_blocks))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()
