"""Loading never takes much more memory than the loaded weights, whatever the checkpoint holds."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from support.tiny_models import make_tiny, save_tiny, write_gguf

SCRIPT = Path(__file__).parents[1] / "support" / "loaded_memory.py"
HIDDEN, INNER, LAYERS, VOCAB, KV = 512, 1536, 28, 8192, 256
IN_LAYERS = LAYERS * HIDDEN * (2 * HIDDEN + 2 * KV + 3 * INNER)
ALL = IN_LAYERS + 2 * VOCAB * HIDDEN  # 96.5 million, 386 MB in float32
# One matrix of each shape, to widen quantised weights into (`native.WideScratch`).
WIDE = 2 * HIDDEN * (2 * INNER + INNER + HIDDEN + 2 * KV + HIDDEN)
HEAD = VOCAB * HIDDEN
BYTES = {
    ("bfloat16", "none"): 2 * ALL,
    ("float32", "none"): 4 * ALL,
    ("bfloat16", "int8"): IN_LAYERS + HEAD + 2 * HEAD + WIDE,
    ("bfloat16", "int4"): IN_LAYERS * 5 // 8 + HEAD + 2 * HEAD + WIDE,
}


@pytest.fixture(scope="module")
def model() -> Any:
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=KV * 8 // HIDDEN,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.1, 0.1)
    return model


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for path in tmp_path.rglob("*.*"):
        if path.is_file():
            path.unlink()  # pytest would keep them


def measured(folder: Path, *loads: tuple[Path, str, str]) -> list[dict[str, int]]:
    tiny = save_tiny(make_tiny("llama"), folder / "tiny")
    arguments = [str(item) for load in loads for item in load]
    result = subprocess.run(
        [sys.executable, str(SCRIPT), str(tiny.path), *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return [json.loads(line) for line in result.stdout.splitlines()]


def check(folder: Path, *loads: tuple[Path, str, str]) -> None:
    for (path, *how), taken in zip(loads, measured(folder, *loads), strict=True):
        weights = BYTES[how[0], how[1]]
        # Without AVX512 there is no scratch.
        assert 0.85 * weights < taken["rss"] < 1.08 * weights, (path, how, taken)
        limit = 1.2 * weights
        if path.suffix == ".gguf" and how[1] != "none":
            limit += 2 * 2 * HEAD  # dequantised whole, and copied, before it is quantised again
        assert taken["peak"] < limit, (path, how, taken)


def test_float32_on_disk_becomes_narrow_or_quantised_as_it_is_read(
    model: Any, folder: Path
) -> None:
    single = folder / "single"
    model.save_pretrained(single, max_shard_size="1GB")
    check(folder, (single, "bfloat16", "none"), (single, "bfloat16", "int4"))


@pytest.mark.slow
def test_every_kind_of_checkpoint(model: Any, folder: Path) -> None:
    single, sharded, narrow = folder / "single", folder / "sharded", folder / "narrow"
    model.save_pretrained(single, max_shard_size="1GB")
    model.save_pretrained(sharded, max_shard_size="50MB")
    gguf_files = [write_gguf(model, folder / f"{kind}.gguf", kind) for kind in ("Q8_0", "F16")]
    model.bfloat16().save_pretrained(narrow)
    model.float()
    check(
        folder,
        (sharded, "bfloat16", "none"),
        (single, "float32", "none"),
        (narrow, "bfloat16", "none"),
        (narrow, "bfloat16", "int8"),
        (sharded, "bfloat16", "int8"),
        (sharded, "bfloat16", "int4"),
        *((files.path, "bfloat16", "none") for files in gguf_files),
        *((files.path, "bfloat16", "int4") for files in gguf_files),
    )
