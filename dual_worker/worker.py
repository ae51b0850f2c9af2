"""A worker of a pool with `roles: [prefill, decode]`: one engine, and the services of both roles.

    READY as one role -> DRAINING -> nothing is here any more -> READY as the other, new incarnation
                         after the grace: what is left fails, and the router resumes it elsewhere
                         something stays all the same: READY as before

Weights, KV blocks, the memory that transports have registered and the prefix cache stay as they
are. Which role it has is a matter of who calls: every call names an incarnation, and each belongs
to one role.
"""

import asyncio
import logging
import time

from core.errors import EngineError, RequestError, UnavailableError
from core.types import Role
from core.worker_settings import WorkerSettings
from decode_worker import DecodeWorker
from prefill_worker import PrefillWorker
from worker.base import Worker
from worker.runtime import WorkerRuntime

logger = logging.getLogger(__name__)

_END_S = 5.0  # from the failure of what is left to the last block given back
_CHECK_S = 0.01


class DualWorker(Worker):
    """Owns one runtime, with a prefill worker's leases and a decode worker's peers around it."""

    def __init__(self, settings: WorkerSettings) -> None:
        super().__init__(WorkerRuntime(settings))
        self._prefill = PrefillWorker(settings, self.runtime)
        self._decode = DecodeWorker(settings, self.runtime)
        self.leases = self._prefill.leases
        self._switching = asyncio.Lock()

    @property
    def role(self) -> Role:
        return self.runtime.settings.role

    def add_services(self) -> None:
        self._prefill.add_services()
        self._decode.add_services()

    async def switch(self, role: Role, grace_s: float) -> None:
        """Becomes the other role; what runs has `grace_s`. Raises RequestError for a role that it
        cannot have, and EngineError if blocks are still in use after all; then it serves on as
        what it was."""
        async with self._switching:
            if role not in self.runtime.settings.roles:
                raise RequestError(f"{self.info.id} cannot be a {role} worker")
            if role is self.role:
                return
            began, old = time.monotonic(), self.role
            try:
                if not await self.runtime.drain(grace_s):
                    logger.info("%d requests go elsewhere", self.num_requests)
                error = UnavailableError(f"{self.info.id} becomes a {role} worker")
                self.leases.fail_all(error)  # maybe one whose prefill never came
                self.runtime.outputs.fail_all(error)
                await self._end_of_all()
                drained = time.monotonic()
                await self.runtime.take_role(role)
            finally:
                await self.runtime.resume()
            logger.info(
                "%s is a %s worker, no more a %s worker: drained in %.3f s, switched in %.3f s, "
                "incarnation %s", self.info.id, role, old, drained - began,
                time.monotonic() - drained, self.runtime.incarnation,
            )  # fmt: skip

    async def _end_of_all(self) -> None:
        """Until the engine has no sequence. Raises EngineError."""
        deadline = time.monotonic() + _END_S
        while num_left := await self.runtime.run_on_engine(lambda engine: engine.num_sequences):
            if time.monotonic() > deadline:
                raise EngineError(f"{num_left} sequences still have blocks, maybe for a copy")
            await asyncio.sleep(_CHECK_S)

    async def stop(self, grace_s: float = 0.0) -> None:
        await self._prefill.stop(grace_s)  # the runtime with it
        await self._decode.peers.close()
