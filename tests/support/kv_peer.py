"""A worker's sending half in a process of its own: NIXL and `KvService.Pull` over one KV tensor.

Run as a script it prints one JSON line (who it is and its offers), then obeys lines on stdin:
a fault's name for the gRPC stream. It ends when stdin does, so it never outlives its test.
"""

import argparse
import asyncio
import base64
import json
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[2]


def block_pattern(seed: int, num_blocks: int, size: int) -> np.ndarray:
    """What a peer started with `seed` holds: `[num_blocks, size]` uint8."""
    return np.random.default_rng(seed).integers(0, 256, (num_blocks, size), dtype=np.uint8)


class PeerProcess:
    """Owns the process. `peer("nixl")` is what a decode worker would know about it."""

    def __init__(
        self,
        worker_id: str = "prefill-0",
        incarnation: str = "a",
        seed: int = 0,
        num_blocks: int = 64,
        size: int = 65536,
        env: dict[str, str] | None = None,
    ) -> None:
        self.worker_id, self.incarnation = worker_id, incarnation
        self.seed, self.num_blocks, self.size = seed, num_blocks, size
        self._process = subprocess.Popen(
            [
                *(sys.executable, __file__, "--worker-id", worker_id),
                *("--incarnation", incarnation, "--seed", str(seed)),
                *("--num-blocks", str(num_blocks), "--size", str(size)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=env,
        )
        self._hello: dict | None = None

    @property
    def hello(self) -> dict:
        if self._hello is None:
            assert self._process.stdout is not None
            line = self._process.stdout.readline()
            assert line, "the peer process died at its start"
            self._hello = json.loads(line)
        return self._hello

    @property
    def blocks(self) -> np.ndarray:
        return block_pattern(self.seed, self.num_blocks, self.size)

    def peer(self, transport: str):
        from kv_transfer.base import Peer

        payload = base64.b64decode(self.hello["nixl"]) if transport == "nixl" else b""
        return Peer(self.worker_id, self.incarnation, self.hello["address"], payload)

    def set_fault(self, name: str) -> None:
        self.hello  # noqa: B018 - its line comes first
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline().strip() == name

    def send_signal(self, number: int) -> None:
        self.hello  # noqa: B018 - not before it is up
        self._process.send_signal(number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
        self._process.wait(10)

    def close(self) -> None:
        """Ends it the orderly way, and for sure."""
        assert self._process.stdin is not None and self._process.stdout is not None
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGCONT)
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


async def _serve(options: argparse.Namespace) -> None:
    import grpc
    import torch

    from kv_transfer.grpc_transport import add_kv_service, stream_blocks
    from kv_transfer.nixl_transport import NixlTransfer
    from rpc import worker_pb2 as pb
    from rpc import worker_pb2_grpc
    from rpc.channel import make_server
    from rpc.status import translated_errors

    torch.set_num_threads(1)
    pattern = block_pattern(options.seed, options.num_blocks, options.size)
    kv_cache = torch.from_numpy(pattern)
    nixl = NixlTransfer(kv_cache, options.worker_id, options.incarnation)
    fault = "none"

    class Service(worker_pb2_grpc.KvServiceServicer):
        async def Pull(self, request, context: grpc.aio.ServicerContext):
            async with translated_errors(context):
                index = 0
                async for piece in stream_blocks(kv_cache, request, 1 << 16):
                    if index == 1 and fault == "short":
                        return
                    if index == 1 and fault == "stall":
                        await asyncio.sleep(3600)
                    if index == 1 and fault == "flip":
                        data = bytearray(pb.KvPiece.FromString(piece).data)
                        data[7] ^= 1
                        piece = pb.KvPiece(data=bytes(data)).SerializeToString()
                    if fault == "slow":
                        await asyncio.sleep(0.01)
                    yield piece
                    index += 1
                if fault == "long":
                    yield pb.KvPiece(data=b"more").SerializeToString()

    server = make_server()
    add_kv_service(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    payload = base64.b64encode(nixl.offer()).decode()
    print(json.dumps({"address": f"127.0.0.1:{port}", "nixl": payload}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        fault = line.strip()
        print(fault, flush=True)
    await server.stop(0)
    await nixl.close()


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    parser = argparse.ArgumentParser()
    parser.add_argument("--worker-id")
    parser.add_argument("--incarnation")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--num-blocks", type=int)
    parser.add_argument("--size", type=int)
    asyncio.run(_serve(parser.parse_args()))
