"""`pdserve status`: the router's /cluster as a table."""

import sys
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_COLOURS = {"ready": "green", "starting": "yellow", "draining": "yellow", "dead": "red"}
_COLUMNS = ("worker", "role", "state", "pid", "address", "KV blocks", "cached", "running",
            "waiting", "prefilled", "decoded", "KV moved", "transport")  # fmt: skip
_RIGHT = {"pid", "KV blocks", "cached", "running", "waiting", "prefilled", "decoded", "KV moved"}
_PLAIN_WIDTH = 160  # of a pipe, which has no width


def print_cluster(cluster: dict[str, Any], url: str) -> None:
    console = Console(highlight=False)
    if not sys.stdout.isatty():
        console.width = _PLAIN_WIDTH
    workers = cluster.get("workers", [])
    ready = sum(worker.get("state") == "ready" for worker in workers)
    console.print(f"{url}: {ready} of {len(workers)} workers ready", markup=False)
    if not cluster.get("controller_reachable", True):
        console.print(
            f"the controller is away, last at {cluster.get('controller')}: requests go on, no "
            "worker is replaced", style="yellow", markup=False, soft_wrap=True,
        )  # fmt: skip
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in _COLUMNS:
        table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=True)
    for worker in workers:
        table.add_row(*_row(worker))
    if workers:
        console.print(table)
    for worker in workers:
        if worker.get("detail"):  # why it is not ready
            console.print(f"{worker.get('id')}: {worker['detail']}", markup=False, soft_wrap=True)


def _row(worker: dict[str, Any]) -> list[Text | str]:
    blocks = worker.get("kv_blocks") or {}
    in_use = sum(blocks.get(state, 0) for state in ("running", "held", "awaiting"))
    moved = [
        f"{_size(worker[key])} {word}"
        for key, word in (("kv_bytes_sent_total", "out"), ("kv_bytes_received_total", "in"))
        if worker.get(key)
    ]
    state = str(worker.get("state", "?"))
    return [
        str(worker.get("id", "?")),
        str(worker.get("role", "?")),
        Text(state, style=_COLOURS.get(state, "")),
        str(worker.get("pid") or ""),
        str(worker.get("address") or ""),
        f"{in_use}/{blocks.get('total', 0)}",
        str(blocks.get("cached", 0)),
        str(worker.get("requests_running", 0)),
        str(worker.get("requests_waiting", 0)),
        str(worker.get("tokens_prefilled_total", 0)),
        str(worker.get("tokens_decoded_total", 0)),
        ", ".join(moved) or "0",
        str(worker.get("transport") or "-"),
    ]


def _size(count: int) -> str:
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
