"""The compiled operations against torch's, and everything without them."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from engine import native
from engine.attention.base import AttentionLayer, StepBatch
from engine.attention.torch_paged import TorchPagedAttention
from engine.model.layers import Linear, Norm, can_pack, packed
from engine.model.load import load_model
from engine.model.quantised import Quantization, quantised
from support.tiny_models import PagedRunner, make_tiny, random_ids, save_tiny

needs_native = pytest.mark.skipif(native.library() is None, reason="no compiler or no AVX512-BF16")


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@needs_native
@pytest.mark.parametrize("rows", [1, 3, 4, 7, native.MAX_ROWS, native.MAX_ROWS + 1])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", [(64, 2), (192, 96), (960, 576)])
def test_linear_equals_torch(shape: tuple[int, int], has_bias: bool, rows: int) -> None:
    linear = Linear(randn(*shape), randn(shape[0], seed=1) if has_bias else None)
    x = randn(rows, 2 * shape[1], seed=2)[:, ::2]
    expected = F.linear(
        x.float(), linear.weight.float(), None if linear.bias is None else linear.bias.float()
    )
    out = packed(linear)(x)
    assert out.dtype == torch.bfloat16
    # One rounding to bfloat16 at the end.
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2**-8)


@needs_native
def test_real_shapes_take_the_native_product() -> None:
    assert packed(Linear(randn(960, 576))).tiles is not None


@needs_native
@pytest.mark.parametrize("rows", [1, 5, 31])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_linear_with_threads_that_share_a_tile(kind: str, rows: int) -> None:
    made = quantised(Linear(randn(192, 96), randn(192, seed=1)), kind, expects_many_rows=False)
    x = randn(rows, 96, seed=2)
    outs = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(made(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*outs)  # 3 tiles: the second thread starts in the middle of one


@pytest.mark.skipif(not can_pack(torch.bfloat16, torch.device("cpu")), reason="no bfloat16")
def test_a_shape_that_tiles_do_not_divide_is_left_to_torch() -> None:
    made = packed(Linear(randn(100, 64)))
    assert made.tiles is None
    x = randn(2, 64, seed=1)
    torch.testing.assert_close(
        made(x).float(), x.float() @ randn(100, 64).float().t(), atol=2e-2, rtol=2**-7
    )


@needs_native
@pytest.mark.parametrize("shape", [(1, 576), (5, 64), (3, 4, 16)])
def test_norm_equals_torch(shape: tuple[int, ...]) -> None:
    x, weight = randn(*shape) * 30, randn(shape[-1], seed=1)
    assert native.can_norm(x, weight)
    expected = F.rms_norm(x.float(), weight.shape, weight.float(), 1e-5)
    out = Norm(weight, 1e-5)(x)
    torch.testing.assert_close(out.float(), expected, atol=1e-3, rtol=2**-8)


@needs_native
def test_norm_leaves_to_torch_what_is_no_plain_row() -> None:
    weight = randn(16)
    assert not native.can_norm(randn(4, 32)[:, ::2], weight)
    assert not native.can_norm(randn(4, 16).float(), weight)
    assert not native.can_norm(randn(4, 8), randn(8))


FEW_ROWS = [
    ("llama", {"head_dim": 32}),
    ("llama-biases", {}),
    ("mistral", {"head_dim": 32}),
    ("qwen2-window", {"head_dim": 32}),
    ("qwen3", {"head_dim": 64}),
]


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(("name", "shape"), FEW_ROWS)
def test_all_layers_in_one_call_equal_torchs(
    name: str, shape: dict[str, int], quantization: Quantization, tmp_path: Path
) -> None:
    files = save_tiny(make_tiny(name, intermediate_size=128, **shape), tmp_path)
    ids, chunks = random_ids(80), [40, 1, 1, 4, 33, 1]  # few rows, then many, in turn
    model = load_model(files, "bfloat16", quantization=quantization)
    runner = PagedRunner(model)
    assert model.has_native_layers
    ours = runner.chunks(ids, chunks)
    with native.turned_off():
        model = load_model(files, "bfloat16", quantization=quantization)
        torchs = PagedRunner(model).chunks(ids, chunks)
    # Each rounds where the other does not; both are next to float32.
    torch.testing.assert_close(ours, torchs, atol=0.25, rtol=0.02)
    assert (ours - torchs).abs().mean() < 0.03


@needs_native
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize("threads", [1, 2])
def test_prompts_and_decoding_in_one_step_equal_torchs(
    threads: int, quantization: Quantization, tmp_path: Path
) -> None:
    shape = {"head_dim": 32, "intermediate_size": 128}
    files = save_tiny(make_tiny("qwen2-window", **shape), tmp_path)
    ids = random_ids(200, seed=2)
    # More than one block of rows, of lengths that no group divides; short chunks beside long ones.
    steps = [
        {"a": ids[:11], "b": ids[:70]},
        {"a": ids[11:12], "b": ids[70:71], "c": ids[:131], "d": ids[5:14], "e": ids[3:6]},
        {"a": ids[12:13], "c": ids[131:151], "d": ids[14:100]},
    ]
    before, outs = torch.get_num_threads(), []
    torch.set_num_threads(threads)
    try:
        for how in (nullcontext(), native.turned_off()):
            with how:
                model = load_model(files, "bfloat16", quantization=quantization)
                runner = PagedRunner(model, num_blocks=128)
                outs.append(torch.cat([runner.step(step) for step in steps]))
    finally:
        torch.set_num_threads(before)
    ours, torchs = outs
    torch.testing.assert_close(ours, torchs, atol=0.25, rtol=0.02)
    assert (ours - torchs).abs().mean() < 0.03


@needs_native
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["llama", "qwen2-window"])
def test_a_long_sequence_is_decoded_by_all_threads_as_by_one(
    name: str, threads: int, tmp_path: Path
) -> None:
    files = save_tiny(make_tiny(name, head_dim=32, intermediate_size=128), tmp_path)
    model, ids, steps = load_model(files, "bfloat16"), random_ids(400), [383, 1, 1, 1, 1, 13]
    before, outs = torch.get_num_threads(), []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            outs.append(PagedRunner(model, num_blocks=128).chunks(ids, steps)[383:387])
    finally:
        torch.set_num_threads(before)
    alone, together = outs
    torch.testing.assert_close(together, alone, atol=0.05, rtol=0.02)


@needs_native
def test_rows_without_logits_change_none(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama", head_dim=32, intermediate_size=128), tmp_path)
    model = load_model(files, "bfloat16")
    PagedRunner(model)
    ids = torch.tensor(random_ids(40))
    batch = StepBatch([40], [40], [list(range(10))], 0)
    every = model.forward(ids, torch.arange(40), batch, torch.arange(40))
    some = model.forward(ids, torch.arange(40), batch, torch.tensor([39, 3]))
    torch.testing.assert_close(some, every[[39, 3]], atol=0.05, rtol=0.02)
    none = model.forward(ids, torch.arange(40), batch, torch.arange(0))
    assert len(none) == 0


@needs_native
@pytest.mark.parametrize("head", ["as it is", "all the same", "some the same"])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_maxima_are_those_of_the_logits(threads: int, head: str, tmp_path: Path) -> None:
    """Found on the way; ties go to the lower id, whoever made it, and NaN is never overlooked."""
    config = {"head_dim": 32, "intermediate_size": 128, "vocab_size": 448}
    tiny = make_tiny("llama", **config)
    with torch.no_grad():
        weight = tiny.lm_head.weight
        if head == "all the same":
            weight.copy_(weight[:1].expand_as(weight))
        elif head == "some the same":  # by 3 threads made in different parts
            weight.copy_(weight[torch.arange(len(weight)) % 7])
        tiny.model.embed_tokens.weight[7] = torch.nan
    model = load_model(save_tiny(tiny, tmp_path), "bfloat16")
    runner = PagedRunner(model, num_blocks=256)
    assert model.has_native_layers
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for rows in (1, 5, native.MAX_ROWS, 100):  # few, and many
            ids = [token for token in random_ids(2 * rows, seed=rows) if token != 7][: rows - 1]
            work = {f"{rows} {i}": [token] for i, token in enumerate([*ids, 7])}
            logits = runner.step(work).numpy()  # NaN in the last row
            assert model.maxima is not None and logits.shape == (rows, 448)
            best, places = (found.numpy() for found in model.maxima)
            assert places.tolist() == logits.argmax(-1).tolist()
            np.testing.assert_array_equal(best, logits[np.arange(rows), places])
            assert np.isnan(best).tolist() == [False] * (rows - 1) + [True]
            assert head != "all the same" or set(places.tolist()) == {0}
            assert head != "some the same" or set(places.tolist()) <= set(range(7))
    finally:
        torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize("name", ["gemma2", "gemma3", "mixtral", "deepseek-v2"])
def test_what_it_does_not_know_is_left_to_torch(name: str, tmp_path: Path) -> None:
    files = save_tiny(make_tiny(name), tmp_path)
    model = load_model(files, "bfloat16")
    runner = PagedRunner(model)
    assert not model.has_native_layers
    assert torch.isfinite(runner.chunks(random_ids(5), [3])).all()


def test_without_it_a_model_gives_the_same_logits(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    ids = random_ids(20)
    ours = PagedRunner(load_model(files, "bfloat16")).chunks(ids, [12])
    with native.turned_off():
        torchs = PagedRunner(load_model(files, "bfloat16")).chunks(ids, [12])
    torch.testing.assert_close(ours, torchs, atol=0.1, rtol=0.02)


def test_a_broken_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    assert native._library.__wrapped__() is None
    assert not list(tmp_path.rglob("*.so"))


def test_it_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PDSERVE_NATIVE", "0")
    assert native._library.__wrapped__() is None


@needs_native
@pytest.mark.parametrize("lens", [[1], [4], [250, 3, 17, 1], [5, 5, 5]])
@pytest.mark.parametrize("window", [None, 4, 6])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 32), (4, 4, 64), (9, 3, 64), (5, 1, 128), (2, 1, 96)]
)
def test_decode_attention_equals_torchs(
    lens: list[int],
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
) -> None:
    size = 4
    counts = [-(-n // size) for n in lens]
    ids = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(3)).tolist()
    tables = [[ids.pop() for _ in range(count)] for count in counts]
    cache = randn(sum(counts) + 3, 3, 2, kv_heads, size, dim)
    batch = StepBatch([1] * len(lens), lens, tables, len(lens))
    both = randn(len(lens), heads + kv_heads, dim, seed=1)  # query and key are views of one
    value = randn(len(lens), kv_heads, dim, seed=2)
    outs = []
    for how in (nullcontext(), native.turned_off()):
        with how:
            backend = TorchPagedAttention(cache.clone(), heads)
            backend.plan(batch)
            layer = AttentionLayer(1, 0.3, window)
            outs.append(backend.forward(layer, both[:, :heads], both[:, heads:], value))
    torch.testing.assert_close(outs[0].float(), outs[1].float(), atol=2e-2, rtol=2**-6)


@needs_native
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(6, 2, 32), (9, 3, 64), (4, 4, 128), (7, 1, 96), (40, 1, 32)]
)
@pytest.mark.parametrize("window", [None, 4, 70])
@pytest.mark.parametrize(("prefix", "tokens"), [(0, 1), (0, 37), (3, 130), (100, 64), (61, 5)])
def test_chunk_attention_equals_the_definition(
    prefix: int, tokens: int, window: int | None, heads: int, kv_heads: int, dim: int
) -> None:
    check_chunk_attention(prefix, tokens, window, heads, kv_heads, dim)


@needs_native
@pytest.mark.parametrize("window", [None, 70])
def test_chunk_attention_whose_scores_grow_with_each_piece(window: int | None) -> None:
    """The weights of later keys are beyond float32's range, seen from the first ones."""
    check_chunk_attention(60, 200, window, 6, 2, 64, growth=0.3)


def check_chunk_attention(
    prefix: int,
    tokens: int,
    window: int | None,
    heads: int,
    kv_heads: int,
    dim: int,
    growth: float = 0,
) -> None:
    size, length = 8, prefix + tokens
    blocks = -(-length // size)
    table = torch.randperm(blocks + 2, generator=torch.Generator().manual_seed(3))[:blocks]
    cache = randn(blocks + 2, 2, 2, kv_heads, size, dim)
    at = torch.arange(blocks * size).view(blocks, 1, size, 1)
    cache[table, 1, 0] *= (1 + growth * at).to(cache.dtype)
    query = randn(tokens, heads + 1, dim, seed=1)[:, 1:]
    out = torch.empty(tokens, heads, dim, dtype=torch.bfloat16)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        native.chunk_attention(query, native.LayerCache(cache, 1), table, prefix, window, 0.2, out)
    finally:
        torch.set_num_threads(before)
    # [2, kv_heads, length, dim]
    keys, values = cache[table, 1].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length].float()
    grouped = query.float().unflatten(1, (kv_heads, -1))
    scores = torch.einsum("thgd,hkd->hgtk", grouped, keys) * 0.2
    at = torch.arange(prefix, length).unsqueeze(1)
    seen = torch.arange(length) <= at
    if window is not None:
        seen &= torch.arange(length) > at - window
    weights = torch.softmax(scores.masked_fill(~seen, -torch.inf), -1)
    expected = torch.einsum("hgtk,hkd->thgd", weights, values).flatten(1, 2)
    torch.testing.assert_close(out.float(), expected, atol=2e-2, rtol=2**-6)
