"""Limits that hold before anything is parsed, and what no client may say (V44, V75 to V80)."""

import asyncio
import inspect
import re
from pathlib import Path

import httpx
import pytest

from core.config import Config, parse_config
from router.http import request_body
from router.http import server as http_server
from router.openai.frontend import Frontend
from support.router import Running, running
from support.waiting import eventually

ROOT = Path(__file__).parents[2]


async def raw(router: Running, *pieces: bytes, pause_s: float = 0.0) -> bytes:
    """What comes back until the router closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", router.server.http_port)
    try:
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        async with asyncio.timeout(10):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_headers_that_trickle_are_given_up(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.1)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    answer = await raw(router, head, *[b"x-a: b\r\n"] * 20, pause_s=0.02)
    assert answer.startswith(b"HTTP/1.1 408 ") and b'"error"' in answer
    assert (await raw(router)).startswith(b"HTTP/1.1 408 "), "a connection that says nothing"
    # A second request on a connection is under the same limit.
    first = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
    answer = await raw(router, first, b"GET /hea", pause_s=0.05)
    assert answer.startswith(b"HTTP/1.1 200 ") and b"HTTP/1.1 408 " in answer
    assert (await router.http.get("/health")).status_code == 200


async def test_a_long_answer_is_not_a_late_request(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "HEAD_TIMEOUT_S", 0.05)
    worker = router.worker("decode-0")
    worker.pause = lambda: 0.05
    response = await router.post(prompt="hello", max_tokens=6, stream=True)
    assert response.text.endswith("data: [DONE]\n\n")


async def test_a_body_that_trickles_is_given_up(
    router: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_body, "READ_TIMEOUT_S", 0.1)
    head = (
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 99\r\n"
    )
    answer = await raw(router, head + b"\r\n", b"{", b"{", pause_s=0.02)
    assert answer.startswith(b"HTTP/1.1 408 ")
    await eventually(lambda: not router.in_flight)


@pytest.mark.parametrize(
    "field",
    [
        "kv_transfer_params", "disagg", "bootstrap_host", "bootstrap_room", "data_parallel_rank",
        "block_ids", "attempt_id", "request_id", "incarnation", "output_token_ids",
        "prompt_embeds", "chat_template", "documents", "mm_processor_kwargs", "lora_path",
        "custom_logit_processor", "vllm_xargs", "source", "peer",
    ],
)  # fmt: skip
async def test_internal_and_unknown_fields_are_refused_by_name(router: Running, field: str) -> None:
    for path, input_field in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        for value in ({"host": "10.0.0.1"}, "http://169.254.169.254/", 1, None):
            answer = await router.post(path, **input_field, max_tokens=1, **{field: value})
            if value is None and answer.status_code == 200:
                continue  # null says nothing
            assert answer.status_code == 400 and answer.json()["error"]["param"] == field
    assert not any(worker.requests for worker in router.cluster.everyone if worker.active)


def test_nothing_listens_on_all_interfaces_unless_told_to() -> None:
    config = parse_config("model: m")
    assert {config.router.http, config.router.grpc} == {"127.0.0.1:8000", "127.0.0.1:8001"}
    wide = re.compile(r"[\"']0\.0\.0\.0|[\"']\[::\]")
    for folder in ("core", "rpc", "router", "worker", "prefill_worker", "decode_worker",
                   "kv_transfer", "cluster"):  # fmt: skip
        for path in (ROOT / folder).rglob("*.py"):
            assert not wide.search(path.read_text()), path


def test_nothing_on_a_socket_is_unpickled() -> None:
    """V74. Ray's own calls between its own processes are Ray's."""
    words = re.compile(r"\bpickle\b|cloudpickle|recv_pyobj|torch\.load\(|\bmarshal\b|\beval\(|dill")
    for folder in ("core", "rpc", "router", "worker", "prefill_worker", "decode_worker",
                   "kv_transfer", "engine"):  # fmt: skip
        for path in (ROOT / folder).rglob("*.py"):
            found = words.findall(re.sub(r"\.eval\(|#.*", "", path.read_text()))
            assert not [f for f in found if f != "pickle" or "import pickle" in path.read_text()]


async def test_a_pickle_on_every_port_is_refused(router: Running, tmp_path: Path) -> None:
    """V74: the marker never runs."""
    marker = tmp_path / "ran"
    bomb = b"\x80\x04cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    addresses = [worker.address for worker in router.cluster.everyone]
    addresses += [router.cluster.controller, f"127.0.0.1:{router.server.grpc_port}"]
    addresses.append(f"127.0.0.1:{router.server.http_port}")
    for address in addresses:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(bomb + b"\r\n\r\n")
        try:
            async with asyncio.timeout(5):
                await reader.read(4096)
        except (ConnectionError, TimeoutError):
            pass
        writer.close()
    assert not marker.exists()
    assert (await router.complete("hello", max_tokens=3))["usage"]["completion_tokens"] == 3


async def test_images_are_refused_and_nothing_is_fetched(router: Running) -> None:
    """V77."""
    fetched = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fetched.append(await reader.readline())
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    for url in (f"http://127.0.0.1:{port}/a.png", "http://169.254.169.254/latest/", "file:///etc"):
        part = {"type": "image_url", "image_url": {"url": url}}
        answer = await router.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": [part]}]
        )
        assert answer.status_code == 400 and "image_url" in answer.json()["error"]["message"]
    server.close()
    await server.wait_closed()
    assert not fetched


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1e-300},  # makes infinite logits
        {"n": 10**6}, {"stop": ["x"] * 5}, {"stop": ["x" * 10**6]}, {"logprobs": 10**5},
        {"prompt": ["x"] * 10**5}, {"max_tokens": 10**12}, {"prompt": [[1]] * 10**5},
        {"logit_bias": {str(i): 1 for i in range(10**5)}}, {"stop_token_ids": list(range(10**5))},
    ],
    ids=lambda fields: next(iter(fields)),
)  # fmt: skip
async def test_numbers_without_measure_are_refused_at_once(router: Running, fields: dict) -> None:
    """V75: before a worker hears of it."""
    answer = await router.post(**{"prompt": "x", "max_tokens": 1, **fields})
    assert answer.status_code == 400, answer.text
    assert not any(worker.requests for worker in router.cluster.everyone)


async def test_salts_part_prefixes_on_every_worker() -> None:
    """V66: what one salt has computed, no other finds: on P, on D, or by the router's index."""
    async with running(prefills=2, decodes=2) as router:
        prompt = "the same words in every prompt, longer than two blocks"

        async def cached(**fields: object) -> int:
            body = await router.complete(prompt, max_tokens=2, **fields)
            await router.idle()
            return body["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert await cached() == 0
        for salt in ("a", "b", "", "a\0b"):
            fields = {"cache_salt": salt} if salt else {}
            first = await cached(**fields)
            assert (first > 0) is (salt == ""), salt
            assert await cached(**fields) > 0, "within a salt it is shared"


def test_the_front_door_has_no_way_to_take_a_template() -> None:
    """V78: templates come with the model or the configuration."""
    from router.openai import protocol

    models = [m for _, m in inspect.getmembers(protocol, inspect.isclass)]
    fields = {name for m in models for name in getattr(m, "model_fields", {})}
    assert fields and "chat_template" not in fields
    assert "chat_template" in Config.model_fields["router"].annotation.model_fields  # type: ignore[union-attr]
    assert "template" not in {f.lower() for f in Frontend.__slots__}


async def test_odd_paths_need_a_key_too(tmp_path: Path) -> None:
    """V80."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("[]")
    async with running(f"router.api_keys_file={keys}") as router:
        for path in ("//v1/models", "/v1/models/", "/V1/models", "/health/", "/health/../metrics",
                     "/ready/x", "/metrics", "/%2e/health", "/cluster", "/dashboard",
                     "/dashboard/events", "/debug/requests", "/openapi.json", "/docs",
                     "/redoc", "/tokenize", "/nothing"):  # fmt: skip
            for method in ("GET", "POST", "OPTIONS"):
                request = router.http.build_request(method, httpx.URL(router.url + path))
                assert (await router.http.send(request)).status_code == 401, (method, path)
        for path in ("/health", "/ready"):
            assert (await router.http.get(path)).status_code == 200
