"""Ray's own autoscaler, asked what pods it would start for the workers that pools ask for."""

from typing import Any

import pytest
from manifests import OVERLAYS, deployment_yaml, group_of, needs_kubectl, of_kind, render

from cluster.sizing import bundle_for
from core.config import Config, parse_config

pytestmark = [needs_kubectl, pytest.mark.parametrize("overlay", OVERLAYS)]


def launches(overlay: str, asked: dict[str, int]) -> dict[str, int]:
    """Pods by worker group, when only the head runs and each pool waits for so many places."""
    from ray.autoscaler._private.kuberay.autoscaling_config import (
        _derive_autoscaling_config_from_ray_cr,
    )
    from ray.autoscaler._private.node_provider_availability_tracker import (
        NodeAvailabilitySummary,
    )
    from ray.autoscaler._private.resource_demand_scheduler import ResourceDemandScheduler
    from ray.core.generated.common_pb2 import PlacementStrategy
    from ray.core.generated.gcs_pb2 import PlacementGroupTableData

    objects = render(overlay)
    (cluster,) = of_kind(objects, "RayCluster")
    pools = parse_config(deployment_yaml(objects))
    config = _derive_autoscaling_config_from_ray_cr(cluster)
    scheduler = ResourceDemandScheduler(
        provider=Head(config["head_node_type"]),
        node_types=config["available_node_types"],
        max_workers=config["max_workers"],
        head_node_type=config["head_node_type"],
        upscaling_speed=config["upscaling_speed"],
    )
    groups = []
    for pool, count in asked.items():
        for _ in range(count):
            group = PlacementGroupTableData(
                state=PlacementGroupTableData.PENDING, strategy=PlacementStrategy.STRICT_PACK
            )
            group.bundles.add().unit_resources.update(bundle(pools, pool))
            groups.append(group)
    nothing_failed = NodeAvailabilitySummary({})
    found, _ = scheduler.get_nodes_to_launch(["head"], {}, [], {}, groups, {}, [], nothing_failed)
    return dict(found)


class Head:
    """A provider of nodes, as far as it is asked here: the head alone runs."""

    def __init__(self, kind: str) -> None:
        self._tags = {"ray-user-node-type": kind, "ray-node-type": "head"}

    def node_tags(self, node_id: str) -> dict[str, str]:
        return self._tags

    def internal_ip(self, node_id: str) -> str:
        return "192.0.2.1"


def bundle(config: Config, pool: str) -> dict[str, Any]:
    return bundle_for(config.pools.named(pool))


def sizes(overlay: str, key: str) -> dict[str, int]:
    (cluster,) = of_kind(render(overlay), "RayCluster")
    return {g["groupName"]: g[key] for g in cluster["spec"]["workerGroupSpecs"]}


def test_each_worker_that_a_pool_asks_for_is_one_pod_of_its_group(overlay):
    least, most = sizes(overlay, "minReplicas"), sizes(overlay, "maxReplicas")
    assert launches(overlay, {}) == least
    config = parse_config(deployment_yaml(render(overlay)))
    for pool in config.active_pools:
        group = group_of(config, pool)
        grown = launches(overlay, {pool: most[group]})
        assert grown == {**least, group: most[group]}


def test_no_pool_grows_beyond_its_group(overlay):
    config = parse_config(deployment_yaml(render(overlay)))
    asked = {pool: 50 for pool in config.active_pools}
    assert launches(overlay, asked) == sizes(overlay, "maxReplicas")
