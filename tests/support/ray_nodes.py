"""A Ray cluster of several nodes on this machine, and a deployment on it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

import cluster.ray_session  # noqa: F401  (sets what Ray reads when it is imported)
from support.live import wait_until

# Of every node: it waits for a head that is away.
_ENVIRONMENT = {
    "RAY_gcs_rpc_server_reconnect_timeout_s": "86400",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",
}


class Nodes:
    """Owns the cluster. Its head has no place for workers; each other node has one."""

    def __init__(self, folder: Path) -> None:
        from ray.cluster_utils import Cluster

        storage = {"gcs_storage": "rocksdb", "gcs_storage_path": str(folder / "gcs")}
        if "RAY_REDIS_ADDRESS" in os.environ:  # then Ray takes that one by itself
            storage = {}
        head = {"num_cpus": 0, "include_dashboard": False, "temp_dir": str(folder)}
        self._cluster = Cluster(
            initialize_head=True, head_node_args={**head, "_system_config": storage}
        )

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, pool: str) -> Any:
        """A node for one worker of a pool: prefill's are found by a label, decode's by a
        resource."""
        if pool == "prefill":
            return self._cluster.add_node(num_cpus=1, labels={"pool": pool})
        return self._cluster.add_node(num_cpus=1, resources={pool: 1})

    def add_control(self, address: str) -> Any:
        """A node at an address of its own, with no place for workers."""
        return self._cluster.add_node(num_cpus=0, node_ip_address=address)

    def kill(self, node: Any) -> None:
        """As a machine that loses power: all of its processes at once."""
        raylet = psutil.Process(node.all_processes["raylet"][0].process.pid)
        for process in [raylet, *raylet.children(recursive=True)]:
            process.kill()
        self._cluster.remove_node(node, allow_graceful=False)

    def kill_head(self) -> None:
        """The GCS alone: what else is on its host is nobody's business here."""
        self._cluster.head_node.kill_gcs_server()

    def start_head(self) -> None:
        self._cluster.head_node.start_gcs_server()

    def shutdown(self) -> None:
        self._cluster.shutdown()


@contextmanager
def ray_nodes(folder: Path) -> Iterator[Nodes]:
    nodes = None
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in _ENVIRONMENT.items():
                patch.setenv(name, value)
            nodes = Nodes(folder)
            yield nodes
    finally:
        if nodes is not None:
            nodes.shutdown()
        ours = [p for p in psutil.Process().children(recursive=True) if "ray" in p.name()]
        wait_until(lambda: not any(p.is_running() for p in ours), 30, f"the end of {ours}")
