"""A worker's process never takes more than `engine.memory_budget`, and uses what it may."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.errors import ModelError
from core.model_files import ModelFiles
from core.types import Role
from core.worker_settings import WorkerSettings
from support.pair import tiny_config
from worker import memory_budget
from worker.engine_setup import build_engine

SCRIPT = Path(__file__).parents[1] / "support" / "budget_worker.py"
MB = 10**6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Few weights and much KV: 256 KiB for a block of 8 tokens in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=512,
    )
    path = tmp_path_factory.mktemp("much-kv")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def test_a_worker_under_load_stays_within_its_budget(folder: Path) -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder), str(300 * MB)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    seen: dict[str, int] = json.loads(result.stdout.splitlines()[-1])
    assert seen["num_tokens"] == 40 * 12
    assert seen["fewest_free"] == 0  # every block was written
    kv = seen["num_blocks"] * seen["block_bytes"]
    assert kv > 50 * MB
    assert seen["budget"] - 200 * MB < seen["peak"] < seen["budget"], seen


def settings_of(folder: Path, **engine: Any) -> WorkerSettings:
    config = tiny_config(folder, **engine)
    return WorkerSettings(worker_id="w", role=Role.COLOCATED, config=config)


def build(folder: Path, **engine: Any) -> Any:
    files = ModelFiles("much-kv", folder, "safetensors")
    return build_engine(files, settings_of(folder, **engine), lambda text: None)[0]


def test_what_does_not_fit_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ModelError, match="memory_budget: 400 MB hold neither the weights of much"):
        build(folder, memory_budget="400 MB")
    room = (memory_budget.resident_bytes() + 500 * MB) // MB
    with pytest.raises(ModelError, match="num_kv_blocks: 9000 do not fit into engine.memory_bud"):
        build(folder, memory_budget=f"{room} MB", num_kv_blocks=9000)
    assert build(folder, memory_budget=f"{room} MB", num_kv_blocks=9).kv_cache.shape[0] == 9
