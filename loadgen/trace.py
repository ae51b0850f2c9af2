"""Request traces as they are published: when each request came and how long it was.

| format | columns |
|---|---|
| Azure LLM inference 2023, 2024 | TIMESTAMP, ContextTokens, GeneratedTokens |
| BurstGPT | Timestamp (s), Request tokens, Response tokens; a failed request has 0 of the latter |
| lengths alone (Sarathi, Vidur) | num_prefill_tokens, num_decode_tokens; no arrivals |
| Mooncake, JSON lines | timestamp (ms), input_length, output_length, hash_ids of 512-token blocks |

A name that ends in .gz is unpacked. Arrivals count from the first request's.
"""

import csv
import gzip
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import IO, Any

from core.errors import ConfigError

MOONCAKE_BLOCK = 512
Row = dict[str, str]


@dataclass(frozen=True, slots=True)
class TraceEntry:
    """One request of a trace. `block_ids`: equal ids stand for equal content of a block of
    MOONCAKE_BLOCK tokens, the last block may be shorter."""

    at_s: float | None
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[int, ...] = ()


def read_trace(path: Path, max_requests: int | None = None) -> list[TraceEntry]:
    """Raises ConfigError that names file and line. Entries are in order of arrival."""
    try:
        with _open(path) as file:
            entries = list(islice(_entries(file, path), max_requests))
    except (OSError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read trace {path}: {reason}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"trace {path}: not a UTF-8 text file") from error
    if not entries:
        raise ConfigError(f"trace {path}: holds no request")
    if entries[0].at_s is None:
        return entries
    start = min(entry.at_s or 0.0 for entry in entries)
    shifted = [
        TraceEntry((e.at_s or 0.0) - start, e.num_prompt_tokens, e.num_output_tokens, e.block_ids)
        for e in entries
    ]
    return sorted(shifted, key=lambda entry: entry.at_s or 0.0)


def _open(path: Path) -> IO[str]:
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8-sig", newline="")
    return path.open(encoding="utf-8-sig", newline="")


def _entries(file: IO[str], path: Path) -> Iterator[TraceEntry]:
    names = {part.lower() for part in path.suffixes[-2:]}
    if names & {".jsonl", ".json", ".ndjson"}:
        yield from _mooncake(file, path)
        return
    reader = csv.reader(file)
    header = [name.strip() for name in next(reader, [])]
    parse = _csv_format(header)
    if parse is None:
        raise ConfigError(
            f"trace {path}:1: unknown columns {', '.join(header)[:200] or '(none)'}; expected those"
            " of Azure (TIMESTAMP, ContextTokens, GeneratedTokens), BurstGPT (Timestamp, Request"
            " tokens, Response tokens) or num_prefill_tokens, num_decode_tokens"
        )
    try:
        for values in reader:
            if not values:
                continue
            if len(values) != len(header):
                raise ValueError(f"expected {len(header)} columns, got {len(values)}")
            entry = parse(dict(zip(header, values, strict=True)))
            if entry is not None:
                yield entry
    except (ValueError, csv.Error) as error:
        raise ConfigError(f"trace {path}:{reader.line_num}: {error}") from error


def _csv_format(header: list[str]) -> Callable[[Row], TraceEntry | None] | None:
    columns = set(header)
    if columns >= {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}:
        return _azure
    if columns >= {"Timestamp", "Request tokens", "Response tokens"}:
        return _burst_gpt
    if columns >= {"num_prefill_tokens", "num_decode_tokens"}:
        return _lengths
    return None


def _azure(row: Row) -> TraceEntry:
    stamp = row["TIMESTAMP"]
    try:
        at = datetime.fromisoformat(stamp)
    except ValueError:
        raise ValueError(f"TIMESTAMP: expected a date and time, got {stamp!r}") from None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)  # local time would jump when summer ends
    return TraceEntry(at.timestamp(), _count(row, "ContextTokens"), _count(row, "GeneratedTokens"))


def _burst_gpt(row: Row) -> TraceEntry | None:
    num_output_tokens = _count(row, "Response tokens", least=0)
    if num_output_tokens == 0:
        return None
    at_s = _seconds(row["Timestamp"], "Timestamp")
    return TraceEntry(at_s, _count(row, "Request tokens"), num_output_tokens)


def _lengths(row: Row) -> TraceEntry:
    return TraceEntry(None, _count(row, "num_prefill_tokens"), _count(row, "num_decode_tokens"))


def _mooncake(file: IO[str], path: Path) -> Iterator[TraceEntry]:
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            yield _mooncake_entry(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            what = f"{error} is missing" if isinstance(error, KeyError) else str(error)
            raise ConfigError(f"trace {path}:{number}: {what}") from error


def _mooncake_entry(data: Any) -> TraceEntry:
    if not isinstance(data, dict):
        raise ValueError("expected an object")
    blocks = data.get("hash_ids", [])
    if not isinstance(blocks, list) or not all(type(block) is int for block in blocks):
        raise ValueError("hash_ids: expected a list of whole numbers")
    num_prompt_tokens = _count(data, "input_length")
    if blocks and len(blocks) != math.ceil(num_prompt_tokens / MOONCAKE_BLOCK):
        raise ValueError(
            f"hash_ids: {len(blocks)} blocks of {MOONCAKE_BLOCK} do not make "
            f"input_length {num_prompt_tokens}"
        )
    at_s = _seconds(data["timestamp"], "timestamp") / 1000
    return TraceEntry(at_s, num_prompt_tokens, _count(data, "output_length"), tuple(blocks))


def _count(row: dict[str, Any], name: str, least: int = 1) -> int:
    value = row[name]
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number of tokens, got {value!r}") from None
    if not math.isfinite(number) or number < least or number != int(number):
        raise ValueError(f"{name}: expected a whole number of at least {least}, got {value!r}")
    return int(number)


def _seconds(value: Any, name: str) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name}: expected a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name}: expected a number, got {value!r}")
    return number
