"""What goes wrong in one family only: prefix hits, heads tied or not, the edge of a window, other
spellings of a config, and what is refused. Against transformers, in float32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelError
from core.model_files import ModelFiles
from engine.model.families import FAMILIES
from engine.model.load import load_model
from support.tiny_models import (
    FAMILY_CONFIGS,
    LONGROPE,
    PagedRunner,
    edit_config,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)

WINDOW = 8
WINDOWED = ["mistral", "qwen2-window", "gemma2", "gemma3", "phi3"]
# One of every architecture.
ARCHITECTURES = {settings[0].model_type: name for name, settings in FAMILY_CONFIGS.items()}


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(transformers model, files) of the family named by the parameter."""
    model = make_tiny(request.param)
    return model, save_tiny(model, tmp_path_factory.mktemp("tiny"))


def close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


def test_every_family_is_tried() -> None:
    assert set(ARCHITECTURES) == set(FAMILIES)


@pytest.mark.parametrize("pair", FAMILY_CONFIGS, indirect=True)
def test_a_prefix_hit_equals_a_miss(pair: Any) -> None:
    """A second sequence shares full blocks of the first and computes at least its last token:
    before and after the window, and the length that rope was made for."""
    reference, files = pair
    runner = PagedRunner(load_model(files, "float32"))
    ids = random_ids(40)
    runner.step({"first": ids})
    expected = reference_logits(reference, ids)
    for hit in (4, 8, 20, 39):  # 39: everything is cached, the last token is computed again
        runner.block_tables[f"hit{hit}"] = list(runner.block_tables["first"])
        runner.lengths[f"hit{hit}"] = hit
        close(runner.step({f"hit{hit}": ids[hit:]}), expected[hit:])


@pytest.mark.parametrize("family", ARCHITECTURES.values())
@pytest.mark.parametrize("tied", [True, False])
def test_heads_tied_or_not(tmp_path: Path, family: str, tied: bool) -> None:
    """V69: a tied head is the embedding; of one that is not tied, the checkpoint has it."""
    reference = make_tiny(family, tie_word_embeddings=tied)
    files = save_tiny(reference, tmp_path)
    ids = random_ids(20)  # past the length where transformers' longrope turns to long factors
    expected = reference_logits(reference, ids)
    close(PagedRunner(load_model(files, "float32")).chunks(ids, [20]), expected)
    drop(files, "lm_head.weight")
    if tied:
        close(PagedRunner(load_model(files, "float32")).chunks(ids, [20]), expected)
    else:
        with pytest.raises(ModelError, match=r"missing: lm_head\.weight"):
            load_model(files)


@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 1])
@pytest.mark.parametrize("pair", WINDOWED, indirect=True)
def test_at_the_edge_of_the_window(pair: Any, length: int) -> None:
    """V70: a prompt of that length, three tokens after it, and the same after a full hit."""
    reference, files = pair
    assert reference.config.sliding_window == WINDOW
    ids = random_ids(length + 3)
    expected = reference_logits(reference, ids)
    runner = PagedRunner(load_model(files, "float32"))
    close(runner.chunks(ids, [length]), expected)
    runner.block_tables["hit"] = list(runner.block_tables["seq0"])
    runner.lengths["hit"] = length - 1
    again = [runner.step({"hit": [token]}) for token in ids[length - 1 :]]
    close(torch.cat(again), expected[length - 1 :])


# ---------------------------------------------------------------- other spellings


def test_gemma3_as_published(tmp_path: Path) -> None:
    """Its own keys for both ropes and the pattern of windows, before transformers renamed them."""
    reference = make_tiny(
        "gemma3",
        num_hidden_layers=4,
        layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding")],
    )
    files = save_tiny(reference, tmp_path)
    edit_config(
        files,
        layer_types=None,
        rope_parameters=None,
        sliding_window_pattern=3,
        rope_theta=20000.0,
        rope_local_base_freq=500.0,
        rope_scaling={"rope_type": "linear", "factor": 8.0},
    )
    ids = random_ids(40)
    close(
        PagedRunner(load_model(files, "float32")).chunks(ids, [20]),
        reference_logits(reference, ids),
    )


@pytest.mark.parametrize("kind", ["su", "longrope", "yarn"])
def test_phi3_as_published(tmp_path: Path, kind: str) -> None:
    """longrope's older names, and its original length beside it."""
    reference = make_tiny("phi3-longrope")
    files = save_tiny(reference, tmp_path)
    factors = {f"{n}_factor": LONGROPE[f"{n}_factor"] for n in ("short", "long")}
    edit_config(
        files, rope_parameters=None, rope_theta=10000.0, rope_scaling={"type": kind, **factors}
    )
    ids = random_ids(40)
    close(
        PagedRunner(load_model(files, "float32")).chunks(ids, [20]),
        reference_logits(reference, ids),
    )


def test_deepseek_as_published(tmp_path: Path) -> None:
    """`rope_scaling` with a `type`, and how experts are chosen spelled out."""
    reference = make_tiny("deepseek-v3")
    files = save_tiny(reference, tmp_path)
    yarn = dict(reference.config.rope_parameters)
    theta, kind = yarn.pop("rope_theta"), yarn.pop("rope_type")
    edit_config(
        files,
        rope_parameters=None,
        rope_theta=theta,
        rope_scaling={"type": kind, "beta_fast": 32, "beta_slow": 1, **yarn},
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
    )
    ids = random_ids(40)
    close(
        PagedRunner(load_model(files, "float32")).chunks(ids, [20]),
        reference_logits(reference, ids),
    )


def test_every_second_layer_with_experts(tmp_path: Path) -> None:
    reference = make_tiny("qwen3-moe", decoder_sparse_step=2, mlp_only_layers=[])
    files = save_tiny(reference, tmp_path)
    ids = random_ids(12)
    close(
        PagedRunner(load_model(files, "float32")).chunks(ids, [12]),
        reference_logits(reference, ids),
    )


# ---------------------------------------------------------------- refusals


def drop(files: ModelFiles, name: str) -> None:
    path = files.path / "model.safetensors"
    save_file({n: t for n, t in load_file(path).items() if n != name}, path)


@pytest.mark.parametrize("family", ARCHITECTURES.values())
def test_a_missing_tensor_is_named_in_every_family(tmp_path: Path, family: str) -> None:
    files = save_tiny(make_tiny(family), tmp_path)
    names = sorted(load_file(tmp_path / "model.safetensors"))
    name = names[len(names) // 2]  # of the middle layer
    drop(files, name)
    with pytest.raises(ModelError, match=f"1 tensor is missing: {name}"):
        load_model(files)


@pytest.mark.parametrize("family", ARCHITECTURES.values())
def test_an_unknown_rope_type_is_refused_in_every_family(tmp_path: Path, family: str) -> None:
    files = save_tiny(make_tiny(family), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    rope = config["rope_parameters"]
    spiral = {"rope_type": "spiral", "rope_theta": 1e4}
    if "full_attention" in rope:
        spiral = {**rope, "full_attention": spiral}
    edit_config(files, rope_parameters=spiral)
    with pytest.raises(ModelError, match="spiral"):
        load_model(files)
