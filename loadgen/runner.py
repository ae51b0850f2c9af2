"""Sends a workload and measures it, and the measuring itself.

Open loop: each request leaves at its scheduled time, however many are still running; nothing here
waits for the server. Bodies are built ahead of their time.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from loadgen.client import StreamingClient
from loadgen.prompt import PromptMaker
from loadgen.record import PlannedRequest, RequestRecord

_AHEAD_BYTES = 256 << 20
_TICK_S = 0.02


@dataclass(slots=True)
class ClientLoad:
    """How busy the client was: its share of one core, and how late its event loop ran."""

    cpu_share: float = 0.0
    lags_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class RunResult:
    """What one run measured. `records` in the order of the plan; requests that were never sent
    have none. `elapsed_s` counts from the start of the run's clock to the last answer's end."""

    records: list[RequestRecord]
    elapsed_s: float
    client: ClientLoad
    was_stopped: bool = False


class Run:
    """One run of a plan. `on_done` hears of each request that has ended. `stop()` may be called
    at any time in the loop: nothing more is sent and what runs is cut short."""

    def __init__(
        self,
        client: StreamingClient,
        plan: Sequence[PlannedRequest],
        prompts: PromptMaker,
        *,
        concurrency: int | None = None,
        on_done: Callable[[RequestRecord], None] = lambda record: None,
    ) -> None:
        self._client = client
        self._plan = plan
        self._prompts = prompts
        self._concurrency = concurrency
        self._on_done = on_done
        self._records: dict[int, RequestRecord] = {}
        self._bodies: dict[int, bytes] = {}
        self._stopped = asyncio.Event()
        self._start = 0.0

    def stop(self) -> None:
        self._stopped.set()

    async def run(self) -> RunResult:
        """Not to be called twice."""
        self._build_ahead()
        load = ClientLoad()
        self._start = time.perf_counter()
        self._client.now = self._clock
        cpu = time.process_time()
        ticker = asyncio.create_task(_measure_lag(load.lags_s))
        sending = asyncio.create_task(self._send_all())
        stopping = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, stopping, ticker):
                task.cancel()
            results = await asyncio.gather(sending, stopping, ticker, return_exceptions=True)
        if isinstance(results[0], Exception):
            raise results[0]
        elapsed = self._clock()
        load.cpu_share = (time.process_time() - cpu) / elapsed if elapsed > 0 else 0.0
        records = [self._records[index] for index in sorted(self._records)]
        return RunResult(records, elapsed, load, self._stopped.is_set())

    def _clock(self) -> float:
        return time.perf_counter() - self._start

    def _build_ahead(self) -> None:
        room = _AHEAD_BYTES
        for request in self._plan:
            if room < 0:
                break
            body = self._bodies[request.index] = self._body(request)
            room -= len(body)

    def _body(self, request: PlannedRequest) -> bytes:
        prompt = self._prompts.make(request.prompt)
        return self._client.target.body(prompt, request.num_output_tokens)

    async def _send_all(self) -> None:
        if self._concurrency is not None:
            await self._closed_loop(self._concurrency)
        else:
            await self._open_loop()

    async def _closed_loop(self, concurrency: int) -> None:
        due = iter(self._plan)

        async def one_client() -> None:
            for request in due:
                body = self._take(request)
                await self._send(request, body, self._clock())

        async with asyncio.TaskGroup() as clients:
            for _ in range(min(concurrency, len(self._plan))):
                clients.create_task(one_client())

    async def _open_loop(self) -> None:
        async with asyncio.TaskGroup() as sent:
            for request in self._plan:
                body = self._take(request)
                at_s = request.at_s or 0.0
                # Sleeping for 0 lets answers be read while the client is behind.
                await asyncio.sleep(max(0.0, at_s - self._clock()))
                sent.create_task(self._send(request, body, at_s))

    def _take(self, request: PlannedRequest) -> bytes:
        body = self._bodies.pop(request.index, None)
        return self._body(request) if body is None else body

    async def _send(self, request: PlannedRequest, body: bytes, scheduled_s: float) -> None:
        record = self._records[request.index] = RequestRecord(
            request.index,
            scheduled_s,
            wanted_prompt_tokens=request.num_prompt_tokens,
            wanted_output_tokens=request.num_output_tokens,
        )
        try:
            await self._client.send(body, record)
        except asyncio.CancelledError:
            record.is_interrupted = True
            raise
        self._on_done(record)


async def _measure_lag(lags: list[float]) -> None:
    """How much later than asked for a timer of this loop fires, again and again."""
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_TICK_S)
        lags.append(max(0.0, time.perf_counter() - before - _TICK_S))
