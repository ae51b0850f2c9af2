"""Who may have whose KV, and for how long: handles, leases, incarnations and peers that change."""

import asyncio
from pathlib import Path

import grpc
import pytest

from core.errors import (
    HandoverError,
    IncompatiblePeerError,
    PdserveError,
    RequestError,
    StalePeerError,
)
from core.types import Role
from decode_worker.peers import PeerBook
from prefill_worker import PrefillWorker
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.status import error_from_rpc
from support.pair import (
    BLOCK,
    Pair,
    prompt,
    request,
    running_pair,
    start_worker,
    tiny_config,
)


async def attach(pair: Pair, **changes: object) -> PdserveError | None:
    """Attaches directly and returns the refusal, if that is what comes."""
    fields = {
        "request_id": "nobody",
        "incarnation": pair.prefill.info.incarnation,
        "token_digest": b"x",
        "compatibility": dict(pair.decode.info.compatibility),
        **changes,
    }
    call = pair.stub(worker_pb2_grpc.KvServiceStub, pair.prefill).Attach(pb.AttachRequest(**fields))
    try:
        async with asyncio.timeout(10):
            async for _ in call:
                pass
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error, "prefill-0")
    finally:
        call.cancel()
    return None


async def test_handles_are_bound_and_single_use(pair: Pair) -> None:
    """V05: no handle that is unknown, used, old or for other tokens leads to an answer."""
    done = request(prompt(20))
    await pair.generate(done)
    assert isinstance(await attach(pair, request_id=done.request_id), HandoverError)
    assert isinstance(await attach(pair, incarnation="an earlier life"), StalePeerError)
    unknown = await attach(pair, request_id="never prefilled")
    assert unknown is not None and "never came" in unknown.message
    again = await pair.generate(done)
    assert isinstance(again.error, RequestError)
    assert again.tokens == []
    only_decode = pair.decode_call(request(prompt(20)), pair.source())
    with pytest.raises(grpc.aio.AioRpcError):
        async for _ in only_decode:
            pass


async def test_pull_of_blocks_that_are_not_the_attempts(pair: Pair) -> None:
    stub = pair.stub(worker_pb2_grpc.KvServiceStub, pair.prefill)
    incarnation = pair.prefill.info.incarnation
    call = stub.Pull(pb.PullRequest(request_id="nobody", incarnation=incarnation, block_ids=[0, 1]))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call:
            pass
    assert isinstance(error_from_rpc(refused.value, "p"), HandoverError)


async def test_lease_without_a_decode_worker_expires(pair: Pair) -> None:
    """V02 c: nobody ever attaches and the router keeps its leg open."""
    call = pair.prefill_call(request(prompt(40)))
    with pytest.raises(grpc.aio.AioRpcError) as expired:
        async for _ in call:
            pass
    assert "lease ran out" in expired.value.details()
    await pair.wait_idle()


async def test_router_that_leaves_frees_at_once(pair: Pair) -> None:
    """V02 a, b: far sooner than the lease."""
    call = pair.prefill_call(request(prompt(40)))
    while not (event := await call.read()).HasField("first_token"):
        assert event is not grpc.aio.EOF
    assert (await pair.counts(pair.prefill)).held > 0
    call.cancel()
    await pair.wait_idle(timeout_s=1.0)


# ------------------------------------------------------------------ peers that change


async def test_restarted_prefill_worker(any_pair: Pair) -> None:
    """V08: same id, same address, new incarnation; the survivor must not use the old one."""
    assert (await any_pair.generate(request(prompt(30)))).error is None
    port = int(any_pair.prefill.info.address.rpartition(":")[2])
    old = any_pair.prefill
    old_source = any_pair.source()
    await any_pair.channels.pop(old).close()
    await old.stop()
    config = old.runtime.settings.config
    fresh = await start_worker(config, Role.PREFILL, port=port)
    assert isinstance(fresh, PrefillWorker)
    from rpc.channel import make_channel

    any_pair.prefill = fresh
    any_pair.channels[fresh] = make_channel(fresh.info.address)
    stale = any_pair.decode_call(request(prompt(31)), old_source)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in stale:
            pass
    assert isinstance(error_from_rpc(refused.value, "d"), PdserveError)
    answer = await any_pair.generate(request(prompt(32)))
    alone = await any_pair.alone(request(prompt(32), cache_salt="x"))
    assert answer.error is None
    assert answer.tokens == alone.tokens


async def test_incompatible_peers_are_refused(tiny_model_dir: Path) -> None:
    """V15: the message names the field that differs."""
    async with running_pair(
        tiny_config(tiny_model_dir),
        tiny_config(tiny_model_dir, block_size=BLOCK + 4, num_kv_blocks=32),
    ) as pair:
        answer = await pair.generate(request(prompt(40)))
        refusal = next(e for e in answer.errors if isinstance(e, IncompatiblePeerError))
        assert "block_size" in refusal.message
        await pair.wait_idle()


async def test_peer_book_keeps_one_incarnation(pair: Pair) -> None:
    book = pair.decode.peers
    assert isinstance(book, PeerBook)
    first = await book.get(pair.source())
    assert await book.get(pair.source()) is first
    with pytest.raises(StalePeerError):
        await book.get(pair.source(incarnation="another"))
    assert await book.get(pair.source()) is first


# ------------------------------------------------------------------ draining and identity


async def test_draining_worker_takes_nothing_new(pair: Pair) -> None:
    await pair.prefill.drain()
    answer = await pair.generate(request(prompt(20)))
    assert answer.error is not None
    assert "draining" in answer.error.message


async def test_wrong_incarnation_is_refused(pair: Pair) -> None:
    call = pair.stub(worker_pb2_grpc.DecodeServiceStub, pair.decode).Decode(
        pb.DecodeRequest(incarnation="an earlier life")
    )
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    assert isinstance(error_from_rpc(refused.value, "decode-0"), StalePeerError)
