"""The committed stubs are what the .proto files make today."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.skipif(find_spec("grpc_tools") is None, reason="grpcio-tools is not installed")
def test_stubs_are_those_of_the_proto_files(tmp_path):
    outputs = [f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python")]
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").glob("*.proto"))
    assert protos
    command = [sys.executable, "-W", "ignore", "-m", "grpc_tools.protoc", "-I", "rpc=proto"]
    subprocess.run([*command, *outputs, *protos], cwd=ROOT, check=True, timeout=60)
    made = {path.name: path.read_text() for path in (tmp_path / "rpc").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "rpc").glob("*_pb2*")}
    assert sorted(made) == sorted(committed)
    stale = [name for name, text in made.items() if committed[name] != text]
    assert not stale, f"run `make proto`: {stale} differ from proto/"
