"""A prefill and a decode worker in this process, real in everything but Ray, and a caller that
plays the router: both legs at once, coupled, no retries."""

import asyncio
import random
import socket
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from core.config import Config, parse_config
from core.errors import PdserveError
from core.types import FinishReason, GenerationRequest, Role, SamplingParams
from core.worker_settings import WorkerSettings
from decode_worker import DecodeWorker
from kv_transfer.base import KVTransfer, Peer, Pieces
from prefill_worker import PrefillWorker
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.channel import make_channel
from rpc.status import error_from_rpc
from worker.follower import FollowerWorker

BLOCK = 8


def tiny_config(model_dir: Path, **engine: Any) -> Config:
    options = {
        "block_size": BLOCK,
        "num_kv_blocks": 64,
        "max_num_batched_tokens": 32,
        "threads": 1,
        **engine,
    }
    section = "".join(f"\n  {key}: {value}" for key, value in options.items())
    return parse_config(f"model: {model_dir}\ndtype: float32\nengine:{section}\n")


def hand_over_config(model_dir: Path, transport: str = "grpc", **engine: Any) -> Config:
    """With leases that end soon."""
    config = tiny_config(model_dir, **engine)
    transfer = config.kv_transfer.model_copy(update={"transport": transport, "lease_seconds": 1.0})
    return config.model_copy(update={"kv_transfer": transfer})


@dataclass
class Answer:
    """What the router would have seen of one attempt."""

    tokens: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    prefill_started: pb.PrefillStarted | None = None
    decode_started: pb.DecodeStarted | None = None
    error: PdserveError | None = None
    errors: list[PdserveError] = field(default_factory=list)  # of both legs


class Pair:
    def __init__(self, prefill: PrefillWorker, decode: DecodeWorker) -> None:
        self.prefill = prefill
        self.decode = decode
        self.via = ""  # the address by which D reaches P, if it is not P's own
        self.channels = {worker: make_channel(worker.info.address) for worker in (prefill, decode)}

    def stub(self, kind: Any, worker: Any) -> Any:
        return kind(self.channels[worker])

    def source(self, **changes: str) -> pb.PeerAddress:
        info = self.prefill.info
        address = self.via or info.address
        fields = {"worker_id": info.id, "address": address, "incarnation": info.incarnation}
        return pb.PeerAddress(**{**fields, **changes})

    def prefill_call(self, request: GenerationRequest, hand_over: bool = True) -> Any:
        return self.stub(worker_pb2_grpc.PrefillServiceStub, self.prefill).Prefill(
            pb.PrefillRequest(
                request=codec.request_to_pb(request),
                incarnation=self.prefill.info.incarnation,
                hand_over=hand_over,
            )
        )

    def decode_call(self, request: GenerationRequest, source: pb.PeerAddress | None) -> Any:
        return self.stub(worker_pb2_grpc.DecodeServiceStub, self.decode).Decode(
            pb.DecodeRequest(
                request=codec.request_to_pb(request),
                incarnation=self.decode.info.incarnation,
                source=source,
            )
        )

    async def generate(self, request: GenerationRequest, timeout_s: float = 20.0) -> Answer:
        """Both legs at once. A leg that fails cancels the other."""
        async with asyncio.timeout(timeout_s):
            answer = Answer()
            prefill = self.prefill_call(request)
            decode = self.decode_call(request, self.source())
            legs = [
                asyncio.create_task(self._leg(prefill, "prefill", answer)),
                asyncio.create_task(self._leg(decode, "decode", answer)),
            ]
            try:
                for leg in asyncio.as_completed(legs):
                    await leg
                    if answer.error is not None:
                        break
            finally:
                prefill.cancel()
                decode.cancel()
                await asyncio.gather(*legs, return_exceptions=True)
            return answer

    async def alone(self, request: GenerationRequest) -> Answer:
        """The oracle: the decode worker does both phases itself."""
        answer = Answer()
        await self._leg(self.decode_call(request, None), "decode", answer)
        return answer

    async def _leg(self, call: Any, who: str, answer: Answer) -> None:
        try:
            async for event in call:
                match event.WhichOneof("event"):
                    case "started" if who == "prefill":
                        answer.prefill_started = event.started
                    case "started":
                        answer.decode_started = event.started
                    case "first_token":
                        answer.tokens.insert(0, event.first_token.token.id)
                        reason = codec.finish_from_pb(event.first_token.finish_reason)
                        answer.finish_reason = reason or answer.finish_reason
                    case "tokens":
                        answer.tokens += [token.id for token in event.tokens.tokens]
                        reason = codec.finish_from_pb(event.tokens.finish_reason)
                        answer.finish_reason = reason or answer.finish_reason
        except grpc.aio.AioRpcError as error:
            failure = error_from_rpc(error, who)
            answer.errors.append(failure)
            answer.error = answer.error or failure

    async def counts(self, worker: Any) -> Any:
        return await worker.runtime.run_on_engine(lambda e: e.block_counts())

    async def wait_idle(self, timeout_s: float = 5.0) -> None:
        """Until no block is in use on either side, no call open and no lease held; then both
        engines must be sound."""
        workers = (self.prefill, self.decode)
        async with asyncio.timeout(timeout_s):
            while True:
                counts = [await self.counts(worker) for worker in workers]
                is_quiet = all(c.running == c.held == c.awaiting == 0 for c in counts)
                num_open = [len(worker.runtime.outputs) for worker in workers]
                if is_quiet and not any(num_open) and not len(self.prefill.leases):
                    break
                await asyncio.sleep(0.01)
        for worker in workers:
            await worker.runtime.run_on_engine(lambda e: e.check_integrity())

    async def close(self) -> None:
        for channel in self.channels.values():
            await channel.close()
        await stop_worker(self.decode)
        await stop_worker(self.prefill)


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}/{length}")
    return [rng.randrange(256) for _ in range(length)]


def request(
    tokens: Sequence[int], max_tokens: int = 12, request_id: str = "", **sampling: Any
) -> GenerationRequest:
    params = {"temperature": 0.0, "seed": 1, **sampling}
    salt = str(params.pop("cache_salt", ""))
    return GenerationRequest(
        request_id=request_id or uuid.uuid4().hex,
        prompt_token_ids=tuple(tokens),
        sampling=SamplingParams(max_tokens=max_tokens, **params),
        cache_salt=salt,
    )


async def start_worker(
    config: Config, role: Role, worker_id: str = "", port: int = 0
) -> PrefillWorker | DecodeWorker:
    settings = WorkerSettings(
        worker_id=worker_id or f"{role}-0", role=role, config=config, port=port
    )
    worker_class = PrefillWorker if role is Role.PREFILL else DecodeWorker
    followers: list[FollowerWorker] = []
    if settings.num_ranks > 1:
        settings = with_rendezvous(settings)
        ranks = range(1, settings.num_ranks)
        others = [replace(settings, rank=rank, rendezvous_fd=None) for rank in ranks]
        followers = [FollowerWorker(other) for other in others]
    worker = worker_class(settings)
    await asyncio.gather(*(part.start(lambda text: None) for part in (worker, *followers)))
    if followers:
        _followers[id(worker)] = followers
    return worker


_followers: dict[int, list[FollowerWorker]] = {}  # by the id of their rank 0


async def stop_worker(worker: PrefillWorker | DecodeWorker) -> None:
    """With its other ranks, which a test has in the same process."""
    followers = _followers.pop(id(worker), [])
    await asyncio.gather(*(part.stop() for part in (worker, *followers)))
    assert not any(follower.failed.done() for follower in followers)


def with_rendezvous(settings: WorkerSettings) -> WorkerSettings:
    """For rank 0 of several: with a socket where the others find it."""
    listener = socket.create_server((settings.host, 0))
    address = f"{settings.host}:{listener.getsockname()[1]}"
    return replace(settings, rendezvous=address, rendezvous_fd=listener.detach())


@asynccontextmanager
async def running_pair(config: Config, decode_config: Config | None = None) -> AsyncIterator[Pair]:
    prefill = await start_worker(config, Role.PREFILL)
    decode = await start_worker(decode_config or config, Role.DECODE)
    assert isinstance(prefill, PrefillWorker) and isinstance(decode, DecodeWorker)
    pair = Pair(prefill, decode)
    try:
        yield pair
    finally:
        await pair.close()


async def serves(pair: Pair, seed: int = 77) -> None:
    """A request that nothing disturbs, against the oracle."""
    answer = await pair.generate(request(prompt(100, seed), cache_salt="next"))
    alone = await pair.alone(request(prompt(100, seed), cache_salt="oracle"))
    assert answer.error is None, answer.error
    assert answer.tokens == alone.tokens
    await pair.wait_idle()


class FaultyTransfer(KVTransfer):
    """The fault shim on the KV path: a real transport, disturbed. `on_pull` may wait, raise, or
    change the local blocks after the copy (by returning a function that does)."""

    def __init__(self, inner: KVTransfer) -> None:
        self.inner = inner
        self.name = inner.name
        self.kv_cache = inner.kv_cache
        self.pulls: list[tuple[list[int], list[int]]] = []
        self.before: Any = None  # async (remote, local) -> None
        self.after: Any = None  # (kv_cache, local) -> None

    def offer(self) -> bytes:
        return self.inner.offer()

    async def pull(
        self,
        peer: Peer,
        request_id: str,
        remote_block_ids: Sequence[int],
        local_block_ids: Sequence[int],
        pieces: Sequence[Pieces] | None = None,
    ) -> None:
        self.pulls.append((list(remote_block_ids), list(local_block_ids)))
        if self.before is not None:
            await self.before(remote_block_ids, local_block_ids)
        await self.inner.pull(peer, request_id, remote_block_ids, local_block_ids, pieces)
        if self.after is not None:
            self.after(self.kv_cache, local_block_ids)

    def carrier(self, peer: Peer) -> str:
        return self.inner.carrier(peer)

    def forget(self, worker_id: str) -> None:
        self.inner.forget(worker_id)

    async def close(self) -> None:
        await self.inner.close()


def disturb(pair: Pair) -> FaultyTransfer:
    """Puts the shim into the decode worker, in front of the transport that it uses."""
    transports = pair.decode.runtime.transports
    name = next(iter(transports))
    shim = transports[name] = FaultyTransfer(transports[name])
    return shim
