"""Every family's logits against transformers, in float32, on tiny random weights."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.errors import ModelError
from engine.attention.base import StepBatch
from engine.model.config import RopeConfig, parse_config
from engine.model.load import choose_dtype, load_model
from engine.model.rope import Rope
from support.tiny_models import (
    FAMILY_CONFIGS,
    LINEAR_ROPE,
    LLAMA3_ROPE,
    LONGROPE,
    YARN_ROPE,
    PagedRunner,
    edit_config,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)

LENGTH = 45  # past the window of 8, past 2 x the original rope length of 16
CHUNKS = [
    pytest.param([LENGTH], id="whole"),
    pytest.param([1, 7, 4, 5, 8, 9], id="chunks"),  # 1, 7, B, B + 1, window, window + 1
    pytest.param([8], id="decode"),
]


@pytest.fixture(scope="module")
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(transformers model, files) of the family named by the parameter."""
    model = make_tiny(request.param)
    return model, save_tiny(model, tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("sizes", CHUNKS)
@pytest.mark.parametrize("pair", FAMILY_CONFIGS, indirect=True)
def test_logits_equal_transformers_at_every_position(pair: Any, sizes: list[int]) -> None:
    reference, files = pair
    ids = random_ids(LENGTH)
    logits = PagedRunner(load_model(files, "float32")).chunks(ids, sizes)
    expected = reference_logits(reference, ids)
    assert expected.std() > 0.1
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "pair", ["llama", "mistral", "gemma2", "qwen3-moe", "deepseek-v2"], indirect=True
)
def test_a_mixed_batch_equals_one_by_one(pair: Any) -> None:
    """Decodes of very different lengths (more than one padded group), beside two prompts."""
    reference, files = pair
    runner = PagedRunner(load_model(files, "float32"), num_blocks=200)
    prompts = {f"d{i}": random_ids(n, seed=n) for i, n in enumerate((1, 3, 8, 9, 40, 130))}
    for name, prompt in prompts.items():
        runner.step({name: prompt})
    runner.step({"p1": random_ids(6, seed=91)})
    chunks = {"p1": random_ids(11, seed=92), "p2": random_ids(14, seed=93)}
    new = {name: [7 + i] for i, name in enumerate(prompts)}
    logits = runner.step({**new, **chunks})
    whole = {name: prompts[name] + new[name] for name in prompts}
    whole |= {"p1": random_ids(6, seed=91) + chunks["p1"], "p2": chunks["p2"]}
    counts = [1] * len(new) + [11, 14]
    expected = [
        reference_logits(reference, ids)[-count:]
        for ids, count in zip(whole.values(), counts, strict=True)
    ]
    torch.testing.assert_close(logits, torch.cat(expected), atol=2e-4, rtol=1e-4)


def test_only_the_rows_asked_for_have_logits(tmp_path: Path) -> None:
    model = load_model(save_tiny(make_tiny("llama"), tmp_path), "float32")
    runner = PagedRunner(model)
    everything = runner.step({"a": random_ids(6)})

    def forward(rows: list[int]) -> torch.Tensor:
        return model.forward(
            torch.tensor(random_ids(6)),
            torch.arange(6),
            StepBatch([6], [6], [[3, 5]], 0),
            torch.tensor(rows, dtype=torch.int64),
        )

    torch.testing.assert_close(forward([5, 2]), everything[[5, 2]])
    assert forward([]).shape == (0, model.config.vocab_size)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [("bfloat16", 0.15), ("float16", 0.02), ("auto", 0.15)]
)
def test_narrow_types_are_close(tmp_path: Path, dtype: Any, tolerance: float) -> None:
    reference = make_tiny("llama-biases")
    model = load_model(save_tiny(reference, tmp_path), dtype)
    logits = PagedRunner(model).chunks(random_ids(LENGTH), [20, 9])
    assert logits.dtype == torch.float32
    error = (logits - reference_logits(reference, random_ids(LENGTH))).abs().max()
    assert error < tolerance
    assert model.compatibility()["kv_dtype"] == str(model.kv_dtype).removeprefix("torch.")


def test_the_choice_of_dtype_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        chosen = choose_dtype("auto", torch.device("cpu"))
    assert chosen in (torch.bfloat16, torch.float32)
    assert str(chosen).removeprefix("torch.") in caplog.text


@pytest.mark.parametrize("has_bfloat16", [True, False])
def test_auto_is_bfloat16_only_where_the_processor_multiplies_it(
    monkeypatch: pytest.MonkeyPatch, has_bfloat16: bool
) -> None:
    """V73: without AVX512-BF16 or AMX it would work, and crawl."""
    features = {"avx2": True, "avx512_bf16": has_bfloat16}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: features)
    expected = torch.bfloat16 if has_bfloat16 else torch.float32
    assert choose_dtype("auto", torch.device("cpu")) is expected


def test_a_dtype_that_the_device_cannot_compute_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """V73: at once, not in the first request."""

    def refuses(*args: object) -> None:
        raise RuntimeError('"addmm_impl_cpu_" not implemented for Half')

    monkeypatch.setattr(torch.nn.functional, "linear", refuses)
    with pytest.raises(ModelError, match="dtype float16 cannot be computed on cpu"):
        choose_dtype("float16", torch.device("cpu"))


# ---------------------------------------------------------------- rope


@pytest.mark.parametrize(
    "parameters", [LINEAR_ROPE, LLAMA3_ROPE, YARN_ROPE], ids=lambda p: p["rope_type"]
)
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling", "type"])
def test_scaled_rope_equals_transformers_far_beyond_the_threshold(
    parameters: dict[str, Any], spelling: str
) -> None:
    original = {} if parameters is LINEAR_ROPE else {"original_max_position_embeddings": 2048}
    parameters = {**parameters, **original, "rope_theta": 500_000.0}
    raw: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": 8,
        "hidden_size": 256,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    }
    reference = LlamaRotaryEmbedding(LlamaConfig(**raw, rope_parameters=dict(parameters)))
    if spelling == "rope_parameters":
        raw["rope_parameters"] = parameters
    else:
        old = dict(parameters)
        raw["rope_theta"] = old.pop("rope_theta")
        if spelling == "type":
            old["type"] = old.pop("rope_type")
        raw["rope_scaling"] = old
    config = parse_config(raw)
    positions = torch.tensor([0, 1, 1000, 2048, 8000, 20000])
    cos, sin = reference(torch.zeros(1), positions.unsqueeze(0))
    rope = Rope(config.rope, config.max_model_len, torch.float32, torch.device("cpu"))
    own_cos, own_sin = (t.squeeze(1) for t in rope.cos_sin(positions))
    half = config.head_dim // 2
    torch.testing.assert_close(own_cos, cos[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_sin[:, half:], sin[0, :, half:], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own_sin[:, :half], -sin[0, :, :half], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "llama3-rope",
        "qwen2-yarn",
        "llama-linear",
        "phi3-longrope",
        "phi4-mini",
        "gemma3",
        "deepseek-v2",
        "deepseek-v3",
    ],
)
def test_logits_at_eight_times_the_original_length(tmp_path: Path, name: str) -> None:
    reference = make_tiny(name)
    ids = random_ids(130)
    runner = PagedRunner(load_model(save_tiny(reference, tmp_path), "float32"))
    logits = runner.chunks(ids, [61, 66])
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=3e-4, rtol=1e-4)


def test_longrope_uses_short_factors_in_a_short_context(tmp_path: Path) -> None:
    reference = make_tiny("phi3-longrope")
    files = save_tiny(reference, tmp_path)
    ids = random_ids(LONGROPE["original_max_position_embeddings"])
    short = load_model(files, "float32", max_model_len=16)
    long = load_model(files, "float32")
    expected = reference_logits(reference, ids)
    torch.testing.assert_close(PagedRunner(short).chunks(ids, [16]), expected, atol=2e-4, rtol=1e-4)
    assert short.compatibility()["rope"] != long.compatibility()["rope"]


def test_yarn_extends_the_context() -> None:
    raw = {**make_tiny("qwen2-yarn").config.to_dict(), "max_position_embeddings": 16}
    assert parse_config(raw).max_model_len == 16 * 8


def test_an_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    edit_config(files, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4})
    with pytest.raises(ModelError, match="spiral"):
        load_model(files)


def test_a_rope_setting_that_is_missing_is_named() -> None:
    config = RopeConfig("llama3", 1e4, 16, 256, {"factor": 8})
    with pytest.raises(ModelError, match="low_freq_factor"):
        Rope(config, 256, torch.float32, torch.device("cpu"))


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "mamba"}, "mamba"),
        ({"hidden_act": "relu6"}, "relu6"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"num_key_value_heads": 3}, "3 KV heads"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": None}, "vocab_size"),
    ],
)
def test_what_is_not_known_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    files = save_tiny(make_tiny("llama"), tmp_path)
    edit_config(files, **changes)
    with pytest.raises(ModelError, match=named):
        load_model(files)


def test_the_text_model_of_a_gemma3_wrapper(tmp_path: Path) -> None:
    reference = make_tiny("gemma3")
    files = save_tiny(reference, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    wrapped = {f"language_model.{name}": tensor for name, tensor in weights.items()}
    wrapped["vision_tower.encoder.weight"] = torch.zeros(2)
    save_file(wrapped, tmp_path / "model.safetensors")
    text = reference.config.to_dict()
    (tmp_path / "config.json").write_text("{}")
    edit_config(files, model_type="gemma3", text_config={**text, "dtype": "float32"})
    ids = random_ids(20)
    logits = PagedRunner(load_model(files, "float32")).chunks(ids, [20])
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=2e-4, rtol=1e-4)
