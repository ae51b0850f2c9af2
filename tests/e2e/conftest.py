"""Real deployments, shared by the tests of one run; each kind starts on first use."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from support.live import Live, deployment

# All in float32, where greedy output must equal the reference token for token.
FLOAT32 = ("dtype=float32", "engine.max_num_batched_tokens=64", "engine.num_kv_blocks=512")
KINDS = {
    "nixl": ("local.yaml", ("kv_transfer.transport=nixl", *FLOAT32)),
    "grpc": ("local.yaml", ("kv_transfer.transport=grpc", *FLOAT32)),
    "2p2d": ("local-2p2d.yaml", FLOAT32),
    "colocated": ("colocated.yaml", FLOAT32),
}


@pytest.fixture(scope="session")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Live]]:
    """`live(kind)` is a running deployment of that kind; at most one kind runs at a time, since
    a laptop's two cores are all that the suite may count on."""
    running: dict[str, Live] = {}
    with ExitStack() as stack:

        def get(kind: str) -> Live:
            if kind not in running:
                stack.close()
                running.clear()
                config, settings = KINDS[kind]
                log: Path = tmp_path_factory.mktemp(kind) / "up.log"
                running[kind] = stack.enter_context(deployment(config, log, settings))
            running[kind].wait_ready()
            return running[kind]

        yield get


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of one kind of deployment run together, so that each kind starts once."""
    order = list(KINDS)

    def position(item: pytest.Item) -> int:
        callspec = getattr(item, "callspec", None)
        kind = callspec.params.get("kind") if callspec else None
        return order.index(kind) if kind in order else -1

    items.sort(key=position)
