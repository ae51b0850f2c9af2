"""Two workers between which KV can be pulled, the same way for every transport."""

import numpy as np
import torch

from kv_transfer.base import KVTransfer, Peer
from kv_transfer.grpc_transport import GrpcTransfer
from kv_transfer.local_transport import LocalNetwork, LocalTransfer
from kv_transfer.nixl_transport import NixlTransfer
from support.kv_peer import PeerProcess, block_pattern

TRANSPORTS = ("nixl", "grpc", "local")


class KvPair:
    """`transfer` pulls into `kv_cache`; sources are started and killed by name."""

    def __init__(
        self, transport: str, num_blocks: int, size: int, network: LocalNetwork | None = None
    ) -> None:
        self.transport, self.num_blocks, self.size = transport, num_blocks, size
        self.kv_cache = torch.zeros(num_blocks, size, dtype=torch.uint8)
        self.network = network or LocalNetwork()
        self.transfer: KVTransfer
        if transport == "nixl":
            self.transfer = NixlTransfer(self.kv_cache, "decode-0", "d")
        elif transport == "grpc":
            self.transfer = GrpcTransfer(self.kv_cache)
        else:
            self.transfer = LocalTransfer(self.network, self.kv_cache, "decode-0", "d")
        self._processes: dict[str, PeerProcess] = {}

    @property
    def blocks(self) -> np.ndarray:
        return self.kv_cache.numpy()

    def start(self, worker_id: str = "prefill-0", incarnation: str = "a", seed: int = 0) -> Peer:
        """A source whose blocks are `block_pattern(seed, ...)`."""
        if self.transport == "local":
            cache = torch.from_numpy(block_pattern(seed, self.num_blocks, self.size))
            LocalTransfer(self.network, cache, worker_id, incarnation)
            return Peer(worker_id, incarnation, "", b"")
        process = PeerProcess(worker_id, incarnation, seed, self.num_blocks, self.size)
        self._processes[worker_id] = process
        return process.peer(self.transport)

    def kill(self, worker_id: str) -> None:
        if self.transport == "local":
            self.network.kill(worker_id)
        else:
            process = self._processes.pop(worker_id)
            process.kill()
            process.close()

    async def close(self) -> None:
        await self.transfer.close()
        for process in self._processes.values():
            process.close()
