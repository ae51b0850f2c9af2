"""`pdserve logs`: what controller, router and workers have written."""

import asyncio
from collections import deque
from pathlib import Path

from cli.log_tail import tail_logs
from core.errors import PdserveError, UnavailableError


def log_files(folder: Path, name: str | None) -> list[Path]:
    """The log of one part, or all. Raises PdserveError that names those there are."""
    files = sorted(folder.glob("*.log"))
    if not files:
        raise UnavailableError(f"no logs in {folder}")
    if name is None:
        return files
    chosen = [path for path in files if path.stem == name]
    if not chosen:
        raise PdserveError(f"no log of {name!r}; there is {', '.join(p.stem for p in files)}")
    return chosen


def print_logs(folder: Path, name: str | None, num_lines: int, follow: bool) -> None:
    """The last lines of each file, then, if asked, every new one until Ctrl-C."""
    files = log_files(folder, name)
    for path in files:
        mark = "" if name else f"[{path.stem}] "
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in deque(file, maxlen=num_lines):
                print(f"{mark}{line.rstrip()}", flush=True)
    if follow:
        others = {p.name for p in folder.glob("*.log")} - {p.name for p in files}
        asyncio.run(_follow(folder, name, frozenset(others)))


async def _follow(folder: Path, name: str | None, skip: frozenset[str]) -> None:
    """Files that come later, of new workers, are followed too."""

    def write(line: str) -> None:
        print(line.partition("] ")[2] if name else line, flush=True)

    sizes = {path: path.stat().st_size for path in folder.glob("*.log")}
    await tail_logs(folder, write, skip, sizes)
