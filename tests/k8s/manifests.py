"""The manifests as a cluster would get them."""

import functools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from core.config import Config

ROOT = Path(__file__).parents[2]
OVERLAYS = ("cpu-demo", "cpu-roles", "gpu", "gpu-tls")
POOL_GROUPS = ("prefill", "decode", "worker")  # names of worker groups
KUBECTL = shutil.which("kubectl")
CRDS = Path(os.environ.get("PDSERVE_CRDS") or ROOT.parent / "shared" / "data" / "crds")

needs_kubectl = pytest.mark.skipif(KUBECTL is None, reason="kubectl is not here to render overlays")
Object = dict[str, Any]


@functools.cache
def render(overlay: str) -> tuple[Object, ...]:
    """Every object of an overlay, by kubectl itself. Not to be changed."""
    done = subprocess.run(
        [str(KUBECTL), "kustomize", str(ROOT / "k8s" / "overlays" / overlay)],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [o for o in objects if o["kind"] in kinds]


def pod_templates(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    """Every pod that would run, with a name for messages."""
    for deployment in of_kind(objects, "Deployment"):
        yield deployment["metadata"]["name"], deployment["spec"]["template"]
    for cluster in of_kind(objects, "RayCluster"):
        yield "head", cluster["spec"]["headGroupSpec"]["template"]
        for group in cluster["spec"]["workerGroupSpecs"]:
            yield group["groupName"], group["template"]


def containers(objects: tuple[Object, ...]) -> Iterator[tuple[str, Object]]:
    for name, template in pod_templates(objects):
        for container in template["spec"]["containers"]:
            yield f"{name}/{container['name']}", container


def group_of(config: Config, pool: str) -> str:
    """The worker group whose pods a pool's workers run in: the resource that only these have."""
    (group,) = config.pools.named(pool).resources.keys() - {"CPU", "GPU"}
    return str(group)


def deployment_yaml(objects: tuple[Object, ...]) -> str:
    (found,) = [o for o in of_kind(objects, "ConfigMap") if "pdserve.yaml" in o["data"]]
    return str(found["data"]["pdserve.yaml"])
