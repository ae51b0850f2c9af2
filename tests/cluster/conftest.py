import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from cluster.ray_session import ray_session
from core.config import parse_config


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def living_children() -> list[psutil.Process]:
    """Without orphans that this process has adopted after their death."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if child.status() != psutil.STATUS_ZOMBIE]


@pytest.fixture(scope="package")
def ray_running() -> Iterator[None]:
    """One Ray for these tests. On the way out it must leave no process and no shared memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        children = set(living_children())
        shm = shared_memory()
        with ray_session(parse_config("model: none\npools: {prefill: {replicas: 2}}")):
            assert set(living_children()) - children
            yield
        left = set(living_children()) - children
        assert not left, f"processes left behind: {left}"
        assert shared_memory() <= shm


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that start a Ray of their own come before the one that the others share."""
    items.sort(key=lambda item: "ray_running" in getattr(item, "fixturenames", ()))
