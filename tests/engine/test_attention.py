"""The paged backend against attention written out position by position."""

import math
import random

import pytest
import torch

from engine.attention import torch_paged
from engine.attention.base import AttentionLayer, StepBatch
from engine.attention.torch_paged import TorchPagedAttention

LAYERS, HEADS, KV_HEADS, BLOCK, DIM = 3, 6, 2, 4, 8
SCALE = 0.3
BATCHES = {
    # (query_len, seq_len) of each sequence and the number of decodes.
    "one decode": ([(1, 1)], 1),
    "decodes of one length": ([(1, 9), (1, 9), (1, 9)], 3),
    "decodes": ([(1, 5), (1, 30), (1, 2), (1, 17), (1, 250)], 5),
    "a prompt": ([(13, 13)], 0),
    "a chunk at a block edge": ([(8, 12)], 0),
    "a chunk inside a block": ([(7, 13)], 0),
    "a long chunk": ([(300, 310)], 0),
    "prompts": ([(5, 5), (9, 21), (1, 1)], 0),
    "everything": ([(1, 7), (1, 40), (6, 6), (140, 180), (1, 12)], 2),
}


def attend_written_out(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layer: AttentionLayer
) -> torch.Tensor:
    """query `[heads, dim]` at the last of the positions of keys `[S, kv_heads, dim]`."""
    out = torch.empty_like(query)
    first = max(0, len(keys) - layer.sliding_window) if layer.sliding_window else 0
    for head in range(HEADS):
        kv_head = head // (HEADS // KV_HEADS)
        scores = keys[first:, kv_head] @ query[head] * layer.scale
        if layer.logit_softcap is not None:
            scores = torch.tanh(scores / layer.logit_softcap) * layer.logit_softcap
        out[head] = torch.softmax(scores, 0) @ values[first:, kv_head]
    return out


class Case:
    """Sequences with random KV in scattered blocks, all but this step's tokens cached."""

    def __init__(self, lens: list[tuple[int, int]], num_decodes: int, layer: int) -> None:
        torch.manual_seed(0)
        num_blocks = sum(-(-seq_len // BLOCK) for _, seq_len in lens) + 3
        ids = random.Random(0).sample(range(num_blocks), num_blocks)
        self.cache = torch.randn(num_blocks, LAYERS, 2, KV_HEADS, BLOCK, DIM)
        self.keys = [torch.randn(seq_len, KV_HEADS, DIM) for _, seq_len in lens]
        self.values = [torch.randn(seq_len, KV_HEADS, DIM) for _, seq_len in lens]
        self.tables = [[ids.pop() for _ in range(-(-seq_len // BLOCK))] for _, seq_len in lens]
        self.lens, self.layer = lens, layer
        self.batch = StepBatch([q for q, _ in lens], [s for _, s in lens], self.tables, num_decodes)
        self.query = torch.randn(sum(self.batch.query_lens), HEADS, DIM)
        self.write(self.cache, [s - q for q, s in lens])

    def write(self, cache: torch.Tensor, lens: list[int]) -> None:
        """Stores the first `lens[i]` positions of every sequence i."""
        for i, table in enumerate(self.tables):
            for p in range(lens[i]):
                cache[table[p // BLOCK], self.layer, 0, :, p % BLOCK] = self.keys[i][p]
                cache[table[p // BLOCK], self.layer, 1, :, p % BLOCK] = self.values[i][p]

    def new(self, all_tokens: list[torch.Tensor]) -> torch.Tensor:
        pairs = zip(all_tokens, self.lens, strict=True)
        return torch.cat([tokens[s - q :] for tokens, (q, s) in pairs])

    def expected(self, layer: AttentionLayer) -> torch.Tensor:
        rows = iter(self.query)
        return torch.stack(
            [
                attend_written_out(
                    next(rows), self.keys[i][: p + 1], self.values[i][: p + 1], layer
                )
                for i, (q, s) in enumerate(self.lens)
                for p in range(s - q, s)
            ]
        )


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("window", [None, 1, 7, 8, 150])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_equals_attention_written_out(name: str, window: int | None, softcap: float | None) -> None:
    lens, num_decodes = BATCHES[name]
    case = Case(lens, num_decodes, layer=1)
    layer = AttentionLayer(1, SCALE, window, softcap)
    backend = TorchPagedAttention(case.cache, HEADS)
    backend.plan(case.batch)
    out = backend.forward(layer, case.query, case.new(case.keys), case.new(case.values))
    torch.testing.assert_close(out, case.expected(layer), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("fused_up_to", [0, 10**9])
def test_both_ways_to_decode_are_equal(monkeypatch: pytest.MonkeyPatch, fused_up_to: int) -> None:
    monkeypatch.setattr(torch_paged, "_FUSED_DECODE_KEYS", fused_up_to)
    case = Case([(1, 5), (1, 8), (1, 6), (1, 31)], 4, layer=0)
    layer = AttentionLayer(0, SCALE)
    backend = TorchPagedAttention(case.cache, HEADS)
    backend.plan(case.batch)
    out = backend.forward(layer, case.query, case.new(case.keys), case.new(case.values))
    torch.testing.assert_close(out, case.expected(layer), atol=1e-5, rtol=1e-5)


def test_writes_its_own_slots_and_no_other() -> None:
    lens, num_decodes = BATCHES["everything"]
    case = Case(lens, num_decodes, layer=2)
    wanted = case.cache.clone()
    case.write(wanted, [seq_len for _, seq_len in lens])
    backend = TorchPagedAttention(case.cache, HEADS)
    backend.plan(case.batch)
    backend.forward(
        AttentionLayer(2, SCALE), case.query, case.new(case.keys), case.new(case.values)
    )
    assert torch.equal(case.cache, wanted)


def test_one_plan_serves_layers_with_different_windows() -> None:
    lens, num_decodes = BATCHES["everything"]
    case = Case(lens, num_decodes, layer=1)
    backend = TorchPagedAttention(case.cache, HEADS)
    backend.plan(case.batch)
    for window in (None, 5, None, 9):
        layer = AttentionLayer(1, SCALE, window)
        out = backend.forward(layer, case.query, case.new(case.keys), case.new(case.values))
        torch.testing.assert_close(out, case.expected(layer), atol=1e-5, rtol=1e-5)


def test_bfloat16_is_close() -> None:
    lens, num_decodes = BATCHES["everything"]
    case = Case(lens, num_decodes, layer=1)
    layer = AttentionLayer(1, 1 / math.sqrt(DIM))
    backend = TorchPagedAttention(case.cache.bfloat16(), HEADS)
    backend.plan(case.batch)
    tensors = (case.query, case.new(case.keys), case.new(case.values))
    out = backend.forward(layer, *(t.bfloat16() for t in tensors))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), case.expected(layer), atol=0.05, rtol=0.05)
