"""`pdserve keys`: API keys of the public endpoints."""

import json
import os
from pathlib import Path

import yaml

from core.errors import ConfigError
from router.access.api_keys import KeyEntry, hash_key, new_key, read_entries


def add_key(
    path: Path,
    name: str,
    requests_per_minute: float | None = None,
    concurrency: int | None = None,
    tokens_per_minute: float | None = None,
) -> str:
    """Appends a fresh key's hash to the file, which is made if there is none, and returns the
    key: nothing else will ever know it. Raises ConfigError."""
    entries = read_entries(path) if path.exists() else []
    if any(entry.name == name for entry in entries):
        raise ConfigError(f"{path}: there is a key named {name!r} already")
    key = new_key()
    try:
        entry = KeyEntry(
            name=name,
            sha256=hash_key(key),
            requests_per_minute=requests_per_minute,
            concurrency=concurrency,
            tokens_per_minute=tokens_per_minute,
        )
    except ValueError as error:
        raise ConfigError("a key's name has 1 to 64 characters, and limits are positive") from error
    _append(path, entries, entry)
    return key


def _append(path: Path, entries: list[KeyEntry], entry: KeyEntry) -> None:
    """YAML grows at its end, so that comments stay. The old file is whole until it is replaced."""
    new = entry.model_dump(exclude_none=True)
    if path.suffix == ".json":
        everything = [*(known.model_dump(exclude_none=True) for known in entries), new]
        text = json.dumps(everything, indent=2) + "\n"
    else:
        before = path.read_text(encoding="utf-8") if entries else ""
        if before and not before.endswith("\n"):
            before += "\n"
        text = before + yaml.safe_dump([new], sort_keys=False, allow_unicode=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        if read_entries(temporary) != [*entries, entry]:
            raise ConfigError(f"{path}: an entry cannot be added to it as it is written")
        temporary.replace(path)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
