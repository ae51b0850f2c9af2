"""NIXL as this project uses it: one UCX agent over one KV tensor, reads by block index.

It works on NIXL's bindings: the Python wrapper around them fixes the progress thread's delay at
0, which keeps a core busy. Facts about NIXL 1.5.1 that the callers rely on:

- A read may be over when `post_read` returns (always so over cma, where the copy happens inside
  the call with the GIL released), or later, as `is_done` tells.
- A failed read is an exception, of `post_read` or of `is_done`; NIXL has no other sign.
- Nothing cancels a read: released, its bytes still land.
"""

import contextlib
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from core.errors import HandoverError
from kv_transfer.base import block_bytes
from kv_transfer.memory import use_huge_pages
from kv_transfer.ucx_log import UcxLog

# Between two looks at the wire by NIXL's own thread, which serves peers that read from here over
# TCP. Of 1, 2 and 4 ms the last costs least when idle (1 percent of a core, against 2.6), and reads
# were as fast as with 2 ms, and 1.5 times as fast as with 1 ms, on two busy cores.
_PROGRESS_DELAY_US = 4000
_HEADER = struct.Struct("<4sBBHIQQQ16s")
_MAGIC = b"PDKV"
_VERSION = 1
_MEMORY_TYPES = ("cpu", "cuda")

# One for the process, as UCX is.
ucx_log = UcxLog()


@dataclass(frozen=True, slots=True)
class NixlOffer:
    """Where a worker's blocks are, as its peers need to know it."""

    agent_name: str
    memory_type: str  # cpu | cuda
    device_id: int
    base_address: int
    block_bytes: int
    num_blocks: int
    machine: bytes  # 16 bytes, equal for processes of one running kernel
    metadata: bytes  # NIXL's own: how to connect, keys of the registered memory

    def encode(self) -> bytes:
        name = self.agent_name.encode()
        header = _HEADER.pack(
            _MAGIC,
            _VERSION,
            _MEMORY_TYPES.index(self.memory_type),
            len(name),
            self.device_id,
            self.base_address,
            self.block_bytes,
            self.num_blocks,
            self.machine,
        )
        return header + name + self.metadata

    @classmethod
    def decode(cls, payload: bytes) -> "NixlOffer":
        """Raises HandoverError for what `encode` never made."""
        try:
            magic, version, memory, name_length, device, base, size, count, machine = (
                _HEADER.unpack_from(payload)
            )
            if magic != _MAGIC or version != _VERSION or size == 0:
                raise ValueError(f"starts with {payload[:5]!r}")
            name = payload[_HEADER.size : _HEADER.size + name_length].decode()
            memory_type = _MEMORY_TYPES[memory]
        except (struct.error, ValueError, IndexError) as error:
            raise HandoverError(f"not a NIXL offer of version {_VERSION}: {error}") from error
        metadata = payload[_HEADER.size + name_length :]
        return cls(name, memory_type, device, base, size, count, machine, metadata)


@dataclass(frozen=True, slots=True)
class ReadBatch:
    """What one read copies: whole blocks, as their indices (int32 `[n]`), or pieces of blocks, as
    addresses, lengths and device ids (uint64 `[n, 3]`)."""

    remote: np.ndarray
    local: np.ndarray


@dataclass(slots=True)
class Connection:
    """What this agent holds about a remote one. `reads` counts reads that are not over: until
    it is 0 the connection must stay."""

    offer: NixlOffer
    remote_blocks: int  # handle of the prepared descriptor list
    reads: int = 0


class NixlAgent:
    """Owns a NIXL agent and the registration of `kv_cache`, which it keeps alive. Not
    thread-safe: after construction one thread calls it."""

    def __init__(self, name: str, kv_cache: torch.Tensor) -> None:
        """Raises ImportError or OSError where NIXL is not installed or does not load."""
        self.kv_cache = kv_cache
        self._block_bytes = block_bytes(kv_cache)
        self._num_blocks = kv_cache.shape[0]
        self._device_id = kv_cache.device.index or 0
        use_huge_pages(kv_cache)
        with ucx_log.environment(), _mutex_locks():
            self._nixl = _bindings()
            config = self._nixl.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = _PROGRESS_DELAY_US
            # The default, no locks at all, crashes beside the progress thread.
            config.syncMode = self._nixl.NIXL_THREAD_SYNC_RW
            self._agent = self._nixl.nixlAgent(name, config)
            self._agent.createBackend("UCX", {})
        total = self._block_bytes * self._num_blocks
        self._registration = self._nixl.nixlRegDList(
            self._memory_type(kv_cache.device.type),
            [(kv_cache.data_ptr(), total, self._device_id, "")],
        )
        self._agent.registerMem(self._registration, [])
        self._local_blocks = self._prepare(
            self._nixl.NIXL_INIT_AGENT,
            kv_cache.device.type,
            (kv_cache.data_ptr(), self._block_bytes, self._device_id),
            self._num_blocks,
        )
        self.offer = NixlOffer(
            agent_name=name,
            memory_type=kv_cache.device.type,
            device_id=self._device_id,
            base_address=kv_cache.data_ptr(),
            block_bytes=self._block_bytes,
            num_blocks=self._num_blocks,
            machine=_machine_id(),
            metadata=bytes(self._agent.getLocalMD()),
        )

    def connect(self, offer: NixlOffer) -> Connection:
        loaded = self._agent.loadRemoteMD(offer.metadata)
        loaded = loaded.decode() if isinstance(loaded, bytes) else loaded
        try:
            if loaded != offer.agent_name:
                raise HandoverError(f"the metadata are of agent {loaded}, not {offer.agent_name}")
            remote_blocks = self._prepare(
                loaded,
                offer.memory_type,
                (offer.base_address, offer.block_bytes, offer.device_id),
                offer.num_blocks,
            )
        except BaseException:
            self._agent.invalidateRemoteMD(loaded)
            raise
        return Connection(offer, remote_blocks)

    def disconnect(self, connection: Connection) -> None:
        """The connection must have no reads left. Never raises: the peer may be long gone."""
        with contextlib.suppress(Exception):
            self._agent.releasedDlistH(connection.remote_blocks)
        with contextlib.suppress(Exception):
            self._agent.invalidateRemoteMD(connection.offer.agent_name)

    def post_read(self, connection: Connection, batch: ReadBatch) -> int | None:
        """Starts a copy. Returns a handle, or None if it is over already."""
        if batch.remote.ndim == 1:
            handle = self._agent.makeXferReq(
                self._nixl.NIXL_READ,
                self._local_blocks,
                batch.local,
                connection.remote_blocks,
                batch.remote,
                "",
                [],
                False,
            )
        else:
            offer = connection.offer
            handle = self._agent.createXferReq(
                self._nixl.NIXL_READ,
                self._pieces(self.kv_cache.device.type, batch.local),
                self._pieces(offer.memory_type, batch.remote),
                offer.agent_name,
                "",
                [],
            )
        try:
            is_running = self._agent.postXferReq(handle, "") == self._nixl.NIXL_IN_PROG
        except BaseException:
            self._release(handle)
            raise
        if is_running:
            return handle
        self._release(handle)
        return None

    def is_done(self, handle: int) -> bool:
        """Whether the read is over; releases it then, and also when it raises."""
        try:
            if self._agent.getXferStatus(handle) == self._nixl.NIXL_IN_PROG:
                return False
        except BaseException:
            self._release(handle)
            raise
        self._release(handle)
        return True

    def carrier(self, connection: Connection) -> str:
        """The UCX transport that reads from this peer, from UCX's log; "ucx" if that is off."""
        ucx_log.read()
        same = connection.offer.machine == self.offer.machine
        wanted, other = ("intra-node", "inter-node") if same else ("inter-node", "intra-node")
        # Two containers of one machine may look like two nodes to UCX.
        return ucx_log.carriers.get(wanted) or ucx_log.carriers.get(other) or "ucx"

    def close(self) -> None:
        """No read may be running."""
        with contextlib.suppress(Exception):
            self._agent.releasedDlistH(self._local_blocks)
        with contextlib.suppress(Exception):
            self._agent.deregisterMem(self._registration, [])
        del self._agent

    def _prepare(
        self, agent_name: str, memory_type: str, block: tuple[int, int, int], count: int
    ) -> int:
        """A prepared list of `count` blocks, the first of which is (address, bytes, device)."""
        address, size, device = block
        strided = np.array([[address, size, device, size, count]], dtype=np.uint64)
        return self._agent.prepXferDlist(agent_name, self._memory_type(memory_type), strided, [])

    def _pieces(self, memory_type: str, pieces: np.ndarray):
        return self._nixl.nixlXferDList(self._memory_type(memory_type), pieces)

    def _memory_type(self, device_type: str):
        return self._nixl.VRAM_SEG if device_type == "cuda" else self._nixl.DRAM_SEG

    def _release(self, handle: int) -> None:
        with contextlib.suppress(Exception):
            self._agent.releaseXferReq(handle)


@contextlib.contextmanager
def _mutex_locks() -> Iterator[None]:
    """UCX guards its worker with a spin lock, which it holds through a whole copy between two
    processes: NIXL's progress thread then burns a core beside it. A mutex doubled the speed and
    halved the CPU time on two busy cores. UCX reads this when an agent is made."""
    name = "UCX_USE_MT_MUTEX"
    if name in os.environ:
        yield
        return
    os.environ[name] = "y"
    try:
        yield
    finally:
        del os.environ[name]


def _bindings():
    """NIXL's bindings. Importing them must not change how this process logs."""
    raise_exceptions = logging.raiseExceptions
    try:
        from nixl import _bindings as bindings
    finally:
        logging.raiseExceptions = raise_exceptions
    return bindings


def _machine_id() -> bytes:
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text()
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)
