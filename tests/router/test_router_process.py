"""`python -m router` as a process: how it starts, fails to start, and stops."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from core.types import Role
from support.byte_tokenizer import TEMPLATE, byte_tokenizer
from support.fake_answers import answer_text
from support.fake_cluster import FakeCluster
from support.ports import free_port
from support.sse import events, is_done
from support.waiting import eventually


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A deployment whose model is only a tokenizer: a router needs no more of it."""
    model = tmp_path / "bytes"
    model.mkdir()
    byte_tokenizer()._tokenizer.save(str(model / "tokenizer.json"))
    settings = {"chat_template": TEMPLATE, "eos_token": "<eos>"}
    (model / "tokenizer_config.json").write_text(json.dumps(settings))
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"")
    path = tmp_path / "config.yaml"
    path.write_text(
        f"model: {model}\nrouter: {{http: '127.0.0.1:{free_port()}', "
        f"grpc: '127.0.0.1:{free_port()}'}}\n"
    )
    return path


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "router", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield child
    finally:
        if child.returncode is None:
            child.kill()
        await child.communicate()


def address(config: Path, kind: str) -> str:
    return config.read_text().partition(f"{kind}: '")[2].partition("'")[0]


@asynccontextmanager
async def serving(config: Path) -> AsyncIterator[tuple]:
    cluster = FakeCluster()
    await cluster.start()
    try:
        await cluster.add("prefill-0", Role.PREFILL)
        await cluster.add("decode-0", Role.DECODE)
        arguments = ("--config", str(config), "--controller", cluster.controller)
        async with (
            process(*arguments) as child,
            httpx.AsyncClient(base_url=f"http://{address(config, 'http')}") as http,
        ):
            async with asyncio.timeout(30):
                while not await is_ready(http):
                    assert child.returncode is None
                    await asyncio.sleep(0.02)
            yield cluster, child, http
    finally:
        await cluster.close()


async def is_ready(http: httpx.AsyncClient) -> bool:
    try:
        return (await http.get("/ready")).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_serves_and_stops_on_a_signal(config, signum):
    async with serving(config) as (cluster, child, http):
        decode = cluster.workers["decode-0"]
        decode.gate = asyncio.Semaphore(0)
        body = {"model": "bytes", "prompt": "hello", "max_tokens": 4, "temperature": 0}
        stream = asyncio.create_task(http.post("/v1/completions", json={**body, "stream": True}))
        await eventually(lambda: decode.active == 1)
        child.send_signal(signum)
        for _ in range(3):
            decode.gate.release()
        text = (await stream).text
        assert is_done(text), "a stream that ends within the grace is whole"
        assert "".join(e["choices"][0]["text"] for e in events(text)) == answer_text("hello", 4)
        out, err = await child.communicate()
        assert child.returncode == 0, err.decode()
        assert out == b"", "logs go to stderr"
        assert b"Traceback" not in err


async def test_a_killed_router_leaves_nothing_on_the_workers(config):
    async with serving(config) as (cluster, child, http):
        decode = cluster.workers["decode-0"]
        decode.gate = asyncio.Semaphore(0)
        body = {"model": "bytes", "prompt": "hello", "max_tokens": 4}
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        await eventually(lambda: decode.active == 1)
        child.kill()
        with pytest.raises(httpx.TransportError):
            await request
        await eventually(lambda: all(not worker.active for worker in cluster.everyone))


@pytest.mark.parametrize("kind", ["http", "grpc"])
async def test_a_port_in_use_is_one_line_and_exit_code_1(config, kind):
    taken = address(config, kind)
    host, port = taken.split(":")
    with socket.create_server((host, int(port))):
        async with process("--config", str(config), "--controller", "127.0.0.1:1") as child:
            out, err = await child.communicate()
    assert child.returncode == 1
    last = err.decode().strip().splitlines()[-1]
    assert last.startswith(f"router: router.{kind}: cannot listen on {taken}")
    assert b"Traceback" not in err and out == b""


async def test_a_missing_model_is_one_line_and_exit_code_1(config):
    arguments = ("--config", str(config), "--controller", "127.0.0.1:1", "--set", "model=./none")
    async with process(*arguments) as child:
        _, err = await child.communicate()
    assert child.returncode == 1
    assert len(err.decode().strip().splitlines()) == 1 and b"none" in err


async def test_a_wrong_key_is_one_line_and_exit_code_1(config):
    arguments = ("--config", str(config), "--controller", "127.0.0.1:1", "--set", "router.no=1")
    async with process(*arguments) as child:
        _, err = await child.communicate()
    assert child.returncode == 1
    lines = err.decode().strip().splitlines()
    assert len(lines) == 1 and lines[0].endswith("router.no: unknown key")
