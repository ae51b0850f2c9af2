"""A worker of two processes: rank 0 here, as everywhere in these tests, and rank 1 in another."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from core.config import Config, parse_config
from core.errors import EngineError, StalePeerError
from core.types import Role
from core.worker_settings import WorkerSettings
from decode_worker import DecodeWorker
from rpc import codec, worker_pb2_grpc
from rpc import worker_pb2 as pb
from rpc.channel import make_channel
from support.pair import prompt, request, start_worker, stop_worker, with_rendezvous

TESTS = Path(__file__).parents[1]


def config_of(model_dir: Path, ranks: int) -> str:
    return (
        f"model: {model_dir}\ndtype: float32\nmode: colocated\n"
        "engine: {block_size: 8, num_kv_blocks: 64, max_num_batched_tokens: 32, threads: 1}\n"
        f"pools: {{colocated: {{tensor_parallel_size: {ranks}}}}}\n"
    )


async def tokens_of(worker: DecodeWorker, *prompts: list[int], max_tokens: int = 12) -> Any:
    """What the worker answers to requests at once; an error takes the place of an answer."""
    async with make_channel(worker.info.address) as channel:
        stub = worker_pb2_grpc.DecodeServiceStub(channel)

        async def one(tokens: list[int]) -> list[int]:
            wanted = codec.request_to_pb(request(tokens, max_tokens=max_tokens))
            incarnation = worker.info.incarnation
            answer = []
            async for event in stub.Decode(
                pb.DecodeRequest(request=wanted, incarnation=incarnation)
            ):
                answer += [token.id for token in event.tokens.tokens]
            return answer

        return await asyncio.gather(*map(one, prompts), return_exceptions=True)


@asynccontextmanager
async def two_processes(
    model_dir: Path, tmp_path: Path
) -> AsyncIterator[tuple[DecodeWorker, subprocess.Popen[str]]]:
    path = tmp_path / "tp2.yaml"
    path.write_text(config_of(model_dir, 2))
    config: Config = parse_config(path.read_text())
    settings = with_rendezvous(WorkerSettings("colocated-0", Role.COLOCATED, config))
    with subprocess.Popen(
        [sys.executable, "-m", "support.rank_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdin is not None
            wanted = {
                "worker_id": settings.worker_id,
                "role": "colocated",
                "config": str(path),
                "rank": 1,
                "rendezvous": settings.rendezvous,
            }
            process.stdin.write(json.dumps(wanted) + "\n")
            process.stdin.flush()
            worker = DecodeWorker(settings)
            await worker.start(lambda text: None)
            try:
                yield worker, process
            finally:
                await worker.stop()
        finally:
            process.kill()


async def test_two_processes_say_what_one_says_and_stop_in_order(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    prompts = [prompt(40), prompt(9), [*prompt(40), 3]]
    alone = await start_worker(parse_config(config_of(tiny_model_dir, 1)), Role.COLOCATED)
    assert isinstance(alone, DecodeWorker)
    expected = await tokens_of(alone, *prompts)
    await stop_worker(alone)
    assert [len(tokens) for tokens in expected] == [12, 12, 12]
    async with two_processes(tiny_model_dir, tmp_path) as (worker, process):
        assert await tokens_of(worker, *prompts) == expected
        assert await tokens_of(worker, *prompts) == expected  # now from the prefix cache
        _, address = worker.runtime.followers.addresses
        async with make_channel(address) as channel:
            stub = worker_pb2_grpc.RankServiceStub(channel)
            with pytest.raises(Exception, match="incarnation old is gone") as refused:
                await stub.Attend(pb.AttendRequest(incarnation="old")).read()
            assert refused.value.code().name == StalePeerError.grpc_status
        assert process.stdin is not None
        await worker.stop()
        process.stdin.write("stop\n")
        process.stdin.flush()
        assert await asyncio.to_thread(process.wait, 20) == 0
        assert not worker.failed.done()


async def test_a_killed_rank_ends_its_worker_with_one_clear_error(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    async with two_processes(tiny_model_dir, tmp_path) as (worker, process):
        running = asyncio.create_task(tokens_of(worker, prompt(30), prompt(20), max_tokens=400))
        async with asyncio.timeout(20):
            while (await worker.runtime.run_on_engine(lambda e: e.num_running)) < 2:
                await asyncio.sleep(0.01)
        os.kill(process.pid, signal.SIGKILL)
        errors = await asyncio.wait_for(running, 20)
        reason = await asyncio.wait_for(worker.failed, 20)
        assert "rank" in str(reason)
        for error in errors:
            assert error.code().name == EngineError.grpc_status
            assert "rank" in error.details(), error


async def test_an_idle_worker_notices_a_killed_rank(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with two_processes(tiny_model_dir, tmp_path) as (worker, process):
        os.kill(process.pid, signal.SIGKILL)
        reason = await asyncio.wait_for(worker.failed, 20)
        assert "rank 1 of colocated-0 is gone" in str(reason)


async def test_a_rank_ends_when_rank_0_is_gone(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with two_processes(tiny_model_dir, tmp_path) as (worker, process):
        await worker.runtime.followers.close()  # as the end of the process would
        assert process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 20)
        assert "rank 0 is gone" in line
        assert await asyncio.to_thread(process.wait, 20) == 1
