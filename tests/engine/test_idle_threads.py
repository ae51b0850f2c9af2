"""Threads of the lowest priority that take a share of a prompt's work."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from engine import native
from engine.model.load import load_model
from engine.model.quantised import Quantization
from support.tiny_models import PagedRunner, make_tiny, random_ids, save_tiny

needs_two_cores = pytest.mark.skipif(
    native.library() is None or len(os.sched_getaffinity(0)) < 2,
    reason="no compiler, no AVX512-BF16 or one core",
)
SECONDS = 60


@contextmanager
def idle_threads(count: int) -> Iterator[None]:
    native.set_idle_threads(count)
    try:
        yield
    finally:
        native.set_idle_threads(0)


@contextmanager
def computing(cpus: set[int]) -> Iterator[None]:
    """Something else has these cores for good."""
    code = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nprint(flush=True)\n" + (
        "while True: pass"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(cpu)], stdout=subprocess.PIPE)
        for cpu in cpus
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def read_prompts(path: Path, quantization: Quantization) -> torch.Tensor:
    """Logits after each of a few steps: more than one block of rows, chunks beside each other and
    beside decoding, of lengths that no group divides."""
    files = save_tiny(make_tiny("qwen2-window", head_dim=32, intermediate_size=512), path)
    runner = PagedRunner(load_model(files, "bfloat16", quantization=quantization), num_blocks=256)
    ids = random_ids(500, seed=2)
    steps = [{"a": ids[:301]}, {"a": ids[301:302], "b": ids[:130], "c": ids[7:50]}]
    return torch.cat([runner.step(step) for step in steps])


def has_grown(count: int, before: tuple[int, int]) -> bool:
    return native.hand_counts()[count] > before[count]


@needs_two_cores
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
def test_they_change_no_bit(quantization: Quantization, threads: int, tmp_path: Path) -> None:
    before_threads = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        alone = read_prompts(tmp_path, quantization)
        before, until = native.hand_counts(), time.monotonic() + SECONDS
        with idle_threads(threads):
            while not has_grown(0, before) and time.monotonic() < until:
                assert torch.equal(read_prompts(tmp_path, quantization), alone)
    finally:
        torch.set_num_threads(before_threads)
    assert has_grown(0, before)


@needs_two_cores
def test_others_are_told_while_there_is_work_for_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = []

    class Sign:
        @contextmanager
        def raised(self) -> Iterator[None]:
            told.append("raised")
            yield
            told.append("let go")

    monkeypatch.setattr("engine.model.native_layers.host_sign", Sign)
    files = save_tiny(make_tiny("llama", head_dim=32, intermediate_size=512), tmp_path)
    runner = PagedRunner(load_model(files, "bfloat16"), num_blocks=64)
    ids = random_ids(80, seed=2)
    runner.step({"a": ids[:40]})
    assert told == []  # it has no idle threads
    with idle_threads(1):
        runner.step({"b": ids[:20]})
        assert told == []  # few rows have no work for them
        runner.step({"c": ids[:40]})
        assert told == ["raised", "let go"]


@needs_two_cores
def test_one_that_loses_its_core_is_not_waited_for(tmp_path: Path) -> None:
    alone = read_prompts(tmp_path, "none")
    with idle_threads(1):  # which may be on every core that the process had at first
        read_prompts(tmp_path, "none")
    cpus = os.sched_getaffinity(0)
    own = min(cpus)
    os.sched_setaffinity(0, {own})  # of this thread: the other cores are the idle thread's
    try:
        with idle_threads(1), computing(cpus - {own}):
            before, until = native.hand_counts(), time.monotonic() + SECONDS
            while not has_grown(1, before) and time.monotonic() < until:
                assert torch.equal(read_prompts(tmp_path, "none"), alone)
    finally:
        os.sched_setaffinity(0, cpus)
    assert has_grown(1, before)
