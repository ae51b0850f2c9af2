"""A decode worker of two ranks, behind a prefill worker of one, under a real `pdserve up`: the
answers of one process, and one life for both."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from test_faults import Stream, wait_replaced
from transformers import LlamaForCausalLM

from support.byte_model import save_byte_model
from support.live import Live, deployment, wait_until


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_model(tmp_path_factory.mktemp("tiny-llama-with-tokenizer"))


@pytest.fixture(scope="module")
def cluster(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    settings = (
        f"model={model_dir}",
        "served_model_name=smollm2-135m",  # what the helpers ask for
        "dtype=float32",
        "engine.num_kv_blocks=64",
        "pools.decode.tensor_parallel_size=2",
    )
    log = tmp_path_factory.mktemp("tensor-parallel") / "up.log"
    with deployment("local.yaml", log, settings) as live:
        yield live
        last = ranks(live)
    assert len(last) == 3
    assert not any(process.is_running() for process in last)


def ranks(cluster: Live) -> list[psutil.Process]:
    """The processes of all workers."""
    below = psutil.Process(cluster.process.pid).children(recursive=True)
    return [process for process in below if "WorkerActor" in " ".join(process.cmdline())]


def greedy(model_dir: Path, prompt: list[int], count: int) -> list[int]:
    model = LlamaForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return output[0, len(prompt) :].tolist()


def test_a_killed_rank_takes_its_worker_along_and_the_stream_goes_on(
    cluster: Live, model_dir: Path
) -> None:
    prompt = [(7 * i) % 250 for i in range(60)]
    expected = greedy(model_dir, prompt, 400)
    first = Stream(cluster, prompt, 8)
    assert first.outcome() == "complete"
    assert first.ids == expected[:8]
    (prefill,), (worker,) = cluster.workers("prefill"), cluster.workers("decode")
    processes = [process for process in ranks(cluster) if process.pid != prefill["pid"]]
    assert len(processes) == 2 and worker["pid"] in {p.pid for p in processes}
    stream = Stream(cluster, prompt, 400)
    wait_until(lambda: len(stream.ids) > 8, 20, "a stream that runs")
    (follower,) = (p for p in processes if p.pid != worker["pid"])
    os.kill(follower.pid, signal.SIGKILL)
    assert stream.outcome() == "complete"
    assert stream.ids == expected
    wait_replaced(cluster, worker)
    wait_until(lambda: not any(p.is_running() for p in processes), 20, "the end of both ranks")
    assert len(ranks(cluster)) == 3
    assert cluster.workers("prefill")[0]["incarnation"] == prefill["incarnation"]
    cluster.wait_idle()
