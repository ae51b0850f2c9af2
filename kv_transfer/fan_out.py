"""Several copies as one: all ranks of a worker pull their parts side by side.

What `base.KVTransfer.pull` promises for one copy holds for all of them together: once `together`
has ended, however it did, none of them writes any more, or it raises `TransferInDoubt`, whose
`quiet` is set when the last one is quiet.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from kv_transfer.base import TransferInDoubt

T = TypeVar("T")

_watchers: set[asyncio.Task[None]] = set()  # asyncio itself keeps none of its tasks


async def together(works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Runs all to their end and returns their results in order. The first failure, or a
    cancellation of the caller, cancels the rest, which are waited for. Raises TransferInDoubt if
    one of them is in doubt, else the cancellation, else the first failure."""
    if len(works) == 1:
        return [await works[0]]
    tasks = [asyncio.ensure_future(work) for work in works]
    pending = set(tasks)
    first: BaseException | None = None
    cancelled: asyncio.CancelledError | None = None
    while pending:
        try:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError as error:
            cancelled = error
            done, pending = set(), {task for task in tasks if not task.done()}
        failures = [task.exception() for task in done if not task.cancelled()]
        first = first or next((error for error in failures if error is not None), None)
        for task in pending if first or cancelled else ():
            task.cancel()
    doubts = [task.exception() for task in tasks if not task.cancelled()]
    quiets = [doubt.quiet for doubt in doubts if isinstance(doubt, TransferInDoubt)]
    if quiets:
        message = "copies are in doubt" if first is None else str(first)
        raise TransferInDoubt(message, _all_of(quiets)) from (cancelled or first)
    if cancelled is not None:
        raise cancelled
    if first is not None:
        raise first
    return [task.result() for task in tasks]


def _all_of(events: list[asyncio.Event]) -> asyncio.Event:
    """An event that is set when all of them are."""
    if len(events) == 1:
        return events[0]
    combined = asyncio.Event()

    async def watch() -> None:
        for event in events:
            await event.wait()
        combined.set()

    task = asyncio.ensure_future(watch())
    _watchers.add(task)
    task.add_done_callback(_watchers.discard)
    return combined
