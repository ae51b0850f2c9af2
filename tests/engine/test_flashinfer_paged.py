"""The index that FlashInfer is given, checked on a CPU: a fake of the library that knows nothing
but that index must give the answers of the reference backend."""

import random
import sys

import pytest
import torch

from core.errors import ModelError
from engine.attention import flashinfer_paged
from engine.attention.base import AttentionLayer, StepBatch
from engine.attention.flashinfer_paged import FlashInferAttention, PagedIndex
from engine.attention.kv_format import KVFormat, LatentFormat
from engine.attention.select import make_backend
from engine.attention.torch_paged import TorchPagedAttention
from support import fake_flashinfer

LAYERS, HEADS, KV_HEADS, BLOCK, DIM = 3, 6, 2, 4, 8
BATCHES = {
    # (query_len, seq_len) of each sequence and the number of decodes.
    "one decode": ([(1, 1)], 1),
    "decodes at block edges": ([(1, 4), (1, 5), (1, 8), (1, 30), (1, 3)], 5),
    "a prompt": ([(13, 13)], 0),
    "a chunk at a block edge": ([(8, 12)], 0),
    "a chunk inside a block": ([(7, 13)], 0),
    "guesses": ([(1, 6), (3, 9), (5, 30)], 1),
    "everything": ([(1, 7), (1, 40), (6, 6), (14, 38), (1, 12)], 2),
}


class Case:
    """A cache of random numbers, sequences in scattered blocks, this step's tensors."""

    def __init__(self, lens: list[tuple[int, int]], num_decodes: int, spare_blocks: int = 0):
        torch.manual_seed(0)
        counts = [-(-seq_len // BLOCK) + spare_blocks for _, seq_len in lens]
        ids = random.Random(0).sample(range(sum(counts) + 3), sum(counts) + 3)
        tables = [[ids.pop() for _ in range(count)] for count in counts]
        self.cache = torch.randn(sum(counts) + 3, LAYERS, 2, KV_HEADS, BLOCK, DIM)
        self.batch = StepBatch([q for q, _ in lens], [s for _, s in lens], tables, num_decodes)
        total = sum(self.batch.query_lens)
        # Views of one tensor, as the model has them.
        qkv = torch.randn(total, HEADS + 2 * KV_HEADS, DIM)
        self.qkv = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)


def flashinfer(cache: torch.Tensor, layers: list[AttentionLayer]) -> FlashInferAttention:
    return FlashInferAttention(
        cache, HEADS, layers, fake_flashinfer, KVFormat("auto", torch.float32)
    )


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [None, 1, 7, 8])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_equals_the_reference_backend(name, window, softcap):
    case = Case(*BATCHES[name])
    layer = AttentionLayer(1, 0.3, window, softcap)
    caches = [case.cache.clone(), case.cache.clone()]
    backends = [TorchPagedAttention(caches[0], HEADS), flashinfer(caches[1], [layer])]
    outs = []
    for backend in backends:
        backend.plan(case.batch)
        outs.append(backend.forward(layer, *case.qkv))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(caches[1], caches[0])  # wrote its own slots and no other
    assert not torch.equal(caches[1], case.cache)


@pytest.mark.parametrize("name", ["decodes at block edges", "everything"])
def test_fp8_rows_are_read_in_place_with_their_scales(name):
    case, dim = Case(*BATCHES[name]), 16
    kv_format = KVFormat("fp8_e4m3", torch.float32, padding=12)
    torch.manual_seed(1)
    rows = kv_format.encode(torch.randn(*case.cache.shape[:-1], dim))
    assert rows.shape[-1] == 32
    q, k, v = torch.randn(len(case.qkv[0]), HEADS + 2 * KV_HEADS, dim).split(
        [HEADS, KV_HEADS, KV_HEADS], dim=1
    )
    layer = AttentionLayer(1, 0.3, 9)
    caches = [rows.clone(), rows.clone()]
    backends = [
        TorchPagedAttention(caches[0], HEADS, kv_format),
        FlashInferAttention(caches[1], HEADS, [layer], fake_flashinfer, kv_format),
    ]
    outs = []
    for backend in backends:
        backend.plan(case.batch)
        outs.append(backend.forward(layer, q, k, v))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(caches[1], caches[0])


def test_layers_of_several_kinds_share_one_plan_a_kind():
    case = Case(*BATCHES["everything"])
    layers = [
        AttentionLayer(0, 0.3, 5), AttentionLayer(1, 0.3), AttentionLayer(2, 0.3, 5),
    ]  # fmt: skip
    fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made.clear()
    backend = flashinfer(case.cache.clone(), layers)
    reference = TorchPagedAttention(case.cache.clone(), HEADS)
    for step in (1, 2):
        backend.plan(case.batch)
        reference.plan(case.batch)
        for layer in layers:
            expected = reference.forward(layer, *case.qkv)
            torch.testing.assert_close(
                backend.forward(layer, *case.qkv), expected, atol=1e-5, rtol=1e-5
            )
        made = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper.made
        assert [wrapper.num_plans for wrapper in made] == [step, step]


def test_a_table_may_have_more_blocks_than_its_tokens_need():
    case = Case(*BATCHES["guesses"], spare_blocks=2)
    layer = AttentionLayer(0, 0.3)
    backends = [TorchPagedAttention(case.cache.clone(), HEADS), flashinfer(case.cache, [layer])]
    outs = []
    for backend in backends:
        backend.plan(case.batch)
        outs.append(backend.forward(layer, *case.qkv))
    torch.testing.assert_close(outs[1], outs[0], atol=1e-5, rtol=1e-5)


def test_the_index_of_the_example():
    index = PagedIndex()
    index.add(1, 35, [7, 2, 9], 16)
    index.add(4, 16, [4, 5], 16)
    assert index.indices == [7, 2, 9, 4]
    assert index.kv_indptr == [0, 3, 4]
    assert index.qo_indptr == [0, 1, 5]
    assert index.last_page_len == [3, 16]


def test_graph_plans_write_into_the_same_buffers_every_step():
    """What a captured graph reads must be at the same place after every plan."""
    layer = AttentionLayer(1, 0.3, 6)
    case = Case([(1, 21), (1, 30)], 2)
    backend = flashinfer(case.cache, [layer])
    backend.reserve_for_graphs(max_sequences=4, max_blocks=40)
    places = []
    for seq_lens in ([9, 30], [17, 2], [21, 29]):
        batch = StepBatch([1, 1], seq_lens, case.batch.block_tables, 2, for_graph=True)
        reference = TorchPagedAttention(case.cache.clone(), HEADS)
        reference.plan(batch)
        backend.plan(batch)
        torch.testing.assert_close(
            backend.forward(layer, *case.qkv),
            reference.forward(layer, *case.qkv),
            atol=1e-5,
            rtol=1e-5,
        )
        wrapper = backend._decodes[(6, None, 0.3)]
        assert wrapper.graph_size == 2
        kept = (*wrapper._buffers, backend._block_ids, backend._slots)
        places.append([tensor.data_ptr() for tensor in kept])
    assert places[0] == places[1] == places[2]


def test_torch_is_taken_where_flashinfer_cannot_be(monkeypatch):
    cache = torch.zeros(2, LAYERS, 2, KV_HEADS, BLOCK, DIM)
    layers = [AttentionLayer(0, 1.0)]
    kv_format = KVFormat("auto", torch.float32)
    assert isinstance(make_backend(cache, HEADS, layers, kv_format), TorchPagedAttention)
    with pytest.raises(ModelError, match="engine.attention: flashinfer.*not on a GPU"):
        make_backend(cache, HEADS, layers, kv_format, "flashinfer")
    monkeypatch.setattr(flashinfer_paged, "why_not", lambda *a: "")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ModelError, match=r"flashinfer.*not installed: pip install"):
        make_backend(cache, HEADS, layers, kv_format, "flashinfer")
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    made = make_backend(cache, HEADS, layers, kv_format, "flashinfer")
    assert isinstance(made, FlashInferAttention)


@pytest.mark.parametrize(
    ("kv_format", "head_dim", "parts", "reason"),
    [
        (KVFormat("auto", torch.bfloat16), 128, 2, ""),
        (KVFormat("bf16", torch.bfloat16), 64, 2, ""),
        (KVFormat("bf16", torch.float16), 64, 2, "does not read blocks of kv_cache_dtype bf16"),
        (KVFormat("int8", torch.bfloat16), 128, 2, "does not read blocks of kv_cache_dtype int8"),
        (KVFormat("fp8_e4m3", torch.bfloat16, padding=12), 128, 2, ""),
        (KVFormat("fp8_e4m3", torch.bfloat16), 128, 2, "does not read blocks of kv_cache_dtype"),
        (KVFormat("auto", torch.float32), 128, 2, "does not compute in float32"),
        (KVFormat("auto", torch.bfloat16), 96, 2, "no kernels for a head dimension of 96"),
        (LatentFormat(KVFormat("auto", torch.bfloat16), 512), 576, 1, "latent attention"),
    ],
)
def test_what_flashinfer_cannot_read_has_a_reason(monkeypatch, kv_format, head_dim, parts, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    class OnGpu:  # all that `why_not` asks for
        device = torch.device("cuda", 0)
        dtype = getattr(kv_format, "part", kv_format).storage_dtype
        shape = (4, 1, parts, KV_HEADS, BLOCK, kv_format.row_size(head_dim))

    found = flashinfer_paged.why_not(OnGpu(), kv_format)
    assert reason in found and bool(found) == bool(reason)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "8.0" in flashinfer_paged.why_not(OnGpu(), KVFormat("auto", torch.bfloat16)) or reason
