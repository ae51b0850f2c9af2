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
def computing(
    cpus: set[int], policy: str = "os.SCHED_OTHER"
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Something else has these cores for good, or by that policy what is left of them."""
    code = (
        "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\n"
        f"os.sched_setscheduler(0, {policy}, os.sched_param(0))\n"
        "print(flush=True)\nwhile True: pass"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(cpu)], stdout=subprocess.PIPE)
        for cpu in cpus
    ]
    try:
        for process in started:
            assert process.stdout is not None and process.stdout.readline()
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def seconds_used(processes: "list[subprocess.Popen[bytes]]") -> float:
    """Of cores, by their main threads."""
    files = [Path(f"/proc/{process.pid}/schedstat") for process in processes]
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def read_prompts(path: Path, quantization: Quantization) -> torch.Tensor:
    """Logits after each of a few steps: more than one block of rows, chunks beside each other and
    beside decoding, of lengths that no group divides."""
    files = save_tiny(make_tiny("qwen2-window", head_dim=32, intermediate_size=512), path)
    runner = PagedRunner(load_model(files, "bfloat16", quantization=quantization), num_blocks=256)
    ids = random_ids(500, seed=2)
    steps = [
        {"a": ids[:301]},
        {"a": ids[301:302], "b": ids[:130], "c": ids[7:50]},
        {"d": ids[:23], "b": ids[130:131]},
    ]
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


def share_beside_idle_threads(path: Path) -> float:
    """In a process of its own, whose threads settle: what others of the lowest priority, one on
    each core, get of the cores while it computes."""
    sizes = {"hidden_size": 512, "head_dim": 64, "intermediate_size": 2048}
    files = save_tiny(make_tiny("llama", num_hidden_layers=4, **sizes), path)
    runner = PagedRunner(load_model(files, "bfloat16"), num_blocks=2200)
    ids, cpus = random_ids(400, seed=3), os.sched_getaffinity(0)
    torch.set_num_threads(len(cpus))
    native.settle_threads()
    runner.step({"warm": ids})
    with computing(cpus, "os.SCHED_IDLE") as others:
        used, since = -seconds_used(others), time.monotonic()
        for i in range(20):
            runner.step({f"{i}": ids})
        used, elapsed = used + seconds_used(others), time.monotonic() - since
    return used / (elapsed * len(cpus))


@needs_two_cores
def test_threads_that_wait_for_each_other_do_not_lose_their_cores(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; import test_idle_threads as tests\n"
        "print(tests.share_beside_idle_threads(Path(sys.argv[1])))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths}, stdout=subprocess.PIPE, timeout=120, check=True,
    ).stdout  # fmt: skip
    assert float(said.splitlines()[-1]) < 0.5  # it was 0.73 to 0.86


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
        runner.step({"b": ids[:16]})
        assert told == []  # few rows have no work for them
        runner.step({"c": ids[:17]})
        assert told == ["raised", "let go"]
        runner.step({name: ids[:1] for name in "defghijklmnopqrstuv"})
        assert len(told) == 2  # nobody makes way for those who decode, many as they may be


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
