import logging
import sys

import pytest
import torch

from core.errors import ConfigError, IncompatiblePeerError
from kv_transfer.select import choose, make_transports


@pytest.fixture
def without_nixl(monkeypatch):
    monkeypatch.setitem(sys.modules, "nixl", None)


async def made(transport: str) -> dict:
    transports = make_transports(transport, torch.zeros(4, 65536), "decode-0", "a")
    for transfer in transports.values():
        await transfer.close()
    return transports


@pytest.mark.parametrize(
    ("transport", "names"), [("auto", ["nixl", "grpc"]), ("nixl", ["nixl"]), ("grpc", ["grpc"])]
)
async def test_what_is_asked_for_is_made(transport, names):
    transports = await made(transport)
    assert list(transports) == names
    assert all(transfer.name == name for name, transfer in transports.items())


async def test_auto_goes_without_nixl_and_says_why(without_nixl, caplog):
    with caplog.at_level(logging.WARNING):
        assert list(await made("auto")) == ["grpc"]
    assert "NIXL cannot be used here: ModuleNotFoundError" in caplog.text


async def test_nixl_asked_for_and_missing_is_an_error(without_nixl):
    with pytest.raises(ConfigError, match=r"kv_transfer.transport: nixl .* decode-0.*nixl"):
        await made("nixl")


async def test_grpc_alone_never_looks_at_nixl(without_nixl, caplog):
    assert list(await made("grpc")) == ["grpc"]
    assert caplog.text == ""


async def test_a_pair_takes_the_fastest_that_both_have():
    ours = await made("auto")
    assert choose(ours, ["grpc", "nixl"], "prefill-0").name == "nixl"
    assert choose(ours, ["grpc"], "prefill-0").name == "grpc"
    assert choose({"grpc": ours["grpc"]}, ["nixl", "grpc"], "prefill-0").name == "grpc"
    with pytest.raises(IncompatiblePeerError, match="prefill-0 offers nixl, here are grpc"):
        choose({"grpc": ours["grpc"]}, ["nixl"], "prefill-0")
    with pytest.raises(IncompatiblePeerError, match="prefill-0 offers none"):
        choose(ours, [], "prefill-0")
