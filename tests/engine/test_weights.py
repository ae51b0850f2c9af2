"""Loading safetensors: shards, tied heads, and refusals that name the tensor."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.model_files import ModelFiles
from engine.model import weights
from engine.model.host_memory import release_pages
from engine.model.load import fingerprint, load_model
from support.tiny_models import (
    PagedRunner,
    edit_config,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)

IDS = random_ids(12)


def logits_of(files: ModelFiles) -> torch.Tensor:
    return PagedRunner(load_model(files, "float32")).chunks(IDS, [len(IDS)])


def edit_weights(files: ModelFiles, *, drop: str = "", **added: torch.Tensor) -> None:
    path = files.path / "model.safetensors"
    tensors = {name: t for name, t in load_file(path).items() if name != drop}
    save_file({**tensors, **added}, path)


def test_shards_equal_one_file(tmp_path: Path) -> None:
    model = make_tiny("llama")
    single = save_tiny(model, tmp_path / "single")
    sharded = save_tiny(model, tmp_path / "sharded", max_shard_size="60KB")
    assert len(list(sharded.path.glob("*.safetensors"))) > 2
    assert torch.equal(logits_of(sharded), logits_of(single))


def test_pages_that_were_read_are_given_back_and_neighbours_stay(tmp_path: Path) -> None:
    """Once for each tensor; what is read again comes from the file again."""
    save_file({"a": torch.arange(5000.0), "b": torch.arange(7000.0)}, tmp_path / "m.safetensors")
    with weights._opened(tmp_path / "m.safetensors") as handle:
        first, second = handle.get_tensor("a"), handle.get_tensor("b")
        release_pages(first.data_ptr(), first.nbytes)
        assert torch.equal(second, torch.arange(7000.0))
        assert torch.equal(first, torch.arange(5000.0))


def test_a_tensor_that_comes_twice_is_named(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("gemma3"), tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    tensor = load_file(files.path / "model.safetensors")[name]
    edit_weights(files, **{f"language_model.{name}": tensor.clone()})
    with pytest.raises(ModelError, match=rf"given twice: language_model\.{name}, {name}"):
        load_model(files)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("has_head", [True, False])
def test_tied_and_untied_heads(tmp_path: Path, tied: bool, has_head: bool) -> None:
    model = make_tiny("llama", tie_word_embeddings=tied)
    files = save_tiny(model, tmp_path)
    head = torch.randn(128, 64) if tied else model.lm_head.weight.detach()
    edit_weights(files, drop="lm_head.weight", **({"lm_head.weight": head} if has_head else {}))
    if tied or has_head:  # a tied model's own lm_head is a leftover: transformers ties too
        torch.testing.assert_close(logits_of(files), reference_logits(model, IDS))
    else:
        with pytest.raises(ModelError, match="missing: lm_head.weight"):
            load_model(files)


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        "model.embed_tokens.weight",
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.bias",
    ],
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    files = save_tiny(make_tiny("llama-biases"), tmp_path)
    edit_weights(files, drop=name)
    with pytest.raises(ModelError, match=f"1 tensor is missing: {name}"):
        load_model(files)


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    edit_weights(files, **{"model.layers.0.self_attn.q_norm.weight": torch.ones(16)})
    with pytest.raises(ModelError, match="unexpected: model.layers.0.self_attn.q_norm.weight"):
        load_model(files)


def test_a_derived_buffer_is_ignored(tmp_path: Path) -> None:
    model = make_tiny("llama")
    files = save_tiny(model, tmp_path)
    edit_weights(files, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    torch.testing.assert_close(logits_of(files), reference_logits(model, IDS))


def test_a_tensor_of_another_shape_is_named(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    name = "model.layers.0.mlp.down_proj.weight"
    edit_weights(files, drop=name, **{name: torch.zeros(64, 95)})
    with pytest.raises(ModelError, match=f"{name} has shape .64, 95., expected .64, 96."):
        load_model(files)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("mixtral"), tmp_path)
    name = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    edit_weights(files, drop=name)
    with pytest.raises(ModelError, match=name):
        load_model(files)


@pytest.mark.parametrize("damage", ["cut", "empty", "config"])
def test_damaged_files_are_model_errors(tmp_path: Path, damage: str) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    path = tmp_path / ("config.json" if damage == "config" else "model.safetensors")
    data = path.read_bytes()
    path.write_bytes(b"" if damage == "empty" else data[: len(data) // 2])
    with pytest.raises(ModelError, match=path.name):
        load_model(files)


def test_progress_is_told_a_few_times(tmp_path: Path) -> None:
    told: list[str] = []
    load_model(save_tiny(make_tiny("llama"), tmp_path), progress=told.append)
    assert 2 <= len(told) <= 20
    assert told[-1] == "loading weights 100%"


def test_a_fingerprint_is_the_models_own(tmp_path: Path) -> None:
    one = save_tiny(make_tiny("llama", seed=1), tmp_path / "one")
    same = save_tiny(make_tiny("llama", seed=1), tmp_path / "same")
    other = save_tiny(make_tiny("llama", seed=2), tmp_path / "other")
    assert fingerprint(one) == fingerprint(same) != fingerprint(other)
    assert load_model(one).compatibility()["model"] == fingerprint(one)
    edit_config(same, transformers_version="1.2.3")
    assert fingerprint(one) == fingerprint(same)
    edit_config(same, rms_norm_eps=1e-3)
    assert fingerprint(one) != fingerprint(same)
