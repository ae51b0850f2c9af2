"""V74: nothing in the product reads or writes Python objects on a wire or from a file: a pickle
that a stranger wrote runs his code."""

import ast
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGES = [
    "cli", "cluster", "core", "decode_worker", "engine", "kv_transfer", "loadgen", "planner",
    "prefill_worker", "router", "rpc", "worker",
]  # fmt: skip
MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
# Of torch.distributed and zmq: these pickle what they carry.
CALLS = {
    "send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object",
    "scatter_object_list", "send_object_list", "recv_object_list",
}  # fmt: skip


def offences(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.partition(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [(node.module or "").partition(".")[0]]
        found += [name for name in names if name in MODULES]
        if isinstance(node, ast.Attribute):
            is_torch = isinstance(node.value, ast.Name) and node.value.id == "torch"
            if node.attr in CALLS or (is_torch and node.attr == "load"):
                found.append(node.attr)
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            found.append("allow_pickle")
    return found


def test_the_scan_finds_them():
    assert offences("import pickle") == ["pickle"]
    assert offences("from torch import distributed as d\nd.gather_object(1)") == ["gather_object"]
    assert offences("import torch\ntorch.load('x')") == ["load"]
    assert offences("import json\njson.load(f)") == []


def test_no_package_does():
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert len(files) > 100
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in files}
    assert {path: names for path, names in found.items() if names} == {}
