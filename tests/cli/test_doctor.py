import email.utils
import socket

import pytest

from cli import doctor
from cli.doctor import read_probe
from cli.doctor_live import check_clock_of, check_controller, check_pairs, check_workers
from cli.findings import Verdict
from core.config import load_config

GOOD_PROBE = 'noise\nPROBE {"gpus": [], "plugins": ["UCX"]}\n'


@pytest.fixture(autouse=True)
def no_probe(monkeypatch):
    """Loading torch takes seconds; what it says is tested apart."""
    monkeypatch.setattr(doctor, "_run_probe", lambda: GOOD_PROBE)


def test_a_well_machine_ends_with_0(pdserve, config_file, monkeypatch):
    monkeypatch.setattr(doctor, "_LEAST_SHM", 0)
    result = pdserve("doctor", config_file)
    assert result.exit_code == 0, result.output
    for expected in ("is valid", "torch", "NIXL works, with UCX", "are free", "is at"):
        assert expected in result.stdout


def test_what_up_would_fail_of_is_a_problem_with_advice_and_exit_code_1(pdserve, config_file):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        result = pdserve("doctor", config_file, "--set", f"router.http='127.0.0.1:{port}'")
    assert result.exit_code == 1
    assert f"problem: port {port} on 127.0.0.1 is in use" in result.stdout
    assert "->" in result.stdout


def test_a_wrong_file_does_not_end_the_other_checks(pdserve, config_file):
    config_file.write_text("modle: x\n")
    result = pdserve("doctor", config_file)
    assert result.exit_code == 1
    assert "problem: " in result.stdout and "shared memory" in result.stdout


def test_too_little_shared_memory_says_how_to_get_more(tmp_path):
    (finding,) = doctor.check_shared_memory(str(tmp_path), least=1 << 60)
    assert finding.verdict is Verdict.BAD
    assert "--shm-size" in finding.advice


def test_too_little_memory_is_found(config_file, model):
    config = load_config(config_file)
    files = doctor.resolve_model(config.model, download=False)
    assert [f.verdict for f in doctor.check_fit(config, files, 1 << 20)] == [Verdict.BAD]


@pytest.mark.parametrize(
    ("output", "verdicts", "words"),
    [
        (GOOD_PROBE, [Verdict.GOOD] * 2, "NIXL works"),
        ('PROBE {"gpus": ["H100"], "plugins": []}', [Verdict.GOOD, Verdict.NOTE], "no UCX"),
        ('PROBE {"torch": "ImportError: x", "nixl": "y"}', [Verdict.NOTE] * 2, "gRPC instead"),
        ("exit code -11: segfault", [Verdict.BAD], "crashed: exit code -11"),
    ],
)
def test_the_probe_is_read(output, verdicts, words):
    findings = list(read_probe(output))
    assert [f.verdict for f in findings] == verdicts
    assert any(words in f"{f.what} {f.advice}" for f in findings)


def test_a_running_deployment_is_examined_too(pdserve, router_url, monkeypatch):
    monkeypatch.setattr(doctor, "_LEAST_SHM", 0)
    result = pdserve("doctor", "--url", router_url)
    assert result.exit_code == 0, result.output
    for expected in (
        "hears from the controller at 127.0.0.1:7",
        "1 of 2 workers are ready",
        "decode-0 is starting",
        "agrees with this one",
    ):
        assert expected in result.stdout


def test_a_controller_that_is_away_is_a_problem():
    (finding,) = check_controller({"controller": "192.0.2.1:8002", "controller_reachable": False})
    assert finding.verdict is Verdict.BAD
    assert "does not hear from the controller at 192.0.2.1:8002" in finding.what


def test_a_router_that_does_not_answer_is_a_problem(pdserve):
    result = pdserve("doctor", "--url", "http://127.0.0.1:9")
    assert result.exit_code == 1
    assert "problem: nothing serves at http://127.0.0.1:9" in result.stdout


def test_workers_between_which_no_kv_can_pass_are_named_with_what_differs():
    def worker(role: str, number: int, **fields: str) -> dict:
        base = {"model": "a", "block_size": "16", "tensor_parallel_size": "1"}
        return {"id": f"{role}-{number}", "role": role, "compatibility": {**base, **fields}}

    prefill, decode = worker("prefill", 0), worker("decode", 0, block_size="32")
    (finding,) = check_pairs([prefill, decode])  # the hand-over has a bridge for that
    assert finding.verdict is Verdict.GOOD
    other = worker("decode", 1, model="b")
    (finding,) = check_pairs([prefill, decode, other])
    assert finding.verdict is Verdict.BAD
    assert finding.what == "prefill-0 and decode-1 can be no pair: model (a and b)"


def test_a_worker_that_the_router_cannot_reach_is_a_problem():
    worker = {"id": "decode-0", "state": "ready", "reachable": False, "address": "192.0.2.1:5"}
    found = list(check_workers([worker]))
    assert [f.verdict for f in found] == [Verdict.GOOD, Verdict.BAD]
    assert "decode-0 at 192.0.2.1:5 is not reached" in found[1].what


@pytest.mark.parametrize(("seconds", "verdict"), [(2, Verdict.GOOD), (-90, Verdict.NOTE)])
def test_a_clock_that_is_far_from_this_one_is_noted(seconds, verdict):
    now = 1_800_000_000.0
    date = email.utils.formatdate(now + seconds, usegmt=True)
    (finding,) = check_clock_of("http://r", date, now)
    assert finding.verdict is verdict
    assert list(check_clock_of("http://r", "", now)) == []
