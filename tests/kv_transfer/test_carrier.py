import logging

import pytest

from kv_transfer.carrier import CarrierWatch, asks_for_rdma


def test_said_once_and_again_when_it_changes(caplog: pytest.LogCaptureFixture) -> None:
    watch = CarrierWatch(ucx_tls="")
    with caplog.at_level(logging.INFO, "kv_transfer.carrier"):
        assert watch.note("prefill-0", "nixl", "") == "nixl"
        for _ in range(3):
            assert watch.note("prefill-0", "nixl", "cma") == "nixl (cma)"
        watch.note("prefill-1", "grpc", "tcp")
        watch.note("prefill-0", "nixl", "tcp")
    assert caplog.messages == [
        "KV from prefill-0 over nixl (cma)",
        "KV from prefill-1 over grpc (tcp)",
        "KV from prefill-0 over nixl (tcp)",
    ]
    assert watch.num_fallbacks == 0  # nobody asked for more


def test_tcp_where_rdma_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    watch = CarrierWatch(ucx_tls="rc,cuda_copy")
    watch.note("prefill-0", "nixl", "rc_mlx5")
    watch.note("prefill-1", "nixl", "cma")  # better than asked for
    assert watch.num_fallbacks == 0
    for _ in range(2):
        watch.note("prefill-0", "nixl", "tcp")
        watch.note("prefill-1", "grpc", "tcp")
    assert watch.num_fallbacks == 2
    warnings = [r.message for r in caplog.records if r.levelno == logging.WARNING]
    assert warnings == [
        "UCX_TLS=rc,cuda_copy asks for RDMA, but KV from prefill-0 comes over nixl (tcp)",
        "UCX_TLS=rc,cuda_copy asks for RDMA, but KV from prefill-1 comes over grpc (tcp)",
    ]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("", False), ("all", False), ("tcp,cma", False), ("^rc,ud", False), ("udp", False),
        ("rc", True), ("tcp,rc_x", True), ("ud:aux,tcp", True), ("dc_mlx5", True), ("ib", True),
    ],
)  # fmt: skip
def test_what_asking_means(value: str, expected: bool) -> None:
    assert asks_for_rdma(value) is expected
