"""Internal services answer only those who know the deployment's secret."""

import pickle

import grpc
import pytest

from core.errors import UnavailableError
from core.types import Role
from rpc import cluster_pb2, cluster_pb2_grpc, worker_pb2, worker_pb2_grpc
from rpc.channel import make_channel
from rpc.cluster_token import VARIABLE, fresh_cluster_token
from rpc.status import error_from_rpc
from support.fake_cluster import FakeCluster
from support.router import running


@pytest.fixture
async def cluster(monkeypatch):
    monkeypatch.setenv(VARIABLE, "right")
    cluster = FakeCluster()
    await cluster.start()
    await cluster.add("decode-0", Role.DECODE)
    yield cluster
    await cluster.close()


@pytest.mark.parametrize("token", ["", "wrong", "right "])
async def test_a_stranger_is_refused(cluster, token):
    """V74, V76: on unary methods, streams, and methods that do not exist; nothing is run."""
    worker = cluster.workers["decode-0"]
    async with make_channel(worker.address, token) as channel:
        info = worker_pb2_grpc.WorkerServiceStub(channel).GetInfo(worker_pb2.GetInfoRequest())
        stream = worker_pb2_grpc.DecodeServiceStub(channel).Decode(worker_pb2.DecodeRequest())
        marker = channel.unary_unary("/no.such.Service/Method")(pickle.dumps(print))
        for call in (info, stream.read(), marker):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        # A client of the router is not to blame for it.
        assert type(error_from_rpc(refused.value, "decode-0")) is UnavailableError
    async with make_channel(cluster.controller, token) as channel:
        stub = cluster_pb2_grpc.ClusterServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Shutdown(cluster_pb2.ShutdownRequest())
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert not worker.requests


async def test_those_who_know_it_are_served(monkeypatch):
    """A router with the whole path, and its public port, which asks for no token."""
    monkeypatch.setenv(VARIABLE, "right")
    async with running() as router:
        body = await router.complete("hello", max_tokens=3)
        assert body["usage"]["completion_tokens"] == 3
        async with make_channel(f"127.0.0.1:{router.server.grpc_port}", "") as channel:
            assert await channel.unary_unary("/pdserve.v1.Inference/Models")(b"")


def test_a_deployment_makes_its_own(monkeypatch):
    import os

    monkeypatch.delenv(VARIABLE, raising=False)
    with fresh_cluster_token():
        first = os.environ[VARIABLE]
        with fresh_cluster_token():
            assert os.environ[VARIABLE] == first
    assert VARIABLE not in os.environ and len(first) >= 43
    with fresh_cluster_token():
        assert os.environ[VARIABLE] != first
