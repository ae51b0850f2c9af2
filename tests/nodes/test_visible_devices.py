"""Which of a host's GPUs each process of a worker sees. The GPUs are only claimed: Ray counts them
and says their numbers, which is what is looked at; no driver is needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, json, os
from cluster.ray_session import ray_session
import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as InGroup
from cluster.placement import actor_options, reserved

class Seen:
    def __init__(self):
        self.at_start = os.environ.get("CUDA_VISIBLE_DEVICES")

    def devices(self):
        import torch  # as late as the worker does
        assert not torch.cuda.is_initialized()
        return self.at_start, os.environ.get("CUDA_VISIBLE_DEVICES")

async def seen(bundle, ranks):
    async with reserved(bundle, ranks, "seen", 60.0) as group:
        actors = [
            ray.remote(Seen).options(
                scheduling_strategy=InGroup(group, placement_group_bundle_index=rank),
                **actor_options(bundle),
            ).remote()
            for rank in range(ranks)
        ]
        return await asyncio.gather(*(actor.devices.remote() for actor in actors))

ray.init(num_cpus=0, num_gpus=3, include_dashboard=False, log_to_driver=False,
         resources={"pdserve_cpu": 100}, namespace="pdserve")
ranks = asyncio.run(seen({"GPU": 1.0, "pdserve_cpu": 1.0}, 2))
none = asyncio.run(seen({"pdserve_cpu": 1.0}, 1))
ray.shutdown()
print("SEEN", json.dumps([ranks, none]))
"""


def test_each_rank_sees_its_own_device_and_one_without_sees_none() -> None:
    """V58: from a head without CPUs or GPUs of its own to give to the caller."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=180, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "SEEN" in done.stdout, done.stderr[-2000:]
    ranks, none = json.loads(done.stdout.partition("SEEN ")[2])
    assert all(first == later for first, later in ranks), ranks
    numbers = [first for first, _ in ranks]
    assert len(set(numbers)) == 2 and all(n in ("0", "1", "2") for n in numbers), ranks
    assert none == [["", ""]], none
