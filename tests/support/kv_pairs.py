"""Two workers between which KV can be pulled, the same way for every transport."""

import numpy as np
import torch

from kv_transfer.base import KVTransfer, Peer
from kv_transfer.grpc_transport import GrpcTransfer
from kv_transfer.nixl_transport import NixlTransfer
from support.kv_peer import PeerProcess, block_pattern
from support.local_transport import LocalNetwork, LocalTransfer

TRANSPORTS = ("nixl", "grpc", "local")


class KvPair:
    """`transfer` pulls into `kv_cache`; sources are started, adopted and killed by name."""

    def __init__(self, transport: str, num_blocks: int, size: int) -> None:
        self.transport, self.num_blocks, self.size = transport, num_blocks, size
        self.kv_cache = torch.zeros(num_blocks, size, dtype=torch.uint8)
        self.network = LocalNetwork()
        self.transfer: KVTransfer
        if transport == "nixl":
            self.transfer = NixlTransfer(self.kv_cache, "decode-0", "d")
        elif transport == "grpc":
            self.transfer = GrpcTransfer(self.kv_cache)
        else:
            self.transfer = LocalTransfer(self.network, self.kv_cache, "decode-0", "d")
        self._processes: dict[tuple[str, str], PeerProcess] = {}

    @property
    def blocks(self) -> np.ndarray:
        return self.kv_cache.numpy()

    def adopt(self, process: PeerProcess) -> Peer:
        """A source that somebody else owns; the twin gets one with the same contents."""
        if self.transport != "local":
            return process.peer(self.transport)
        cache = torch.from_numpy(process.blocks)
        LocalTransfer(self.network, cache, process.worker_id, process.incarnation)
        return Peer(process.worker_id, process.incarnation, "", b"")

    def start(self, worker_id: str, incarnation: str, seed: int) -> None:
        """A source that holds `block_pattern(seed, ...)`; `peer` waits until it is up."""
        if self.transport == "local":
            cache = torch.from_numpy(block_pattern(seed, self.num_blocks, self.size))
            LocalTransfer(self.network, cache, worker_id, incarnation)
        else:
            self._processes[worker_id, incarnation] = PeerProcess(
                worker_id, incarnation, seed, self.num_blocks, self.size
            )

    def peer(self, worker_id: str, incarnation: str) -> Peer:
        if self.transport == "local":
            return Peer(worker_id, incarnation, "", b"")
        return self._processes[worker_id, incarnation].peer(self.transport)

    def kill(self, worker_id: str, incarnation: str) -> None:
        if self.transport == "local":
            self.network.kill(worker_id, incarnation)
        else:
            self._processes[worker_id, incarnation].kill()

    async def close(self) -> None:
        await self.transfer.close()
        for process in self._processes.values():
            process.close()
