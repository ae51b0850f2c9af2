"""`pdserve up` as a process: what it says, how it ends, what it leaves."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable

import psutil
import pytest

PATIENCE_S = 120.0  # a bound for a busy machine, not a measure


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.05)


def read_until(process: subprocess.Popen[str], last: str) -> str:
    """Reads stdout up to the line that holds `last`."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if last in line:
            return said
    raise AssertionError(f"it ended first: {said}{process.communicate()[1]}")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def is_router(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):  # gone, or not reaped yet
        return "cluster.tied_child" in process.cmdline()
    return False


def is_worker(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.name().startswith("ray::WorkerA")
    return False


def is_controller(process: psutil.Process) -> bool:
    return process.name().startswith("ray::ControllerA")


def assert_nothing_left(processes: list[psutil.Process], shm: set[str]) -> None:
    left = [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not left
    assert set(os.listdir("/dev/shm")) <= shm


def test_ctrl_c_ends_everything_with_exit_code_0(start_up, tmp_path):
    shm = set(os.listdir("/dev/shm"))
    process = start_up()
    said = read_until(process, "Ctrl-C stops it")
    for expected in ("Starting Ray", "prefill-0 is ready", "decode-0 is ready", "curl http://"):
        assert expected in said
    processes = family(process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    stdout, stderr = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, stderr) == (0, "")
    assert stdout.endswith("stopped\n")
    assert_nothing_left(processes, shm)
    assert not list((tmp_path / "run").rglob("*.json"))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP], ids=lambda n: n.name)
def test_a_signal_to_the_whole_group_ends_everything_too(start_up, number):
    """As `timeout` or a closed terminal sends it: Ray's own processes may get it too, and first."""
    if number == signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip("ignored here, as under nohup, and so by what is started")
    shm = set(os.listdir("/dev/shm"))
    process = start_up()
    read_until(process, "Ctrl-C stops it")
    processes = family(process)
    os.killpg(process.pid, number)
    stdout, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0
    assert stdout.endswith("stopped\n")
    assert_nothing_left(processes, shm)


def test_the_loss_of_ray_ends_everything_and_is_said(start_up):
    shm = set(os.listdir("/dev/shm"))
    process = start_up()
    read_until(process, "Ctrl-C stops it")
    processes = family(process)
    next(p for p in processes if p.name() == "raylet").kill()  # the parent of all workers
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert stderr.splitlines()[-1].startswith("pdserve: error: Ray's ")
    assert_nothing_left(processes, shm)


def test_a_lost_head_router_and_worker_come_back_and_down_ends_it(start_up, pdserve, config_file):
    """V59: no worker goes for the head, and the head that is back replaces one that dies then."""
    process = start_up()
    read_until(process, "Ctrl-C stops it")
    processes = family(process)
    ours = [p for p in processes if is_worker(p) or is_router(p)]
    next(p for p in processes if p.name() == "gcs_server").kill()
    said = read_until(process, "Ray's head is back")
    assert "requests go on" in said and "prefill-0" not in said and "decode-0" not in said
    assert len(ours) == 3 and all(p.is_running() for p in ours)
    first_router = next(filter(is_router, ours))
    worker = next(filter(is_worker, ours))
    first_router.kill()
    wait_until(
        lambda: [p for p in family(process) if is_router(p) and p != first_router],
        "a second router",
    )
    worker.kill()
    said = read_until(process, "is ready (pid")
    assert "died" in said
    assert f"(pid {worker.pid})" not in said

    processes += family(process)
    result = pdserve("down")
    assert result.exit_code == 0, result.output
    assert "Stopped" in result.stdout
    assert process.wait(PATIENCE_S) == 0
    assert_nothing_left(processes, set(os.listdir("/dev/shm")))
    result = pdserve("down")
    assert result.exit_code == 1
    assert result.stderr == "pdserve: error: nothing runs here\n"


def test_a_worker_that_cannot_load_is_one_line_and_exit_code_1(start_up):
    process = start_up("ModellessWorker")
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert stderr.startswith("pdserve: error: prefill-0: no such model: nothing")
    assert stderr.count("\n") == 1


def test_a_router_that_refuses_is_one_line_with_its_own_words(start_up, config_file):
    with config_file.open("a") as file:
        file.write("served_model_name: refused\n")
    process = start_up()
    _, stderr = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert stderr == "pdserve: error: router: this name is refused\n"


def test_sigkill_takes_router_controller_and_workers_along(start_up, pdserve):
    process = start_up()
    read_until(process, "Ctrl-C stops it")
    ours = [p for p in family(process) if is_router(p) or is_worker(p) or is_controller(p)]
    assert len(ours) == 4
    process.kill()
    _, alive = psutil.wait_procs(ours, timeout=PATIENCE_S)
    assert not [p for p in alive if p.status() != psutil.STATUS_ZOMBIE]
    result = pdserve("down")  # the stale file is found out
    assert result.exit_code == 1
    assert "nothing runs here" in result.stderr
