"""TLS on the router's ports and between processes, with real certificates."""

import asyncio
import logging
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from core.config import parse_config
from core.errors import ConfigError
from core.types import Role
from router.http import server as http_server
from router.placement.registry import Registry
from rpc import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc
from rpc.channel import make_channel
from rpc.tls import TlsFiles, internal_tls, use_internal_tls
from support.certificates import Authority
from support.fake_answers import answer_text
from support.fake_cluster import FakeCluster
from support.router import Running, running
from support.waiting import eventually

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
LOCAL = "DNS:localhost,IP:127.0.0.1"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("theirs"))


@pytest.fixture
def inside(ours: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[TlsFiles]:
    """mTLS between the parts, as long as the test runs."""
    files = ours.issue("part")
    for variable, value in (
        ("PDSERVE_TLS_CA_FILE", files.ca_file),
        ("PDSERVE_TLS_CERT_FILE", files.cert_file),
        ("PDSERVE_TLS_KEY_FILE", files.key_file),
    ):
        monkeypatch.setenv(variable, value or "")
    yield files


async def views(channel: grpc.aio.Channel) -> cluster_pb2.ClusterView:
    call = cluster_pb2_grpc.ClusterServiceStub(channel).Watch(cluster_pb2.WatchRequest(), timeout=5)
    try:
        return await call.read()
    finally:
        call.cancel()


async def test_everything_works_over_mutual_tls(inside: TlsFiles) -> None:
    async with running() as it:
        body = await it.complete("hello", max_tokens=5)
        assert body["choices"][0]["text"] == answer_text("hello", 5)


async def test_who_has_no_certificate_of_ours_is_refused(
    inside: TlsFiles, theirs: Authority, ours: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cluster = FakeCluster()
    await cluster.start()
    try:
        await cluster.add("prefill-0", Role.PREFILL)
        async with make_channel(cluster.controller) as channel:
            assert (await views(channel)).workers[0].id == "prefill-0"
        stranger = theirs.issue("stranger")
        # Signed by others: refused by the server, and by the client in turn.
        signed_by_others = TlsFiles(stranger.cert_file, stranger.key_file, inside.ca_file)
        for files in (stranger, signed_by_others):
            async with make_channel(cluster.controller, tls=files) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await views(channel)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        # Of ours, and for another name: clients do not speak to it.
        other = ours.issue("other", "DNS:elsewhere.example")
        server = grpc.aio.server()
        from rpc.tls import server_credentials

        port = server.add_secure_port("127.0.0.1:0", server_credentials(other))
        await server.start()
        async with make_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await views(channel)
        await server.stop(None)
        # No certificate, and no TLS at all.
        no_certificate = grpc.ssl_channel_credentials(Path(inside.ca_file or "").read_bytes())
        options = [("grpc.ssl_target_name_override", "pdserve.internal")]
        for channel in (
            grpc.aio.secure_channel(cluster.controller, no_certificate, options=options),
            grpc.aio.insecure_channel(cluster.controller),
        ):
            async with channel:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await views(channel)
                assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        await cluster.close()


async def test_a_router_that_cannot_speak_to_the_controller_says_why(
    inside: TlsFiles, theirs: Authority, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    cluster = FakeCluster()
    await cluster.start()
    stranger = theirs.issue("router")
    monkeypatch.setenv("PDSERVE_TLS_CA_FILE", stranger.ca_file or "")
    monkeypatch.setenv("PDSERVE_TLS_CERT_FILE", stranger.cert_file)
    monkeypatch.setenv("PDSERVE_TLS_KEY_FILE", stranger.key_file)
    registry = Registry(cluster.controller, (Role.PREFILL, Role.DECODE))
    try:
        with caplog.at_level(logging.WARNING, "router.placement.registry"):
            registry.start()
            await eventually(lambda: "the controller is lost" in caplog.text)
        assert "CERTIFICATE_VERIFY_FAILED" in caplog.text
    finally:
        await registry.close()
        await cluster.close()


async def test_servers_take_changed_certificates(ours: Authority, tmp_path: Path) -> None:
    """Rotation: new connections see the new certificate; what is broken is not taken."""
    from rpc.tls import server_credentials

    first, second = ours.issue("first", LOCAL), ours.issue("second", LOCAL)
    files = TlsFiles(str(tmp_path / "tls.crt"), str(tmp_path / "tls.key"))

    def install(source: TlsFiles, ns: int) -> None:
        import os

        shutil.copy(source.key_file, files.key_file)
        shutil.copy(source.cert_file, files.cert_file)
        for file in (files.cert_file, files.key_file):
            os.utime(file, ns=(ns, ns))

    install(first, 1)
    server = grpc.aio.server()
    port = server.add_secure_port("127.0.0.1:0", server_credentials(files))
    await server.start()

    async def shown() -> bytes:
        context = ssl.create_default_context(cafile=first.ca_file)
        context.set_alpn_protocols(["h2"])
        _, writer = await asyncio.open_connection(
            "127.0.0.1", port, ssl=context, server_hostname="localhost"
        )
        der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.close()
        return ssl.DER_cert_to_PEM_cert(der).encode().strip()

    try:
        assert await shown() in Path(first.cert_file).read_bytes()
        install(second, 2)
        assert await shown() in Path(second.cert_file).read_bytes()
        Path(files.cert_file).write_text("no certificate")
        assert await shown() in Path(second.cert_file).read_bytes()
    finally:
        await server.stop(None)


async def test_the_router_speaks_tls_to_clients(
    ours: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "REREAD_S", 0.02)
    first, second = ours.issue("edge", LOCAL), ours.issue("edge-2", LOCAL)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    shutil.copy(first.cert_file, cert)
    shutil.copy(first.key_file, key)
    setting = f"router.tls={{cert_file: '{cert}', key_file: '{key}'}}"
    async with running(setting, scheme="https", ca_file=ours.file) as it:
        body = await it.complete("hello", max_tokens=5)
        assert body["choices"][0]["text"] == answer_text("hello", 5)
        streamed = await it.post(prompt="hello", max_tokens=5, stream=True)
        assert streamed.text.endswith("data: [DONE]\n\n")
        await refuses_plain_connections(it)
        roots = Path(ours.file).read_bytes()
        credentials = grpc.ssl_channel_credentials(roots)
        async with grpc.aio.secure_channel(
            f"localhost:{it.server.grpc_port}", credentials
        ) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            assert (await stub.Models(inference_pb2.ModelsRequest())).models
        # Rotation.
        shutil.copy(second.key_file, key)
        shutil.copy(second.cert_file, cert)
        context = ssl.create_default_context(cafile=ours.file)

        async def shows_the_second() -> bool:
            _, writer = await asyncio.open_connection(
                "127.0.0.1", it.server.http_port, ssl=context, server_hostname="localhost"
            )
            der = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
            writer.close()
            pem = ssl.DER_cert_to_PEM_cert(der).strip()
            return pem in Path(second.cert_file).read_text()

        async with asyncio.timeout(10):
            while not await shows_the_second():
                await asyncio.sleep(0.02)


async def refuses_plain_connections(it: Running) -> None:
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://127.0.0.1:{it.server.http_port}/health")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{it.server.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Models(inference_pb2.ModelsRequest(), timeout=5)


def test_files_that_cannot_be_used_are_named(ours: Authority, tmp_path: Path) -> None:
    good = ours.issue("good")
    other = ours.issue("unlike")
    missing = str(tmp_path / "none.crt")
    for cert, key, ca in (
        (missing, good.key_file, good.ca_file),
        (good.cert_file, other.key_file, good.ca_file),
        (good.cert_file, good.key_file, missing),
    ):
        config = parse_config(
            f"model: m\ntls: {{ca_file: '{ca}', cert_file: '{cert}', key_file: '{key}'}}"
        )
        with pytest.MonkeyPatch.context() as patch:
            for name in ("CA", "CERT", "KEY"):
                patch.setenv(f"PDSERVE_TLS_{name}_FILE", "")
            with pytest.raises(ConfigError, match="tls: cannot use"):
                use_internal_tls(config)


def test_half_of_the_variables_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    assert internal_tls() is None
    monkeypatch.setenv("PDSERVE_TLS_CA_FILE", "/ca")
    with pytest.raises(ConfigError, match="PDSERVE_TLS_CERT_FILE, PDSERVE_TLS_KEY_FILE"):
        internal_tls()
