from cluster.changes import ChangeKind, as_yaml, changes_between
from core.config import parse_config

BASE = "model: m\nrouter: {http: '127.0.0.1:8000'}\n"


def kinds(new: str, old: str = BASE) -> dict[str, ChangeKind]:
    return {c.key: c.kind for c in changes_between(parse_config(old), parse_config(new))}


def test_the_same_file_is_no_change():
    assert kinds(BASE) == {}


def test_each_change_says_what_it_takes():
    new = BASE + (
        "dtype: float32\nengine: {max_num_seqs: 8, block_size: 32}\n"
        "kv_transfer: {lease_seconds: 10.0, transport: grpc}\n"
        "pools: {prefill: {replicas: 3, resources: {GPU: 1}, runtime_env: {env_vars: {A: b}}},\n"
        "  decode: {engine: {threads: 2}, label_selector: {zone: a}}}\n"
        "ray: {address: auto}\n"
    )
    in_colocated = "model: m\nmode: colocated\n"
    ranks = parse_config(f"{in_colocated}pools: {{colocated: {{tensor_parallel_size: 2}}}}")
    (change,) = changes_between(parse_config(in_colocated), ranks)
    assert (change.kind, change.pools) == (ChangeKind.ROLLOUT, ("colocated",))
    assert kinds(new) == {
        "dtype": ChangeKind.RESTART,
        "engine.block_size": ChangeKind.RESTART,
        "engine.max_num_seqs": ChangeKind.ROLLOUT,
        "kv_transfer.lease_seconds": ChangeKind.ROLLOUT,
        "kv_transfer.transport": ChangeKind.RESTART,
        "pools.prefill.replicas": ChangeKind.SCALE,
        "pools.prefill.resources": ChangeKind.ROLLOUT,
        "pools.prefill.runtime_env": ChangeKind.ROLLOUT,
        "pools.decode.label_selector": ChangeKind.ROLLOUT,
        "ray.address": ChangeKind.RESTART,
        "pools.decode.engine.threads": ChangeKind.ROLLOUT,
    }


def test_a_change_concerns_the_pools_that_it_touches():
    old, new = BASE, BASE + "engine: {max_num_seqs: 8}\npools: {decode: {engine: {threads: 2}}}\n"
    pools = {c.key: c.pools for c in changes_between(parse_config(old), parse_config(new))}
    assert pools == {
        "engine.max_num_seqs": ("prefill", "decode"),
        "pools.decode.engine.threads": ("decode",),
    }


def test_a_pool_that_the_mode_does_not_use_changes_nothing():
    assert kinds(BASE + "pools: {colocated: {replicas: 4}}\n") == {}


def test_a_port_of_0_has_been_granted_and_another_port_is_a_restart():
    assert kinds("model: m\nrouter: {http: '127.0.0.1:0'}\n") == {}
    assert kinds("model: m\nrouter: {http: '127.0.0.1:1'}\n") == {"router.http": ChangeKind.RESTART}


def test_another_mode_is_a_restart():
    assert kinds(BASE + "mode: colocated\n")["mode"] is ChangeKind.RESTART


def test_values_are_shown_as_yaml_on_one_line():
    assert [as_yaml(v) for v in (2, None, "auto", {"GPU": 1.0})] == [
        "2", "null", "auto", "{GPU: 1.0}",
    ]  # fmt: skip
