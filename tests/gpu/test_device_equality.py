"""The same model on CPU and GPU: float32 with torch's attention against the CPU's answers, and
bfloat16 through FlashInfer within the bounds of its precision."""

import pytest
import torch

from core.config import EngineConfig
from engine.attention import flashinfer_paged
from engine.attention.base import StepBatch
from engine.cuda_graphs import DecodeGraphs
from engine.engine import Engine
from engine.model.load import load_model
from support.mock_model import make_request, run_to_end
from support.tiny_models import make_tiny, random_ids, save_tiny

BLOCK, NUM_BLOCKS = 16, 64
FAMILIES = ("llama", "mistral", "qwen3", "gemma2", "gemma3", "mixtral", "deepseek-v3")
HEAD_DIM = {"head_dim": 64}  # one that FlashInfer has kernels for
needs_flashinfer = pytest.mark.skipif(
    flashinfer_paged.load() is None, reason="needs flashinfer: pip install 'pdserve[gpu]'"
)


@pytest.fixture(autouse=True)
def float32_is_float32():
    """Not TF32, which has 10 bits of mantissa."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def all_logits(model, device, token_ids, chunks) -> torch.Tensor:
    """Of every position, the prompt cut into `chunks`; on the CPU."""
    shape = (NUM_BLOCKS, *model.kv_block_shape(BLOCK))
    model.bind(torch.zeros(shape, dtype=model.kv_dtype, device=device))
    table = list(range(NUM_BLOCKS - 1, -1, -1))
    out, start = [], 0
    for length in chunks:
        end = start + length
        ids = torch.tensor(token_ids[start:end], device=device)
        positions = torch.arange(start, end, device=device)
        batch = StepBatch([length], [end], [table], int(length == 1))
        rows = torch.arange(length, device=device)
        out.append(model.forward(ids, positions, batch, rows).float().cpu())
        start = end
    return torch.cat(out)


CHUNKS = (21, 16, 1, 1, 30, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_float32_logits_are_those_of_the_cpu(family, device, tmp_path):
    files = save_tiny(make_tiny(family), tmp_path)
    ids = random_ids(sum(CHUNKS))
    expected = all_logits(load_model(files, "float32"), torch.device("cpu"), ids, CHUNKS)
    model = load_model(files, "float32", device=str(device))
    torch.testing.assert_close(
        all_logits(model, device, ids, CHUNKS), expected, atol=2e-4, rtol=2e-4
    )


def tokens_of(model, device, requests, graphs=None, **config):
    config = EngineConfig(block_size=BLOCK, max_num_seqs=8, max_num_batched_tokens=48, **config)
    engine = Engine(model, config, NUM_BLOCKS, str(device), graphs=graphs)
    for request in requests:
        engine.add(request)
    return run_to_end(engine)


def some_requests(temperature=0.0):
    return [
        make_request(
            f"r{i}", random_ids(5 + 9 * i, i), max_tokens=20, temperature=temperature, seed=i
        )
        for i in range(6)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_float32_tokens_are_those_of_the_cpu(temperature, device, tmp_path):
    files = save_tiny(make_tiny("llama"), tmp_path)
    requests = some_requests(temperature)
    expected = tokens_of(load_model(files, "float32"), "cpu", requests)
    model = load_model(files, "float32", device=str(device))
    assert tokens_of(model, device, requests) == expected


@needs_flashinfer
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3", "gemma2", "gemma3", "mixtral"])
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_flashinfer_is_as_near_to_float32_as_torch_in_bfloat16(
    family, kv_cache_dtype, device, tmp_path
):
    files = save_tiny(make_tiny(family, **HEAD_DIM), tmp_path)
    ids = random_ids(sum(CHUNKS))
    exact = all_logits(load_model(files, "float32"), torch.device("cpu"), ids, CHUNKS)
    errors = {}
    for attention in ("torch", "flashinfer"):
        model = load_model(
            files,
            "bfloat16",
            device=str(device),
            kv_cache_dtype=kv_cache_dtype,
            attention=attention,
        )
        found = all_logits(model, device, ids, CHUNKS)
        errors[attention] = (found - exact).abs().mean() / exact.abs().mean()
    assert errors["torch"] < (0.05 if kv_cache_dtype == "auto" else 0.2)
    assert errors["flashinfer"] < 1.5 * errors["torch"] + 1e-3


@needs_flashinfer
def test_a_mixed_batch_through_flashinfer_equals_its_sequences_alone(device, tmp_path):
    files = save_tiny(make_tiny("llama", **HEAD_DIM), tmp_path)
    model = load_model(files, "bfloat16", device=str(device), attention="flashinfer")
    shape = (NUM_BLOCKS, *model.kv_block_shape(BLOCK))
    cache = torch.randn(shape, device=device).bfloat16()
    lens = [(1, 40), (1, 16), (20, 20), (7, 33)]
    tables = [list(range(i, NUM_BLOCKS, 4)) for i in range(4)]
    ids = random_ids(sum(q for q, _ in lens))

    def run(some):
        chosen = [lens[i] for i in some]
        starts = [sum(q for q, _ in lens[:i]) for i in some]
        tokens = [t for i, s in zip(some, starts, strict=True) for t in ids[s : s + lens[i][0]]]
        positions = [p for q, n in chosen for p in range(n - q, n)]
        model.bind(cache.clone())
        num_decodes = sum(q == 1 for q, _ in chosen)
        batch = StepBatch(
            [q for q, _ in chosen], [n for _, n in chosen], [tables[i] for i in some], num_decodes
        )
        rows = torch.arange(len(tokens), device=device)
        return model.forward(
            torch.tensor(tokens, device=device), torch.tensor(positions, device=device), batch, rows
        )

    alone = torch.cat([run([i]) for i in range(4)])
    torch.testing.assert_close(run(range(4)), alone, atol=0.15, rtol=0.05)


@needs_flashinfer
def test_graphs_on_and_off_are_equal(device, tmp_path):
    files = save_tiny(make_tiny("gemma2", **HEAD_DIM), tmp_path)
    model = load_model(files, "bfloat16", device=str(device), attention="flashinfer")
    off = tokens_of(model, device, some_requests())
    graphs = DecodeGraphs(model, 8, NUM_BLOCKS, NUM_BLOCKS, device)
    on = tokens_of(model, device, some_requests(), graphs)
    # Sums may be split otherwise for another batch size: a near tie may go the other way, and
    # what follows it differs. Nearly all tokens are the same.
    pairs = [(a, b) for r in off for a, b in zip(off[r], on[r], strict=True)]
    assert sum(a == b for a, b in pairs) >= 0.9 * len(pairs)
    # The same batch, padded and not: the same logits within rounding.
    batch = StepBatch([1] * 3, [17, 30, 5], [[1, 2], [3, 4], [5]], 3)
    ids, positions = (
        torch.tensor([5, 6, 7], device=device),
        torch.tensor([16, 29, 4], device=device),
    )
    expected = model.forward(ids, positions, batch, torch.arange(3, device=device)).clone()
    from engine.step import StepInputs

    with torch.inference_mode():
        found = graphs.run(StepInputs(batch, [5, 6, 7], [16, 29, 4], [0, 1, 2]))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.05)


@pytest.mark.parametrize("kv_cache_dtype", ["fp8_e4m3", "int8", "bf16"])
def test_a_quantised_kv_cache_has_the_cpus_bytes(kv_cache_dtype, device, tmp_path):
    files = save_tiny(make_tiny("llama"), tmp_path)
    ids = random_ids(sum(CHUNKS))
    logits = []
    for where in (torch.device("cpu"), device):
        model = load_model(files, "float32", device=str(where), kv_cache_dtype=kv_cache_dtype)
        logits.append(all_logits(model, where, ids, CHUNKS))
    # One step of a stored value may go the other way where the last bit of a key differs.
    assert (logits[1] - logits[0]).abs().mean() < 0.01 * logits[0].abs().mean()
    x = torch.randn(50, 64)
    kv_format = model._kv_format
    same = kv_format.encode(x.to(device)).cpu() == kv_format.encode(x)
    assert same.float().mean() > 0.99
