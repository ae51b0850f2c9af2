"""Who may call, and how much."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from core.errors import AuthenticationError, ConfigError, RateLimitError
from router.access.api_keys import Account, KeyEntry, KeyStore, hash_key, new_key, read_entries
from rpc import inference_pb2 as pb
from rpc import inference_pb2_grpc
from rpc.channel import make_channel
from support.router import Running, running

KEY, BUSY = new_key(), new_key()
OPEN = {"/health", "/ready"}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    entries = [
        {"name": "me", "sha256": hash_key(KEY)},
        {"name": "busy", "sha256": hash_key(BUSY), "concurrency": 1},
    ]
    path.write_text(yaml.safe_dump(entries))
    return path


@pytest.fixture
async def locked(key_file: Path):
    async with running(f"router.api_keys_file={key_file}") as it:
        yield it


def paths_of(router: Running) -> set[str]:
    """Every route that the application has, as it would be asked for."""
    app = router.server._http.config.app.app  # type: ignore[union-attr]
    found = {getattr(route, "path", "") for route in app.routes}
    found |= {*app.openapi()["paths"], "/openapi.json", "/dashboard/part"}
    return {path.replace("{model_id}", "fake").replace("{model_id:path}", "fake") for path in found}


async def test_every_route_but_health_needs_a_key(locked):
    """V80: routes by their list, odd spellings, and ones that do not exist."""
    odd = {
        "//v1/models",
        "/v1/models/",
        "/V1/MODELS",
        "/health/",
        "/health/../v1/models",
        "/%68ealth/x",
        "/v1/../metrics",
        "/nowhere",
        "/",
        "//health",
        "/health%2f..%2fmetrics",
    }
    wrong = [{}, bearer("wrong"), bearer(hash_key(KEY)), {"authorization": KEY},
             {"authorization": "Bearer"}, {"authorization": "Basic eDp5"},
             {"api-key": KEY}]  # fmt: skip
    paths = paths_of(locked)
    assert {"/v1/models", "/v1/completions", "/metrics", "/cluster", "/openapi.json"} <= paths
    for path in (paths | odd) - OPEN - {""}:
        for method in ("GET", "POST") if path in paths else ("GET",):
            for headers in wrong[: 7 if path == "/v1/models" else 1]:
                response = await locked.http.request(method, path, headers=headers)
                assert response.status_code == 401, (method, path, headers)
        assert response.headers["www-authenticate"] == "Bearer"
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and error["code"].endswith("_api_key")
    for path in OPEN:
        assert (await locked.http.get(path)).status_code == 200
    assert (await locked.http.get("/v1/models", headers=bearer(KEY))).status_code == 200
    assert (await locked.http.get("/nowhere", headers=bearer(KEY))).status_code == 404
    assert not locked.worker("prefill-0").requests


async def test_grpc_needs_a_key_too(locked):
    """V80."""
    async with make_channel(f"127.0.0.1:{locked.server.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        request = pb.GenerateRequest(model="fake", prompt="x", max_tokens=2)
        for metadata in ((), (("authorization", "Bearer no"),)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stub.Models(pb.ModelsRequest(), metadata=metadata)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Generate(request, metadata=metadata):
                    pass
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in reflection.ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")])
            ):
                pass
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == 1
        mine = (("authorization", f"Bearer {KEY}"),)
        assert (await stub.Models(pb.ModelsRequest(), metadata=mine)).models[0].id == "fake"
        messages = [message async for message in stub.Generate(request, metadata=mine)]
        assert messages[-1].usage.completion_tokens == 2


async def test_concurrency_is_held_to_the_end_of_the_body(locked):
    """V53: over HTTP and gRPC together."""
    decode = locked.worker("decode-0")
    decode.gate = asyncio.Semaphore(0)
    body = {"model": "fake", "prompt": "x", "max_tokens": 3, "stream": True}
    async with locked.http.stream(
        "POST", "/v1/completions", json=body, headers=bearer(BUSY)
    ) as first:
        lines = first.aiter_lines()
        await anext(lines)  # it runs
        second = await locked.http.post("/v1/completions", json=body, headers=bearer(BUSY))
        assert second.status_code == 429 and second.headers["retry-after"] == "1"
        assert second.json()["error"]["code"] == "rate_limit_exceeded"
        async with make_channel(f"127.0.0.1:{locked.server.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in stub.Generate(
                    pb.GenerateRequest(model="fake", prompt="x"),
                    metadata=(("authorization", f"Bearer {BUSY}"),),
                ):
                    pass
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await locked.idle()
    decode.gate = None
    again = await locked.http.post("/v1/completions", json=body, headers=bearer(BUSY))
    assert again.status_code == 200


async def test_tokens_are_charged(locked, key_file):
    accounts = {account.name: account for account in accounts_of(locked)}
    spent: list[int] = []
    accounts["me"].spend_tokens = spent.append  # type: ignore[method-assign]
    body = {"model": "fake", "prompt": "hello", "max_tokens": 3}
    await locked.http.post("/v1/completions", json=body, headers=bearer(KEY))
    assert spent == [8]


def accounts_of(router: Running) -> list[Account]:
    (interceptor,) = router.server.interceptors
    return list(interceptor._keys._accounts.values())


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def use(account: Account) -> None:
    with account.request():
        pass


def test_rates_refill_with_time():
    clock = Clock()
    entry = KeyEntry(name="x", sha256="0" * 64, requests_per_minute=2, tokens_per_minute=600)
    account = Account(entry, clock)
    use(account)
    use(account)
    with pytest.raises(RateLimitError) as refused:
        use(account)
    assert refused.value.retry_after_s == 30
    clock.now = 30.5
    use(account)
    clock.now = 200
    account.spend_tokens(1200)  # in debt: 600 over, at 10 a second
    with pytest.raises(RateLimitError, match="tokens") as refused:
        use(account)
    assert 60 <= refused.value.retry_after_s <= 61
    clock.now += 61
    use(account)
    assert account.in_flight == 0


def test_the_file_is_read_again_when_it_changes(key_file):
    clock = Clock()
    store = KeyStore(key_file, clock)
    mine = store.account(f"Bearer {KEY}")
    fresh = new_key()
    entries = yaml.safe_load(key_file.read_text())
    key_file.write_text(yaml.safe_dump([*entries, {"name": "new", "sha256": hash_key(fresh)}]))
    clock.now = 2
    assert store.account(f"bearer {fresh}").name == "new"
    assert store.account(f"Bearer {KEY}") is mine
    key_file.write_text("- name: 5\n")
    clock.now = 4
    assert store.account(f"Bearer {fresh}").name == "new"  # the last good set stands
    key_file.write_text(json.dumps(entries[1:]))
    clock.now = 6
    with pytest.raises(AuthenticationError):
        store.account(f"Bearer {KEY}")


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a: 1", "list"), ("- name: x", "sha256"), ("- {name: x, sha256: abc}", "sha256"),
        (f"- {{name: x, sha256: {'a' * 64}, key: secret}}", "key"), ("- [", "YAML"),
        (f"- &e {{name: x, sha256: {'a' * 64}}}\n- *e", "same name"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_named(tmp_path, text, word):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=word) as wrong:
        read_entries(path)
    assert str(path) in wrong.value.message
    with pytest.raises(ConfigError, match="nothing.yaml"):
        KeyStore(tmp_path / "nothing.yaml")
