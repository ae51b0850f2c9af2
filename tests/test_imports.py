"""Who may import whom. Imports inside functions count: a lazy import is a dependency too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WORKERS = {"worker", "prefill_worker", "decode_worker", "dual_worker"}
MAY_IMPORT = {
    "core": set(),
    "rpc": {"core"},
    "engine": {"core"},
    "kv_transfer": {"core"},
    "worker": {"core", "rpc", "engine", "kv_transfer"},
    "prefill_worker": {"core", "rpc", "engine", "kv_transfer", "worker"},
    "decode_worker": {"core", "rpc", "engine", "kv_transfer", "worker"},
    "dual_worker": {"core", "rpc", "worker", "prefill_worker", "decode_worker"},
    "router": {"core", "rpc"},
    "cluster": {"core", "rpc", "router", *WORKERS},
    "loadgen": {"core"},
    "planner": {"core", "engine", "router", "loadgen", "cluster"},
    "cli": {"core", "rpc", "engine", "kv_transfer", "router", "cluster", "loadgen", "planner"}
    | WORKERS,
}
# The gRPC transport speaks the workers' protocol.
MAY_ALSO = {"kv_transfer/grpc_transport.py": {"rpc"}}
# Heavy libraries, and the packages that may import them.
HEAVY = {
    "ray": {"cluster"},
    "torch": {"engine", "kv_transfer", *WORKERS},
    "nixl": {"kv_transfer"},
    "grpc": {"rpc", "kv_transfer", "router", "cluster", "cli", *WORKERS},
    "transformers": set(),
}


def imports_of(source: str) -> set[str]:
    """Top-level names of everything that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def problems_of(file: str, source: str) -> list[str]:
    """What a file, named from the root, imports against the table."""
    package = file.split("/")[0]
    allowed = MAY_IMPORT[package] | MAY_ALSO.get(file, set()) | {package}
    imported = imports_of(source)
    problems = [f"{file} imports {name}" for name in imported & MAY_IMPORT.keys() - allowed]
    problems += [
        f"{file} imports {name}" for name in imported & HEAVY.keys() if package not in HEAVY[name]
    ]
    return sorted(problems)


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_a_package_imports_only_what_the_table_allows(package):
    files = sorted((ROOT / package).rglob("*.py"))
    assert files, f"{package} has no files: is the table out of date?"
    problems = []
    for file in files:
        problems += problems_of(file.relative_to(ROOT).as_posix(), file.read_text())
    assert not problems


def modules() -> dict[str, str]:
    """The source of every module of the product, by its dotted name."""
    found = {}
    for package in MAY_IMPORT:
        for file in (ROOT / package).rglob("*.py"):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts).removesuffix(".__init__")] = file.read_text()
    return found


def graph_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Which of these modules each one imports, anywhere in it, for types alone too."""
    graph: dict[str, set[str]] = {}
    for module, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                # `from a import b`: b may be a module of a, or a name in it.
                inner = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= {name if name in sources else node.module for name in inner}
        graph[module] = names & sources.keys()
    return graph


def circle_in(graph: dict[str, set[str]]) -> list[str]:
    """What is left of the graph when modules without imports are taken away again and again: a
    circle, and whoever leads into one."""
    left = dict(graph)
    while free := {module for module, imported in left.items() if not imported & left.keys()}:
        left = {module: imported for module, imported in left.items() if module not in free}
    return sorted(left)


def test_no_modules_import_each_other_in_a_circle():
    assert circle_in(graph_of(modules())) == []


def test_a_circle_is_found():
    sources = {
        "a.x": "def f():\n    from a import y\n",
        "a.y": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a.z\n",
        "a.z": "from a.x import f\n",
        "a.w": "from a.v import g\n",
        "a.v": "import os\n",
    }
    assert circle_in(graph_of(sources)) == ["a.x", "a.y", "a.z"]


def test_every_package_is_in_the_table():
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == MAY_IMPORT.keys()


def test_a_lazy_import_is_found():
    source = "def f():\n    from engine.model import load\n    import ray.util\n"
    assert problems_of("router/x.py", source) == ["router/x.py imports engine",
                                                  "router/x.py imports ray"]  # fmt: skip


def test_the_router_and_the_light_commands_load_neither_torch_nor_ray():
    """The table forbids it in our files; here what those files bring along is looked at too."""
    code = (
        "import sys; import cli.main, cli.client, cli.chat, cli.status, cli.down, cli.plan; "
        "import router.main; "
        "sys.exit(', '.join({'torch', 'ray', 'transformers'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
