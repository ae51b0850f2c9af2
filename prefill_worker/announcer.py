"""From the engine's progress on one prefill to what its lease announces."""

import asyncio

from core.errors import EngineError
from engine.types import SequenceOutput
from kv_transfer.lease import LeaseTable
from worker.runtime import WorkerRuntime


class Announcer:
    """Announces the blocks of one attempt in order: admitted, ready as chunks become final, then
    the commit or the finish."""

    def __init__(self, runtime: WorkerRuntime, leases: LeaseTable, request_id: str) -> None:
        self._leases = leases
        self._request_id = request_id
        self._block_size = runtime.settings.engine.block_size
        self._block_table: list[int] = []
        self._outputs: asyncio.Queue[SequenceOutput] = asyncio.Queue()
        self._task = asyncio.create_task(self._run(), name=f"announce {request_id}")

    def push(self, output: SequenceOutput) -> None:
        """Takes the engine's next output for this attempt."""
        self._outputs.put_nowait(output)

    def close(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._announce()
        except Exception as error:
            self._leases.fail(self._request_id, EngineError(f"cannot announce KV blocks: {error}"))
            raise

    async def _announce(self) -> None:
        leases, request_id, num_ready = self._leases, self._request_id, 0
        while True:
            output = await self._outputs.get()
            if output.finish_reason is not None:
                leases.finish(request_id, output.finish_reason)
                return
            if output.admitted:
                assert output.block_table is not None
                self._block_table = output.block_table
                leases.admitted(request_id, output.block_table)
            # A partial block is final only when the whole prompt is computed.
            num_final = output.num_computed_tokens // self._block_size
            if output.token_ids:
                num_final = len(self._block_table)
            if num_final > num_ready:
                num_ready = num_final
                leases.ready(request_id, num_ready)
            if output.token_ids:
                logprobs = output.logprobs[0] if output.logprobs else None
                leases.commit(request_id, output.token_ids[0], logprobs)
                return
