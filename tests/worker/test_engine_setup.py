"""A worker's device and KV memory; a GPU's part by its arithmetic."""

import pytest
import torch

from core.config import EngineConfig, parse_config
from core.errors import ConfigError, ModelError
from core.model_files import ModelFiles
from core.types import Role
from core.worker_settings import WorkerSettings
from engine.model.load import load_model
from worker.engine_setup import (
    GpuMemory,
    block_bytes,
    blocks_in,
    choose_device,
    run_largest_step,
)


@pytest.fixture
def model(tiny_model_dir):
    torch.set_num_threads(1)
    return load_model(ModelFiles("tiny", tiny_model_dir, "safetensors"), "float32")


def test_device_is_the_gpu_that_is_seen_or_else_the_cpu(monkeypatch):
    for is_seen, wanted, device in (
        (True, "auto", "cuda"),
        (False, "auto", "cpu"),
        (True, "cpu", "cpu"),
        (True, "cuda", "cuda"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_seen=is_seen: is_seen)
        assert choose_device(EngineConfig(device=wanted)) == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="engine.device: cuda.*GPU: 1"):
        choose_device(EngineConfig(device="cuda"))


def test_kv_budget_counts_others_and_the_step_as_used():
    gigabyte = 10**9
    # 80 GB, of which others hold 5 and CUDA 1; torch has reserved 20 and needed 18 at most.
    memory = GpuMemory(
        total=80 * gigabyte, free=54 * gigabyte, reserved=20 * gigabyte, peak=18 * gigabyte
    )
    assert memory.kv_budget(0.9, 0) == (72 - 6 - 18) * gigabyte
    assert memory.kv_budget(0.9, gigabyte) == (72 - 6 - 18 - 1) * gigabyte
    assert memory.kv_budget(0.3, 0) == 0


def test_blocks_are_what_memory_holds_and_sequences_can_use(model):
    config = EngineConfig(block_size=16, max_num_seqs=2, max_model_len=512)
    size = block_bytes(model, config)
    assert size == 2 * 2 * 2 * 16 * 16 * 4  # layers, key and value, heads, tokens, dim, bytes
    assert blocks_in(40 * size + size - 1, model, config) == 40
    assert blocks_in(10_000 * size, model, config) == 2 * 32
    for too_little in (15 * size, 0, -5 * size):
        with pytest.raises(ModelError, match="free memory, or set engine.max_model_len"):
            blocks_in(too_little, model, config)


def test_the_largest_step_has_as_many_tokens_as_the_limits_allow(model, monkeypatch):
    seen = []
    forward = model.forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a: seen.append(a) or forward(*a))
    config = EngineConfig(max_num_batched_tokens=1100, max_num_seqs=7, max_model_len=500)
    cache_bytes = run_largest_step(model, config, torch.device("cpu"))
    (ids, positions, batch, rows) = seen[0]
    assert batch.query_lens == batch.seq_lens == [500, 500, 100]
    assert len(ids) == len(positions) == 1100
    assert len(rows) == 7
    assert cache_bytes == (32 + 32 + 7) * block_bytes(model, config)
    with pytest.raises(RuntimeError, match="bind a KV cache"):
        forward(*seen[0])


def test_a_worker_of_two_roles_is_built_for_the_larger_limits_of_both():
    config = parse_config(
        "model: m\npools:\n"
        "  prefill: {roles: [prefill, decode], engine: {max_num_batched_tokens: 512}}\n"
        "  decode: {engine: {max_num_batched_tokens: 64, max_num_seqs: 128}}\n"
    )
    both = WorkerSettings("worker-0", Role.PREFILL, config, roles=(Role.PREFILL, Role.DECODE))
    assert both.widest_engine.max_num_batched_tokens == 512
    assert both.widest_engine.max_num_seqs == 128
    assert both.may_decode
    one = WorkerSettings("prefill-0", Role.PREFILL, config)
    assert one.widest_engine == one.engine
    assert not one.may_decode
