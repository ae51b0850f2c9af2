"""`benchmarks/gpu.py` on a CPU: its arithmetic, and all of its code with a tiny shape."""

import argparse
import importlib.util
from pathlib import Path

import pytest
import torch

from engine.attention import flashinfer_paged
from engine.model.load import random_model
from support import fake_flashinfer

PATH = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def gpu():
    spec = importlib.util.spec_from_file_location("benchmarks_gpu", PATH)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_arithmetic_of_llama_3_8b(gpu):
    values = gpu.SHAPES["llama-3-8b"]
    # 8.03e9 parameters, without the embedding table and the norms.
    embedding, norms = 128256 * 4096, 65 * 4096
    assert gpu.weight_numbers(values) == 8_030_261_248 - embedding - norms
    kv_bytes_per_token = 131072
    weights = 2 * gpu.weight_numbers(values)
    assert gpu.decode_bytes(values, 1, 0, 2) == weights + kv_bytes_per_token
    assert gpu.decode_bytes(values, 64, 1023, 2) == weights + 64 * 1024 * kv_bytes_per_token
    # One token: two operations a weight, and scores and values over one key.
    one = 2 * gpu.weight_numbers(values) + 4 * 32 * 4096
    assert gpu.prefill_flops(values, 1) == one
    layers = 2 * (gpu.weight_numbers(values) - embedding)
    attention = 4 * 32 * 4096 * (4096 * 4097 / 2)
    assert gpu.prefill_flops(values, 4096) == layers * 4096 + 2 * embedding + attention


def test_weights_are_those_that_the_model_has(gpu):
    values = gpu.SHAPES["tiny"]
    weights = random_model(values, "float32")._weights
    linears = [x for y in weights.layers for x in
               (y.attention.qkv, y.attention.o, y.mlp.gate_up, y.mlp.down)]  # fmt: skip
    numbers = sum(x.weight.numel() for x in (*linears, weights.head))
    assert numbers == gpu.weight_numbers(values)
    assert all(torch.isfinite(x.weight).all() and x.weight.std() > 0.01 for x in linears)


@pytest.mark.parametrize("has_graphs", [False, True])
def test_every_case_is_measured(gpu, monkeypatch, has_graphs):
    if has_graphs:
        monkeypatch.setattr(flashinfer_paged, "why_not", lambda *a: "")
        monkeypatch.setattr(flashinfer_paged, "load", lambda: fake_flashinfer)
    args = argparse.Namespace(
        shape="tiny", device="cpu", attention="flashinfer" if has_graphs else "auto",
        batches=[1, 3], context=9, prompt=20, steps=1, rounds=1,
    )  # fmt: skip
    limits, results = gpu.measure(args)
    assert limits.flops > 0 and limits.bandwidth > 0
    graphs = ["off", "on"] if has_graphs else ["off"]
    expected = [("prefill 20", "-")] + [(f"decode {n}", g) for n in (1, 3) for g in graphs]
    assert [(r.what, r.graphs) for r in results] == expected
    assert all(r.tokens_per_second > 0 and r.share_of_limit > 0 for r in results)
