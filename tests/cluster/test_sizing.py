"""What each process of a deployment gets of its host."""

from pathlib import Path

import pytest

from cluster import sizing
from core.config import parse_config
from core.errors import ConfigError

GIB = 1 << 30


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "available_cpus", lambda: 12)
    monkeypatch.setattr(sizing, "default_kv_memory", lambda processes: 12 * GIB // processes)


def colocated(ranks: int, **pool: object) -> object:
    pool_text = "".join(f", {key}: {value}" for key, value in pool.items())
    return parse_config(
        "model: a\nmode: colocated\ndtype: bfloat16\n"
        f"pools: {{colocated: {{replicas: 2, tensor_parallel_size: {ranks}{pool_text}}}}}"
    )


def test_ranks_share_the_host_like_workers(host: None) -> None:
    one, three = (sizing.share_of(colocated(n), "colocated", is_local=True) for n in (1, 3))
    assert (one.num_threads, one.kv_memory_bytes) == (6, 6 * GIB)
    assert (three.num_threads, three.kv_memory_bytes) == (2, 2 * GIB)


def test_resources_are_those_of_each_rank(host: None) -> None:
    config = colocated(2, resources="{CPU: 3, GPU: 1}")
    assert sizing.bundle_for(config.pools.colocated) == {"CPU": 3.0, "GPU": 1.0}
    assert sizing.share_of(config, "colocated", is_local=False).num_threads == 3


def test_ranks_have_the_weights_once_and_all_else_each(host: None, tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 * GIB)
    fixed = sizing.WORKER_OVERHEAD_BYTES
    needed = 2 * (10 * GIB + 2 * (3 * GIB + fixed)) + sizing.RAY_OVERHEAD_BYTES
    sizing.check_memory(colocated(2), tmp_path, needed)
    with pytest.raises(ConfigError, match="too little memory: 2 workers of about 17.2 GiB"):
        sizing.check_memory(colocated(2), tmp_path, needed - 1)
    one_more = 10 * GIB + 2 * (3 * GIB + fixed)
    sizing.check_room(colocated(2), "colocated", tmp_path, one_more)
    with pytest.raises(ConfigError, match="too little memory for 1 more worker"):
        sizing.check_room(colocated(2), "colocated", tmp_path, one_more - 1)


@pytest.mark.parametrize(
    ("config_json", "growth"),
    [
        ("{}", 1),
        ('{"quantization_config": {"quant_method": "fp8"}}', 2),
        ('{"quantization_config": null}', 1),
        ("[]", 1),  # the loader's to refuse
    ],
)
def test_fp8_weights_are_loaded_twice_as_large(
    tmp_path: Path, config_json: str, growth: int
) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    (tmp_path / "config.json").write_text(config_json)
    assert sizing.weights_bytes(tmp_path, "bfloat16") == 1000 * growth
    assert sizing.weights_bytes(tmp_path, "float32") == 2000 * growth
