"""What is gRPC's own: streams that are short, long, silent or damaged."""

import asyncio
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from core.errors import CorruptBlockError, HandoverError
from kv_transfer.base import Peer
from kv_transfer.checksum import block_checksums, compare
from kv_transfer.encoding import Encoding
from kv_transfer.grpc_transport import GrpcTransfer, add_kv_service, stream_blocks
from kv_transfer.wire import ENCODED_TAG, data_of, serialized
from rpc import worker_pb2 as pb
from rpc import worker_pb2_grpc
from rpc.channel import make_server

NUM_BLOCKS, SIZE = 96, 64 * 1024
IDS = list(range(NUM_BLOCKS))


@pytest.fixture
async def transfer(source):
    made = GrpcTransfer(torch.zeros(NUM_BLOCKS, SIZE, dtype=torch.uint8), stall_s=0.5)
    yield made
    source.set_fault("none")
    await made.close()


@pytest.mark.parametrize(
    ("fault", "message"),
    [("short", "sent 65536 of 6291456 bytes"), ("long", "more than"), ("stall", "sent no KV")],
)
async def test_a_stream_that_is_not_whole(source, transfer, fault, message):
    source.set_fault(fault)
    async with asyncio.timeout(20):
        with pytest.raises(HandoverError, match=message):
            await transfer.pull(source.peer("grpc"), "r", IDS, IDS)
    transfer.kv_cache.fill_(5)
    await asyncio.sleep(0.05)
    assert (transfer.kv_cache == 5).all()
    source.set_fault("none")
    await transfer.pull(source.peer("grpc"), "r", IDS, IDS)
    assert (transfer.kv_cache.numpy() == source.blocks).all()


async def test_a_flipped_bit_is_caught_by_the_checksum(source, transfer):
    expected = block_checksums(torch.from_numpy(source.blocks), IDS)
    source.set_fault("flip")
    await transfer.pull(source.peer("grpc"), "r", IDS, IDS)
    with pytest.raises(CorruptBlockError, match="position 1 of 96"):
        compare(block_checksums(transfer.kv_cache, IDS), expected)


async def test_a_cancelled_pull_of_a_slow_stream(source, transfer):
    source.set_fault("slow")
    pull = asyncio.create_task(transfer.pull(source.peer("grpc"), "r", IDS, IDS))
    async with asyncio.timeout(20):
        while not transfer.kv_cache.count_nonzero():
            await asyncio.sleep(0.001)
        pull.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pull
    transfer.kv_cache.zero_()
    await asyncio.sleep(0.05)
    assert transfer.kv_cache.count_nonzero() == 0


async def test_a_slow_stream_is_no_stall(source, transfer):
    """The bound is on silence, not on the whole pull, which takes longer here."""
    transfer._stall_s = 0.2
    source.set_fault("slow")
    async with asyncio.timeout(20):
        await transfer.pull(source.peer("grpc"), "r", IDS, IDS)
    assert (transfer.kv_cache.numpy() == source.blocks).all()


async def sent(cache: torch.Tensor, piece_bytes: int = 1 << 20, **request: Any) -> list[bytes]:
    stream = stream_blocks(cache, pb.PullRequest(**request), piece_bytes)
    return [pb.KvPiece.FromString(piece).data async for piece in stream]


async def test_pieces_are_bounded_and_in_order():
    cache = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (10, 1000), dtype=np.uint8))
    ids = [3, 4, 5, 0, 9, 8]
    pieces = await sent(cache, 700, block_ids=ids)
    assert {len(piece) for piece in pieces[:-1]} == {700}
    assert b"".join(pieces) == cache.numpy()[ids].tobytes()
    assert await sent(cache) == []


@pytest.mark.parametrize("ids", [[10], [0, 1, 99]])
async def test_the_sender_refuses_ids_outside_of_its_cache(ids):
    cache = torch.zeros(10, 1000, dtype=torch.uint8)
    with pytest.raises(HandoverError, match="out of range"):
        await sent(cache, block_ids=ids)


async def test_spans_are_cut_out_of_blocks():
    cache = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (4, 100), dtype=np.uint8))
    spans = [
        pb.KvSpans(offsets=[90, 0], lengths=[10, 5]),
        pb.KvSpans(offsets=[7], lengths=[1]),
    ]
    pieces = await sent(cache, 8, block_ids=[2, 2, 0], spans=spans, spans_of=[0, 1, 0])
    blocks = cache.numpy()
    wanted = [blocks[2, 90:], blocks[2, :5], blocks[2, 7:8], blocks[0, 90:], blocks[0, :5]]
    assert b"".join(pieces) == np.concatenate(wanted).tobytes()


@pytest.mark.parametrize(
    ("offsets", "lengths", "kinds"),
    [
        ([99], [2], [0]),
        ([0], [0], [0]),
        ([0, 1], [1], [0]),
        ([0], [1], [1]),
        ([0], [1], []),
        ([4_000_000_000], [1], [0]),
    ],
)
async def test_spans_outside_of_a_block_are_refused(offsets, lengths, kinds):
    cache = torch.zeros(4, 100, dtype=torch.uint8)
    spans = [pb.KvSpans(offsets=offsets, lengths=lengths)]
    with pytest.raises(HandoverError, match="spans asked for"):
        await sent(cache, block_ids=[1], spans=spans, spans_of=kinds)


async def test_bfloat16_blocks_travel_bit_by_bit(transfer):
    cache = torch.randn(6, 2, 3, 5).to(torch.bfloat16)
    pieces = await sent(cache, 13, block_ids=[1, 0])
    assert b"".join(pieces) == cache[[1, 0]].view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [1, 127, 128, 1 << 14, 1 << 20])
def test_piece_data_without_parsing(size):
    data = np.random.default_rng(size).bytes(size)
    message = pb.KvPiece(data=data).SerializeToString()
    half = memoryview(data)[: size // 2]
    assert serialized([half, memoryview(data)[size // 2 :]]) == message
    assert data_of(message) == data
    assert data_of(pb.KvPiece(encoded=data).SerializeToString(), ENCODED_TAG) == data


@pytest.mark.parametrize(
    "message",
    [b"", b"\x0a", b"\x0a\x05abc", b"\x0a\x03abc\x12\x01x", b"\x12\x03abc", b"\x0a\xff\xff\xff"],
)
async def test_other_messages_are_parsed(message):
    assert data_of(message) is None


async def test_piece_data_with_a_field_of_the_future(transfer):
    unknown = b"\x1a\x03abc"  # field 3
    message = pb.KvPiece(data=b"data").SerializeToString() + unknown
    assert await transfer._data_of(message) == b"data"


# ------------------------------------------------------------------ encodings


def bf16(count: int, row: int = 64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(count)
    spread = torch.rand(count, 1, generator=generator) * 8 - 4
    rows = torch.randn(count, row, generator=generator) * torch.exp(spread)
    return rows.to(torch.bfloat16)


@pytest.mark.parametrize("item", [1, 2, 4])
@pytest.mark.parametrize("size", [0, 1, 1000, 1 << 20])
def test_zstd_loses_nothing(item, size):
    encoding = Encoding("zstd", item)
    data = bf16(size // 128 + 1).view(torch.uint8).numpy().tobytes()[:size]
    encoded = encoding.encode(data)
    assert bytes(encoding.decode(memoryview(encoded), 1 << 20)) == data
    if size > 1000 and item == 2:
        assert len(encoded) < 0.9 * size


def test_int8_errs_by_half_a_step_of_its_row():
    rows = bf16(300)
    rows[7] = 0
    encoding = Encoding("int8", 2, 128)
    encoded = encoding.encode(rows.view(torch.uint8).numpy().tobytes())
    assert len(encoded) < 0.55 * rows.nbytes
    data = bytearray(encoding.decode(memoryview(encoded), rows.nbytes))
    found = torch.frombuffer(data, dtype=torch.bfloat16).view(-1, 64).float()
    largest = rows.float().abs().amax(dim=1, keepdim=True)
    # Half a step, and the rounding of what arrives to bfloat16.
    bound = largest / 254 + found.abs() / 256
    error = (found - rows.float()).abs()
    assert (error <= bound).all() and error.max() > 0


@pytest.mark.parametrize("name", ["zstd", "int8"])
@pytest.mark.parametrize("change", ["shorter", "longer", "garbage", "bomb"])
def test_a_broken_encoding_is_an_error(name, change):
    encoding = Encoding(name, 2, 128)
    good = encoding.encode(bf16(40).view(torch.uint8).numpy().tobytes())
    bad = {"shorter": good[:-9], "longer": good + b"x", "garbage": b"\x07" * 50, "bomb": good}
    if name == "zstd" and change == "longer":
        return  # a frame that ends early is whole
    most = 100 if change == "bomb" else 1 << 20
    with pytest.raises(HandoverError, match="cannot be decoded"):
        encoding.decode(memoryview(bad[change]), most)


@pytest.mark.parametrize("name", ["zstd", "int8"])
async def test_encoded_blocks_arrive(name):
    """Over a real connection, in pieces of whole rows; bit by bit with zstd."""
    cache = bf16(6 * 300, 48).view(6, 300, 48)
    server, address = await serving(cache)
    target = torch.zeros_like(cache)
    transfer = GrpcTransfer(target, encoding=Encoding(name, 2, 96))
    try:
        await transfer.pull(Peer("p", "a", address, b""), "r", [5, 0, 3], [1, 2, 4])
    finally:
        await transfer.close()
        await server.stop(0)
    arrived, sent_rows = target[[1, 2, 4]].float(), cache[[5, 0, 3]].float()
    if name == "zstd":
        assert torch.equal(arrived, sent_rows)
    else:
        bound = sent_rows.abs().amax(dim=-1, keepdim=True) / 254 + arrived.abs() / 256
        assert ((arrived - sent_rows).abs() <= bound).all()
    assert target[[0, 3, 5]].count_nonzero() == 0


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.float32), ("lzma", torch.bfloat16)])
async def test_an_encoding_that_the_sender_cannot_make_is_refused(name, dtype):
    with pytest.raises(HandoverError, match=f"cannot be sent as {name}"):
        await sent(torch.zeros(4, 100, dtype=dtype), block_ids=[0], encoding=name, row_bytes=4)


async def serving(cache: torch.Tensor) -> tuple[grpc.aio.Server, str]:
    class Service(worker_pb2_grpc.KvServiceServicer):
        async def Pull(self, request, context):
            async for piece in stream_blocks(cache, request, 10_000):
                yield piece

    server = make_server()
    add_kv_service(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, f"127.0.0.1:{port}"
