import pytest

from cluster.addresses import host_on, reached_at


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("127.0.0.1:80", ""),
        ("localhost:80", ""),
        ("[::1]:80", ""),
        ("0.0.0.0:80", "10.0.0.7:80"),
        ("[::]:80", "10.0.0.7:80"),
        ("10.0.0.7:80", "10.0.0.7:80"),
        ("host.example:80", "host.example:80"),
    ],
)
def test_where_other_machines_reach_it(address, reached):
    assert reached_at(address, "10.0.0.7") == reached


def test_a_loopback_node_is_reached_by_that_name():
    assert reached_at("127.0.0.2:80", "127.0.0.2") == "127.0.0.2:80"


def test_another_node_has_another_address():
    assert host_on("10.0.0.8", "10.0.0.7") == "10.0.0.8"
    assert host_on("10.0.0.8", "127.0.0.1") == "10.0.0.8"
    assert host_on("10.0.0.8", "0.0.0.0") == "0.0.0.0"
