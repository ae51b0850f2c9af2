"""The Dockerfile and its context, as text: no image can be built in the suite."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def stage(name: str) -> str:
    return re.split(r"^FROM ", DOCKERFILE.partition(f" AS {name}\n")[2], flags=re.M)[0]


def test_the_router_image_installs_neither_torch_nor_ray():
    installed = re.search(r"pip install \$\{PIP_ARGS\} (.+)", stage("build-router"))[1]
    assert installed == "."
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [d for d in project["dependencies"] if re.match(r"(torch|ray|nixl)\b", d)]


def test_both_images_run_as_somebody_else_than_root():
    assert re.search(r"^USER 10001:10001$", stage("runtime"), flags=re.M)
    for name in ("router", "worker"):
        assert re.search(rf"^FROM runtime AS {name}$", DOCKERFILE, flags=re.M)
        assert "USER" not in stage(name)


def test_every_package_is_in_the_build_context_and_nothing_secret_can_be():
    ignored = (ROOT / ".dockerignore").read_text().split("\n")
    assert "*" in ignored
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]["find"]["include"]
    kept = {line[1:] for line in ignored if line.startswith("!")}
    assert {package.removesuffix("*") for package in packages} | {"pyproject.toml"} <= kept
