import pytest

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
