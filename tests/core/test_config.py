"""Errors of the configuration name the place, the key and what was expected."""

import pytest

from core.config import EngineConfig, load_config, parse_config
from core.errors import ConfigError


def error_of(text, *overrides):
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides, source="c.yaml")
    assert "\n" not in caught.value.message
    return caught.value.message


def test_defaults_need_only_a_model():
    config = parse_config("model: smollm2-135m")
    assert config.mode == "disaggregated"
    assert config.active_pools == ("prefill", "decode")
    assert config.engine.block_size == 16
    assert config.pools.decode.replicas == 1
    assert config.router.http == "127.0.0.1:8000"
    assert config.kv_transfer.transport == "auto"


def test_every_documented_key_is_read():
    config = parse_config("""
model: m
served_model_name: shown
dtype: float32
mode: colocated
engine: {block_size: 8, max_model_len: 99, num_kv_blocks: 50, max_num_seqs: 3,
         max_num_batched_tokens: 64, kv_cache_dtype: int8, quantization: int4, threads: 2,
         device: cpu, gpu_memory_utilization: 0.5, attention: torch, cuda_graphs: off}
pools:
  prefill: {replicas: 2, tensor_parallel_size: 1, resources: {CPU: 0.5, custom: 1}, engine: {}}
  decode: {replicas: 3, engine: {max_num_seqs: 7}}
kv_transfer: {transport: grpc, lease_seconds: 5}
router: {http: "0.0.0.0:1", grpc: "[::1]:2", policy: round_robin, api_keys_file: null}
ray: {address: "auto"}
""")
    assert config.served_model_name == "shown"
    assert config.active_pools == ("colocated",)
    assert config.pools.prefill.resources == {"CPU": 0.5, "custom": 1.0}
    assert config.engine_for("decode").max_num_seqs == 7
    assert config.engine_for("decode").block_size == 8
    assert config.engine_for("decode").kv_cache_dtype == "int8"
    assert config.engine_for("decode").gpu_memory_utilization == 0.5
    assert config.engine_for("decode").attention == "torch"
    assert config.engine_for("decode").cuda_graphs == "off"
    assert config.engine_for("prefill").quantization == "int4"
    assert config.engine_for("prefill").max_num_seqs == 3
    assert config.kv_transfer.lease_seconds == 5.0
    assert config.router.grpc == "[::1]:2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\nmodle: b", "c.yaml:2: modle: unknown key"),
        ("model: a\nengine:\n  blok: 1", "c.yaml:3: engine.blok: unknown key"),
        ("model: a\nliteral: 1", "c.yaml:2: literal: unknown key"),
        (
            "model: a\npools:\n  decode:\n    engine:\n      blok: 1",
            "c.yaml:5: pools.decode.engine.blok: unknown key",
        ),
        ("dtype: auto", "c.yaml: model: missing, a value is required"),
        ("model: a\nengine: 3", "c.yaml:2: engine: expected a section with keys"),
        ("model: a\nengine:", "c.yaml:2: engine: expected a section with keys"),
    ],
)
def test_wrong_keys(text, message):
    assert error_of(text).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dtype: fp8\nmodel: a", "c.yaml:1: dtype: expected 'auto', 'bfloat16', 'float16' or"),
        (
            "model: a\npools: {colocated: {tensor_parallel_size: 9}}",
            "c.yaml:2: pools.colocated.tensor_parallel_size: expected less than or equal to 8",
        ),
        (
            "model: a\nkv_transfer: {compression: int8}",
            "c.yaml:2: kv_transfer.compression: expected checksum: false with int8",
        ),
        (
            "model: a\nkv_transfer: {compression: zstd, transport: nixl}",
            "c.yaml:2: kv_transfer.compression: expected none with transport: nixl",
        ),
        ("model: a\nmode: both", "c.yaml:2: mode: expected 'disaggregated' or 'colocated'"),
        (
            "model: a\nengine:\n  quantization: int3",
            "c.yaml:3: engine.quantization: expected 'none', 'int8' or 'int4', got 'int3'",
        ),
        (
            "model: a\nengine: {kv_cache_dtype: fp4}",
            "c.yaml:2: engine.kv_cache_dtype: expected 'auto', 'bf16', 'int8' or 'fp8_e4m3'",
        ),
        (
            "model: a\nengine: {speculative: {method: magic}}",
            "c.yaml:2: engine.speculative.method: expected 'ngram' or 'draft_model', got",
        ),
        (
            "model: a\nengine:\n  speculative: {method: draft_model}",
            "c.yaml:3: engine.speculative.model: missing, draft_model needs",
        ),
        (
            "model: a\nengine:\n  speculative: {method: ngram, model: b}",
            "c.yaml:3: engine.speculative.model: unknown key of method ngram",
        ),
        (
            "model: a\nengine:\n  speculative: {method: ngram, prompt_lookup_min: 9}",
            "c.yaml:3: engine.speculative.prompt_lookup_min: expected at most prompt_lookup_max",
        ),
        (
            "model: a\nengine:\n  memory_budget: 6 GiBi",
            "c.yaml:3: engine.memory_budget: expected bytes, or a size like 6 GiB or 800 MB, got",
        ),
        (
            "model: a\nengine: {speculative: {method: draft_model, model: b}}\n"
            "pools:\n  decode: {tensor_parallel_size: 2}",
            "c.yaml:4: pools.decode.tensor_parallel_size: expected 1 with speculative.method draft",
        ),
        ("model: 5", "c.yaml:1: model: expected a valid string, got 5"),
        ("model: ''", "c.yaml:1: model: "),
        (
            "model: a\nengine:\n  threads: x",
            "c.yaml:3: engine.threads: expected a valid integer or",
        ),
        ("model: a\nengine: {max_num_seqs: 0}", "c.yaml:2: engine.max_num_seqs: expected greater"),
        (
            "model: a\nengine: {max_model_len: x}",
            "c.yaml:2: engine.max_model_len: expected a valid",
        ),
        (
            "model: a\npools:\n  prefill:\n    replicas: true",
            "c.yaml:4: pools.prefill.replicas: expected a valid integer, got True",
        ),
        (
            "model: a\npools:\n  prefill:\n    replicas: '2'",
            "c.yaml:4: pools.prefill.replicas: expected a valid integer, got '2'",
        ),
        (
            "model: a\npools:\n  prefill:\n    engine: {max_num_seqs: 0}",
            "c.yaml:4: pools.prefill.engine.max_num_seqs: expected greater",
        ),
        (
            "model: a\npools:\n  decode: {label_selector: {zone: a}}",
            "c.yaml:3: pools.decode.label_selector: expected ray.address with it: a Ray of its own",
        ),
        (
            "model: a\npools:\n  decode: {resources: {CPU: -1}}",
            "c.yaml:3: pools.decode.resources.CPU: expected greater than or equal to 0",
        ),
        ("model: a\nkv_transfer:\n  lease_seconds: 0", "c.yaml:3: kv_transfer.lease_seconds: "),
        ("model: a\nkv_transfer:\n  lease_seconds: .nan", "c.yaml:3: kv_transfer.lease_seconds: "),
        ("model: a\nrouter:\n  http: 8000", "c.yaml:3: router.http: expected a valid string"),
        ("model: a\nrouter:\n  http: '8000'", "c.yaml:3: router.http: expected host:port"),
        ("model: a\nrouter:\n  http: 'h:99999'", "c.yaml:3: router.http: expected host:port"),
        ("model: a\nrouter:\n  http: 'h:²'", "c.yaml:3: router.http: expected host:port"),
    ],
)
def test_wrong_values(text, message):
    assert error_of(text).startswith(message)


def test_a_long_value_is_cut():
    assert len(error_of(f"model: a\ndtype: {'x' * 10_000}")) < 300


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: a\nmodel: b", "c.yaml:2: model: key given twice"),
        ("model: a\nengine:\n  threads: 1\n  threads: 2", "c.yaml:4: threads: key given twice"),
        ("", "c.yaml: expected a mapping at the top"),
        ("- a", "c.yaml: expected a mapping at the top"),
        ("model: [", "c.yaml:1: not valid YAML"),
        ("model: a\x00", "c.yaml: not valid YAML"),
        ("model: a\n---\nmodel: b", "c.yaml:2: not valid YAML"),
        ("model: a\n? [b]\n: c", "c.yaml:2: not valid YAML"),
        ("model: !!python/name:os.system", "c.yaml:1: not valid YAML"),
        ("1: 2\nmodel: a", "c.yaml:1: 1: "),
        ("a: &a {b: *a}\nmodel: x", "c.yaml: nested too deeply"),
        ("[" * 5000, "c.yaml: nested too deeply"),
    ],
)
def test_wrong_yaml(text, message):
    assert error_of(text).startswith(message)


def test_contradictions_name_a_key_and_its_line():
    text = "model: a\npools:\n  prefill:\n    engine:\n      block_size: 24"
    assert error_of(text) == (
        "c.yaml:5: pools.prefill.engine.block_size: expected the prefill and decode pools' block "
        "sizes to divide one another, got 16 and 24"
    )
    assert parse_config(text + "\nmode: colocated").engine_for("prefill").block_size == 24
    assert parse_config(text.replace("24", "32")).engine_for("prefill").block_size == 32
    text = "model: a\npools:\n  decode:\n    engine: {kv_cache_dtype: int8}"
    assert error_of(text).startswith(
        "c.yaml:4: pools.decode.engine.kv_cache_dtype: expected the same in the prefill and decode"
    )
    text = "model: a\nrouter:\n  http: 127.0.0.1:1\n  grpc: 127.0.0.1:1"
    assert error_of(text).startswith("c.yaml:4: router.grpc: expected another port")
    assert parse_config(text.replace(":1\n", ":0\n").replace("1:1", "1:0"))


def test_overrides_win_and_are_read_as_yaml():
    config = parse_config(
        "model: a\ndtype: float16",
        [
            "dtype=float32",
            "pools.prefill.replicas=2",
            "engine={block_size: 4, threads: auto}",
            "engine.max_num_seqs=9",
            "router.http=0.0.0.0:80",
            "served_model_name=a=b",
        ],
    )
    assert config.dtype == "float32"
    assert config.pools.prefill.replicas == 2
    assert (config.engine.block_size, config.engine.max_num_seqs) == (4, 9)
    assert config.router.http == "0.0.0.0:80"
    assert config.served_model_name == "a=b"


def test_an_override_mends_a_wrong_value_and_an_empty_section():
    text = "model: a\ndtype: fp8\npools:"
    config = parse_config(text, ["dtype=auto", "pools.decode.replicas=4"])
    assert config.pools.decode.replicas == 4


def test_an_override_does_not_reach_through_a_yaml_alias():
    text = "model: a\npools:\n  prefill: &p {replicas: 1}\n  decode: *p"
    pools = parse_config(text, ["pools.prefill.replicas=3"]).pools
    assert (pools.prefill.replicas, pools.decode.replicas) == (3, 1)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("dtype=fp8", "--set dtype=fp8: dtype: expected 'auto'"),
        (
            "pools.prefill.engine.blok=1",
            "--set pools.prefill.engine.blok=1: pools.prefill.engine.b",
        ),
        ("pools.prefill", "--set pools.prefill: expected key=value"),
        ("=1", "--set =1: expected key=value"),
        ("a..b=1", "--set a..b=1: expected key=value"),
        ("model.x=1", "--set model.x: model is not a section"),
        ("dtype=[", "--set dtype: value is not valid YAML"),
        ("model=", "--set model=: model: expected a valid string"),
    ],
)
def test_wrong_overrides_name_themselves(override, message):
    assert error_of("model: a\ndtype: auto", override).startswith(message)


def test_files(tmp_path):
    path = tmp_path / "c.yaml"
    with pytest.raises(ConfigError, match="cannot read .*c.yaml: No such file"):
        load_config(path)
    path.write_bytes(b"model: \xff")
    with pytest.raises(ConfigError, match="not a UTF-8 text file"):
        load_config(path)
    path.write_text("model: modèle", encoding="utf-8")
    assert load_config(path).model == "modèle"
    with pytest.raises(ConfigError, match=f"^{path}:1: modell: unknown key"):
        path.write_text("modell: a\nmodel: b", encoding="utf-8")
        load_config(path)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("6 GiB", 6 << 30),
        ("1.5GiB", 3 << 29),
        ("800 MB", 800_000_000),
        ("5000000000", 5 * 10**9),
        (5 << 30, 5 << 30),
        (None, None),
    ],
)
def test_a_memory_budget_has_units(text, size):
    assert EngineConfig(memory_budget=text).memory_budget == size


ROLES = "model: m\npools:\n  prefill: {roles: [prefill, decode]%s}\n  decode: {%s}\n"


def test_workers_may_have_two_roles_with_limits_of_each():
    decode = "roles: [decode], engine: {max_num_seqs: 9, max_num_batched_tokens: 99}"
    config = parse_config(ROLES % ("", decode))
    assert config.roles_of("prefill") == ("prefill", "decode")
    assert config.roles_of("decode") == ("decode",)


@pytest.mark.parametrize(
    ("prefill", "decode", "message"),
    [
        (", tensor_parallel_size: 2", "",
         "c.yaml:3: pools.prefill.tensor_parallel_size: expected the same as in pools.decode (1)"),
        (", resources: {GPU: 1}", "resources: {GPU: 2}",
         "c.yaml:3: pools.prefill.resources: expected the same as in pools.decode ({'GPU': 2.0})"),
        ("", "engine: {max_model_len: 100}",
         "c.yaml:4: pools.decode.engine.max_model_len: expected the same in both pools with roles"),
        ("", "roles: [prefill]",
         "c.yaml:4: pools.decode.roles: expected [decode, prefill] or [decode], got [prefill]"),
        ("", "roles: [decode, decode]", "c.yaml:4: pools.decode.roles: expected [decode, prefill]"),
        ("", "roles: [decode, colocated]", "c.yaml:4: pools.decode.roles"),
        ("", "engine: {speculative: {method: draft_model, model: n}}",
         "c.yaml:4: pools.decode.engine.speculative: expected the same in both pools"),
    ],
)  # fmt: skip
def test_roles_that_the_pools_do_not_allow_are_refused(prefill, decode, message):
    assert error_of(ROLES % (prefill, decode)).startswith(message)


def test_a_draft_model_and_colocated_workers_have_one_role():
    draft = "engine: {speculative: {method: draft_model, model: n}}\n"
    message = error_of(draft + ROLES % ("", ""))
    assert message.startswith("c.yaml:4: pools.prefill.roles: expected one role with speculative")
    colocated = "model: m\nmode: colocated\npools: {colocated: {roles: [prefill]}}"
    assert "pools.colocated.roles: unknown key of this pool" in error_of(colocated)
