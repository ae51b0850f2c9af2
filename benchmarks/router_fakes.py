"""The other side of `benchmarks/router.py`: a controller, a prefill and a decode worker that
compute nothing. They speak the real protocol, with as little work as it allows. Each token is the
letter "x"; paced, all streams get theirs in the same moments, the steps of the worker. A process
of its own; it prints the controller's address and runs until it is ended.
"""

import argparse
import asyncio
import json
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import grpc  # noqa: E402
import uvloop  # noqa: E402

from rpc import cluster_pb2 as cluster  # noqa: E402
from rpc import worker_pb2 as pb  # noqa: E402
from rpc.channel import make_server  # noqa: E402
from worker.step_stream import StepStreams  # noqa: E402

TOKEN = ord("x")
_AGAIN_S = 1.0  # between two statuses, and two views


class Fakes:
    """`sent`: by x-request-id, when each token was written, in seconds of this machine's
    monotonic clock, which the client reads too. Report and reset by the method Sent."""

    def __init__(self, itl_s: float, max_tokens: int, has_steps: bool) -> None:
        """`itl_s`: from one token of a stream to the next; 0: all at once. `has_steps`: tokens of
        all streams go as one, as real workers send them; else each on its request's own call."""
        self._itl_s = itl_s
        self._steps = StepStreams(lambda incarnation: None)
        self._has_steps = has_steps
        self._handed: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._sent: dict[str, list[float]] = {}
        self._addresses: dict[str, str] = {}
        token = pb.Token(id=TOKEN)
        started = pb.DecodeStarted(num_transferred_tokens=16, kv_bytes=1024)
        self._prefill_events = [
            pb.PrefillEvent(started=pb.PrefillStarted()).SerializeToString(),
            pb.PrefillEvent(first_token=pb.FirstToken(token=token)).SerializeToString(),
        ]
        self._started = pb.DecodeEvent(started=started).SerializeToString()
        self._steps_ended = pb.DecodeEvent(steps_ended=pb.StepsEnded()).SerializeToString()
        going, ended = pb.FINISH_REASON_UNSPECIFIED, pb.FINISH_REASON_LENGTH
        self._tokens = [_tokens(index, token, going) for index in range(max_tokens)]
        self._last = [_tokens(index, token, ended) for index in range(max_tokens)]

    async def start(self) -> str:
        """Binds everything; returns the controller's address."""
        servers = []
        for name in ("controller", "prefill", "decode"):
            server = make_server()
            server.add_generic_rpc_handlers(self._handlers(name))
            self._addresses[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            servers.append(server)
        self._servers = servers
        self._steps_address = await self._steps.listen("127.0.0.1")
        await asyncio.gather(*(server.start() for server in servers))
        return self._addresses["controller"]

    def _handlers(self, name: str) -> tuple[grpc.GenericRpcHandler, ...]:
        async def info(request: bytes, context: Any) -> bytes:
            return self._info(name)

        make, package = grpc.method_handlers_generic_handler, "pdserve.worker.v1"
        if name == "controller":
            watch = grpc.unary_stream_rpc_method_handler(self._watch)
            sent = grpc.unary_unary_rpc_method_handler(self._report)
            return (
                make(f"{package}.ClusterService", {"Watch": watch}),
                make("bench.Fakes", {"Sent": sent}),
            )
        status = grpc.unary_stream_rpc_method_handler(self._status)
        worker = {"GetInfo": grpc.unary_unary_rpc_method_handler(info), "WatchStatus": status}
        prefill = {"Prefill": grpc.unary_stream_rpc_method_handler(self._prefill)}
        decode = {"Decode": grpc.unary_stream_rpc_method_handler(self._decode)}
        return (
            make(f"{package}.WorkerService", worker),
            make(f"{package}.PrefillService", prefill),
            make(f"{package}.DecodeService", decode),
        )

    def _info(self, name: str) -> bytes:
        return pb.WorkerInfo(
            id=f"{name}-0", role=_role(name), host="127.0.0.1", pid=1,
            address=self._addresses[name], incarnation=name, model="fake",
            compatibility={"block_size": "16"}, max_model_len=1 << 16, block_size=16,
            num_kv_blocks=1 << 20, kv_block_bytes=1024, max_num_seqs=1024,
            steps_address=self._steps_address,
        ).SerializeToString()  # fmt: skip

    async def _watch(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        view = cluster.ClusterView(version=1)
        for name in ("prefill", "decode"):
            view.workers.add(
                id=f"{name}-0", role=_role(name), state=pb.WORKER_STATE_READY, host="127.0.0.1",
                pid=1, address=self._addresses[name], incarnation=name,
            )  # fmt: skip
        while True:
            yield view.SerializeToString()
            await asyncio.sleep(_AGAIN_S)

    async def _status(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        blocks = pb.KvBlockCounts(total=1 << 20, free=1 << 20)
        status = pb.WorkerStatus(state=pb.WORKER_STATE_READY, kv_blocks=blocks)
        while True:
            yield status.SerializeToString()
            await asyncio.sleep(_AGAIN_S)

    async def _prefill(self, request: bytes, context: Any) -> None:
        message = pb.PrefillRequest.FromString(request).request
        sent = self._sent.setdefault(message.client_request_id, [])
        await context.write(self._prefill_events[0])
        sent.append(time.monotonic())
        await context.write(self._prefill_events[1])
        await self._handed[message.request_id].wait()

    async def _decode(self, request: bytes, context: Any) -> None:
        whole = pb.DecodeRequest.FromString(request)
        message = whole.request
        steps = self._steps.get(whole.steps) if self._has_steps else None
        handed = self._handed[message.request_id]
        await context.write(self._started)
        handed.set()
        del self._handed[message.request_id]
        sent = self._sent.setdefault(message.client_request_id, [])
        last = message.sampling.max_tokens - 1
        # All streams step together.
        started = time.monotonic() // self._itl_s * self._itl_s if self._itl_s else 0.0
        for index in range(1, last + 1):
            if self._itl_s:
                due = started + index * self._itl_s
                await asyncio.sleep(max(0.0, due - time.monotonic()))
            tokens = (self._last if index == last else self._tokens)[index]
            sent.append(time.monotonic())
            if steps is not None:
                if index == last:
                    await context.write(self._steps_ended)
                    steps.put(message.request_id, tokens)
                else:
                    steps.put_token(message.request_id, whole.step_number, index, TOKEN)
            else:
                await context.write(pb.DecodeEvent(tokens=tokens).SerializeToString())

    async def _report(self, request: bytes, context: Any) -> bytes:
        sent, self._sent = self._sent, {}
        return json.dumps({name: sorted(times) for name, times in sent.items()}).encode()


def _role(name: str) -> pb.Role:
    return pb.ROLE_PREFILL if name == "prefill" else pb.ROLE_DECODE


def _tokens(index: int, token: pb.Token, reason: pb.FinishReason) -> pb.Tokens:
    return pb.Tokens(first_index=index, tokens=[token], finish_reason=reason)


async def main(options: argparse.Namespace) -> None:
    fakes = Fakes(options.itl / 1000, options.max_tokens, options.steps)
    print(await fakes.start(), flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--itl", type=float, default=0.0, help="milliseconds between tokens")
    parser.add_argument("--max-tokens", type=int, default=1024)
    parser.add_argument("--steps", action=argparse.BooleanOptionalAction, default=True)
    uvloop.run(main(parser.parse_args()))
