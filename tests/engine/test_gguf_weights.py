"""GGUF against transformers, on files written as llama.cpp's converter writes them."""

import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from core.errors import ModelError
from core.model_files import ModelFiles
from engine.model.gguf_deepseek import config_of
from engine.model.gguf_weights import GGUFSource, dequantize
from engine.model.load import fingerprint, load_model
from support.tiny_models import (
    YARN_ROPE,
    PagedRunner,
    make_tiny,
    random_ids,
    reference_logits,
    write_gguf,
)

IDS = random_ids(30)
FAMILIES = [
    "llama", "llama-linear", "llama3-rope", "mixtral", "qwen2", "qwen2-yarn", "qwen3",
    "qwen3-moe", "gemma2", "gemma3", "phi3", "phi3-longrope",
    "deepseek-v2-lite", "deepseek-v2", "deepseek-v3",
]  # fmt: skip
# What GGUF has no key for is left at what llama.cpp takes for granted.
OVERRIDES: dict[str, dict[str, object]] = {
    "gemma2": {"query_pre_attn_scalar": 24},
    "gemma3": {
        "query_pre_attn_scalar": 16,
        "num_hidden_layers": 7,
        "layer_types": None,  # every sixth layer has full attention
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "linear", "rope_theta": 20000.0, "factor": 8.0},
        },
    },
    "qwen3-moe": {"mlp_only_layers": []},
    "deepseek-v2": {"attention_bias": False},
    # One factor for both, as published.
    "deepseek-v3": {"rope_parameters": {**YARN_ROPE, "mscale": 0.9, "mscale_all_dim": 0.9}},
}


def check(model: object, files: ModelFiles) -> None:
    logits = PagedRunner(load_model(files, "float32")).chunks(IDS, [11, 13])
    torch.testing.assert_close(logits, reference_logits(model, IDS), atol=3e-4, rtol=1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_families(tmp_path: Path, name: str) -> None:
    model = make_tiny(name, **OVERRIDES.get(name, {}))
    check(model, write_gguf(model, tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
@pytest.mark.parametrize("tied", [True, False])
def test_quantizations(tmp_path: Path, kind: str, tied: bool) -> None:
    model = make_tiny("llama", tie_word_embeddings=tied)
    check(model, write_gguf(model, tmp_path / "tiny.gguf", kind))


@pytest.mark.parametrize(
    "kind", ["Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"]
)
def test_dequantize_equals_the_gguf_package(kind: str) -> None:
    qtype = gguf.GGMLQuantizationType[kind]
    block_size, type_size = gguf.GGML_QUANT_SIZES[qtype]
    data = np.random.default_rng(0).integers(0, 256, (40, 2 * type_size), dtype=np.uint8)
    with np.errstate(all="ignore"):  # some of the random scales are infinite or no number
        expected = torch.from_numpy(gguf.dequantize(data, qtype))
        values = dequantize(data, qtype)
    assert values.shape == (40, 2 * block_size)
    torch.testing.assert_close(values, expected, equal_nan=True, rtol=0, atol=0)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "mamba")
    writer.add_block_count(1)
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write()
    writer.close()
    with pytest.raises(ModelError, match="mamba"):
        GGUFSource(tmp_path / "x.gguf")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    model = make_tiny("llama")
    del model.model.layers[1].mlp.down_proj
    with pytest.raises(ModelError, match="missing: model.layers.1.mlp.down_proj.weight"):
        load_model(write_gguf(model, tmp_path / "tiny.gguf"))


@pytest.mark.parametrize("part", ["attn_k_b", "attn_v_b"])
def test_half_of_a_split_matrix_is_not_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    write = gguf.GGUFWriter.add_tensor

    def without(self: object, name: str, *args: object, **kwargs: object) -> None:
        if name != f"blk.1.{part}.weight":
            write(self, name, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", without)
    files = write_gguf(make_tiny("deepseek-v2-lite"), tmp_path / "tiny.gguf")
    with pytest.raises(
        ModelError, match=r"missing: model\.layers\.1\.self_attn\.kv_b_proj\.weight"
    ):
        load_model(files)


# DeepSeek-V2, as files have it that were written before kv_b_proj was split.
EARLY = {
    "expert_count": 160,
    "attention.key_length": 192,
    "attention.value_length": 128,
    "rope.dimension_count": 64,
}


def test_early_deepseek_files_say_less() -> None:
    config = config_of(EARLY)
    assert (config["qk_nope_head_dim"], config["v_head_dim"]) == (128, 128)
    assert (config["n_group"], config["topk_group"]) == (8, 3)
    assert (config["model_type"], config["topk_method"]) == ("deepseek_v2", "group_limited_greedy")
    v3 = config_of({**EARLY, "expert_count": 256, "expert_gating_func": 2})
    assert (v3["model_type"], v3["n_group"], v3["topk_group"]) == ("deepseek_v3", 8, 4)
    assert "n_group" not in config_of({**EARLY, "expert_count": 64})


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"expert_gating_func": 3}, "expert_gating_func 3"), ({"rope.dimension_count": "x"}, "rope")],
)
def test_deepseek_metadata_that_is_not_known_is_named(changes: dict, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        config_of({**EARLY, **changes})


def test_a_truncated_file_is_a_model_error(tmp_path: Path) -> None:
    files = write_gguf(make_tiny("llama"), tmp_path / "tiny.gguf")
    files.path.write_bytes(files.path.read_bytes()[:-5000])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        load_model(files)


def test_a_fingerprint_sees_the_weights(tmp_path: Path) -> None:
    one = write_gguf(make_tiny("llama", seed=1), tmp_path / "one.gguf")
    same = write_gguf(make_tiny("llama", seed=1), tmp_path / "same.gguf")
    other = write_gguf(make_tiny("llama", seed=2), tmp_path / "other.gguf")
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)


@pytest.mark.skipif("PDSERVE_TEST_GGUF" not in os.environ, reason="names no real .gguf file")
def test_a_real_file_loads(tmp_path: Path) -> None:
    path = Path(os.environ["PDSERVE_TEST_GGUF"])
    model = load_model(ModelFiles("real", path, "gguf"))
    logits = PagedRunner(model).chunks([1, 2, 3, 4, 5], [3])
    assert torch.isfinite(logits).all()
