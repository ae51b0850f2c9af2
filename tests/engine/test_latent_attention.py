"""DeepSeek's latent attention and grouped experts: what is cached, and what the engine makes of it.

Logits of whole prompts, chunks and decodes are compared in test_model_families.py."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import IncompatiblePeerError, ModelError
from core.model_files import ModelFiles
from engine.attention.kv_format import KVFormat, LatentFormat
from engine.model.config import parse_config
from engine.model.load import load_model
from kv_transfer.compatibility import check
from support.tiny_models import (
    PagedRunner,
    edit_config,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)

RANK, ROPE = 32, 8
# deepseek-ai/DeepSeek-V3 and DeepSeek-V2-Lite, what their config.json says of shapes.
V3 = {
    "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 7168, "head_dim": None,
    "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61,
    "num_attention_heads": 128, "num_key_value_heads": 128, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": 1536,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 1, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
    "rope_theta": 10000, "tie_word_embeddings": False, "hidden_act": "silu",
    "rope_scaling": {
        "type": "yarn", "factor": 40, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip
V2_LITE = {
    **V3, "model_type": "deepseek_v2", "vocab_size": 102400, "hidden_size": 2048,
    "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_hidden_layers": 27,
    "num_attention_heads": 16, "num_key_value_heads": 16, "n_routed_experts": 64,
    "n_shared_experts": 2, "num_experts_per_tok": 6, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "q_lora_rank": None, "norm_topk_prob": False,
    "routed_scaling_factor": 1.0, "scoring_func": "softmax", "topk_method": "greedy",
    "num_nextn_predict_layers": None,
    "rope_scaling": {**V3["rope_scaling"], "mscale": 0.707, "mscale_all_dim": 0.707},
}  # fmt: skip


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ModelFiles]:
    model = make_tiny("deepseek-v3")
    return model, save_tiny(model, tmp_path_factory.mktemp("deepseek"))


# ---------------------------------------------------------------- what is cached


@pytest.mark.parametrize(("name", "row"), [("auto", 40), ("int8", 48), ("fp8_e4m3", 48)])
def test_a_block_holds_one_row_a_token(tiny: Any, name: Any, row: int) -> None:
    """The latent and the shared key, quantised with a float32 scale each; no heads, no values."""
    model = load_model(tiny[1], "float32", kv_cache_dtype=name)
    assert model.kv_block_shape(16) == (3, 1, 1, 16, row)
    PagedRunner(model).step({"a": random_ids(5)})


@pytest.mark.parametrize("name", ["int8", "fp8_e4m3", "bf16"])
def test_the_shared_key_and_the_latent_have_a_scale_each(name: Any) -> None:
    part = KVFormat(name, torch.float32)
    latent_format = LatentFormat(part, RANK)
    x = torch.randn(5, 1, RANK + ROPE, generator=torch.Generator().manual_seed(0))
    x[..., RANK:] *= 1000
    rows = latent_format.encode(x)
    assert rows.shape[-1] == latent_format.row_size(RANK + ROPE)
    assert latent_format.head_dim(rows.shape[-1]) == RANK + ROPE
    back = latent_format.decode(rows)
    for at in (slice(0, RANK), slice(RANK, None)):
        assert torch.equal(back[..., at], part.decode(part.encode(x[..., at])))


def test_another_layout_of_a_row_is_refused(tiny: Any) -> None:
    ours = load_model(tiny[1], "float32").compatibility()
    assert (ours["kv_row"], ours["num_kv_heads"], ours["head_dim"]) == ("latent 32", "1", "40")
    with pytest.raises(IncompatiblePeerError, match="kv_row"):
        check(ours, {**ours, "kv_row": "key and value"})


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights_keep_the_distributions(tiny: Any, quantization: Any) -> None:
    reference, files = tiny
    ids = random_ids(40)
    model = load_model(files, "float32", quantization=quantization)
    ours = PagedRunner(model).chunks(ids, [30]).log_softmax(-1)
    plain = reference_logits(reference, ids).log_softmax(-1)
    kl = (plain.exp() * (plain - ours)).sum(-1).mean()
    assert 0 < kl < {"int8": 0.01, "int4": 0.3}[quantization]


# ---------------------------------------------------------------- configs


def test_published_configs() -> None:
    v3, lite = parse_config(V3), parse_config(V2_LITE)
    assert (v3.num_kv_heads, v3.head_dim, v3.max_model_len) == (1, 576, 163840)
    assert [layer.has_experts for layer in v3.layers] == [False] * 3 + [True] * 58
    # softmax_scale of the published code: 192 ** -0.5 * (0.1 * ln(40) + 1) ** 2
    assert v3.attention_scale == pytest.approx(0.135234, rel=1e-4)
    assert lite.attention_scale == pytest.approx(0.114721, rel=1e-4)
    assert (lite.latent.q_lora_rank, lite.moe.num_groups) == (None, 1)
    assert v3.moe.has_correction_bias and not lite.moe.has_correction_bias
    assert (v3.moe.shared_intermediate_size, lite.moe.shared_intermediate_size) == (2048, 2816)
    sparse = parse_config({**V2_LITE, "moe_layer_freq": 4})
    assert [i for i in range(27) if sparse.layers[i].has_experts] == [4, 8, 12, 16, 20, 24]


@pytest.mark.parametrize(
    ("base", "changes", "named"),
    [
        (V3, {"topk_method": "soft_choice"}, "soft_choice"),
        (V3, {"scoring_func": "softmax"}, "noaux_tc.*softmax"),
        (V2_LITE, {"norm_topk_prob": True}, "norm_topk_prob"),
        (V3, {"n_group": 7}, "256 experts cannot come from 4 of 7 groups"),
        (V3, {"topk_group": 9}, "from 9 of 8 groups"),
        (V3, {"n_group": 256, "topk_group": 4}, "8 of 256 experts"),
        (V2_LITE, {"num_experts_per_tok": None}, "num_experts_per_tok"),
        (V3, {"quantization_config": {"quant_method": "fp8"}}, "fp8"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    base: dict[str, Any], changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config({**base, **changes})


# ---------------------------------------------------------------- checkpoints


def test_layers_for_guessing_tokens_are_left_out(tmp_path: Path) -> None:
    """V3's checkpoint has one more layer than the model; any other is still refused."""
    reference = make_tiny("deepseek-v3")
    files = save_tiny(reference, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {"model.layers.3.eh_proj.weight": torch.ones(2, 2)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    edit_config(files, num_nextn_predict_layers=1)
    ids = random_ids(9)
    logits = PagedRunner(load_model(files, "float32")).chunks(ids, [9])
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=2e-4, rtol=1e-4)
    extra = {"model.layers.4.eh_proj.weight": torch.ones(2, 2)}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"unexpected: model\.layers\.4\.eh_proj\.weight"):
        load_model(files)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.kv_b_proj.weight",
        "model.layers.1.self_attn.q_a_layernorm.weight",
        "model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.shared_experts.down_proj.weight",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    files = save_tiny(make_tiny("deepseek-v3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[name]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=f"1 tensor is missing: {name}"):
        load_model(files)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    model = make_tiny("deepseek-v2")
    ids = random_ids(8)
    logits = []
    for name, size in (("single", "1GB"), ("sharded", "100KB")):
        files = save_tiny(model, tmp_path / name, max_shard_size=size)
        logits.append(PagedRunner(load_model(files, "float32")).chunks(ids, [8]))
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 2
    assert torch.equal(*logits)
