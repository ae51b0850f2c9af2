import subprocess
from pathlib import Path

import pytest
import ray

from cluster.ray_session import ray_session
from core.config import parse_config
from core.errors import ConfigError, UnavailableError


def test_a_local_ray_refuses_what_the_machine_has_not_got():
    config = parse_config("model: none\npools: {decode: {resources: {unobtainium: 2}}}")
    with pytest.raises(ConfigError, match="unobtainium 2"), ray_session(config):
        raise AssertionError("the session must not begin")


def test_a_cluster_that_is_not_there_is_one_clear_error():
    config = parse_config("model: none\nray: {address: 'not an address'}")
    expected = pytest.raises(UnavailableError, match="cannot reach Ray at not an address")
    with expected, ray_session(config):
        raise AssertionError("the session must not begin")


def test_a_local_ray_whose_start_fails_once_is_started_again_on_clean_ground(monkeypatch):
    config = parse_config("model: none\npools: {prefill: {replicas: 1}}")
    init, attempts = ray.init, []

    def fail_once(*args, _temp_dir: str, **kwargs):
        attempts.append(left := Path(_temp_dir) / "of the first start")
        if len(attempts) == 1:
            left.touch()
            attempts.append(subprocess.Popen(["sleep", "600"]))
            raise RuntimeError("Timed out waiting for file gcs_server_port")
        assert not left.exists()
        return init(*args, _temp_dir=_temp_dir, **kwargs)

    monkeypatch.setattr(ray, "init", fail_once)
    with ray_session(config) as session:
        assert ray.is_initialized() and not session.lost
        _, gcs, _ = attempts
        assert gcs.poll() is not None
    assert not ray.is_initialized() and not session.temp_dir.exists()


def test_a_local_ray_that_never_starts_is_one_clear_error(monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no GCS")

    monkeypatch.setattr(ray, "init", fail)
    expected = pytest.raises(UnavailableError, match="cannot start a local Ray: no GCS")
    with expected, ray_session(parse_config("model: none")):
        raise AssertionError("the session must not begin")
