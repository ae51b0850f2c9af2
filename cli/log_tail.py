"""Follows the logs of workers and router, for --verbose."""

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path

_POLL_S = 0.3
_MAX_READ = 64 * 1024  # of one file in one poll; a flood is shown late rather than kept in memory


async def tail_logs(
    folder: Path,
    write: Callable[[str], None],
    skip: frozenset[str],
    already_read: Mapping[Path, int] | None = None,
) -> None:
    """Writes every new line of the folder's *.log files, with the file's name in front, until it
    is cancelled. `skip` holds names of files that are shown elsewhere,
    `already_read` how many bytes of others are known."""
    offsets: dict[Path, int] = dict(already_read or {})
    while True:
        for path in sorted(folder.glob("*.log")):
            if path.name in skip:
                continue
            lines, offsets[path] = _new_lines(path, offsets.get(path, 0))
            for line in lines:
                write(f"[{path.stem}] {line}")
        await asyncio.sleep(_POLL_S)


def _new_lines(path: Path, offset: int) -> tuple[list[str], int]:
    """Whole lines after `offset`, and where the next ones begin. A piece without an end of line
    that fills a whole read counts as a line."""
    with path.open("rb") as file:
        file.seek(offset)
        data = file.read(_MAX_READ)
    end = len(data) if len(data) == _MAX_READ and b"\n" not in data else data.rfind(b"\n") + 1
    return data[:end].decode(errors="replace").splitlines(), offset + end
