"""`pdserve bench` and `pdserve compare` as a person meets them."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from fake_llm import FakeLlm, Script, serving, steady
from typer.testing import CliRunner

import cli.compare
from cli.bench import bench
from cli.compare import compare
from cli.compare_report import difference, read_counters, reasons
from cli.compare_sides import BASE, CANDIDATE, CONDITIONAL, Side, make_sides
from core.errors import ConfigError
from loadgen.chart import LabelledRun
from loadgen.record import RequestRecord
from loadgen.runner import ClientLoad, RunResult
from loadgen.summary import summarize

ROOT = Path(__file__).parents[2]
app = typer.Typer(pretty_exceptions_enable=False)
app.command()(bench)
app.command()(compare)


def pdserve(*arguments: object):
    return CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.fixture
def llm():
    with serving(FakeLlm(script_for=lambda body: steady(body["max_tokens"], 0.01, 0.002))) as it:
        yield it


def test_bench_prints_and_writes_what_it_measured(llm, tmp_path):
    result = pdserve(
        "bench", "--url", llm.url, "--num-requests", 12, "--concurrency", 3,
        "--input-len", "uniform:5:50", "--output-len", 6, "--slo-ttft", 5, "--slo-tpot", 5,
        "--json", tmp_path / "x.json", "--csv", tmp_path / "x.csv", "--plots", tmp_path / "plots",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "12 of 12" in result.stdout and "goodput" in result.stdout
    data = json.loads((tmp_path / "x.json").read_text())
    (run,) = data["runs"]
    assert run["requests"]["ok"] == 12 and run["output_tokens"] == 72
    assert run["slo_attainment"] == 1.0
    assert data["options"]["input_len"] == "uniform:5:50"
    assert len((tmp_path / "x.csv").read_text().splitlines()) == 13
    assert "<svg" in (tmp_path / "plots" / "report.html").read_text()
    assert len(llm.bodies) == 13  # one warm-up


def test_a_sweep_measures_each_rate_with_fresh_prompts(llm, tmp_path):
    result = pdserve("bench", "--url", llm.url, "--num-requests", 5, "--rate", "50,200",
                     "--output-len", 2, "--json", tmp_path / "x.json")  # fmt: skip
    assert result.exit_code == 0, result.output
    loads = [run["load"] for run in json.loads((tmp_path / "x.json").read_text())["runs"]]
    assert loads == ["50 requests/s", "200 requests/s"]
    prompts = [tuple(body["prompt"]) for body in llm.bodies]
    assert len(set(prompts)) == len(prompts)


def test_a_trace_gives_lengths_and_prefixes(llm, tmp_path):
    trace = tmp_path / "m.jsonl"
    trace.write_text("".join(
        json.dumps({"timestamp": i * 10, "input_length": 1024, "output_length": 3,
                    "hash_ids": [0, i + 1]}) + "\n" for i in range(4)
    ))  # fmt: skip
    result = pdserve("bench", "--url", llm.url, "--trace", trace, "--warmup", 0,
                     "--length-scale", 0.25, "--max-requests", 3)  # fmt: skip
    assert result.exit_code == 0, result.output
    prompts = [body["prompt"] for body in llm.bodies]
    assert [len(prompt) for prompt in prompts] == [256] * 3
    assert len({tuple(prompt[:128]) for prompt in prompts}) == 1
    assert len({tuple(prompt[128:]) for prompt in prompts}) == 3


def test_all_requests_failing_is_exit_code_1_and_some_is_0(llm):
    llm.script_for = lambda body: Script([], status=503)
    failed = pdserve("bench", "--url", llm.url, "--num-requests", 3, "--warmup", 0)
    assert failed.exit_code == 1
    assert "no request succeeded: HTTP 503" in failed.stderr
    assert "failed: HTTP 503" in failed.stdout
    llm.script_for = lambda body: steady(2) if len(llm.bodies) % 2 else Script([], status=503)
    assert pdserve("bench", "--url", llm.url, "--num-requests", 4, "--warmup", 0).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--rate", "1", "--concurrency", "1"), "not both"),
        (("--rate", "fast"), "--rate fast"),
        (("--rate", "0"), "--rate 0"),
        (("--concurrency", "1.5"), "--concurrency 1.5"),
        (("--input-len", "zipf"), "--input-len zipf"),
        (("--endpoint", "embeddings"), "--endpoint embeddings"),
        (("--extra", "[1]"), "--extra"),
        (("--extra", "{oops"), "--extra: not JSON"),
        (("--prompts", "poems"), "--prompts poems"),
        (("--slo-ttft", "0"), "--slo-ttft 0"),
        (("--burstiness", "-1"), "--burstiness -1"),
        (("--trace", "none.csv"), "none.csv"),
    ],
)  # fmt: skip
def test_a_wrong_option_is_one_line(llm, arguments, said):
    result = pdserve("bench", "--url", llm.url, *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("pdserve: error: ") and result.stderr.count("\n") == 1
    assert said in result.stderr
    assert not llm.bodies


def test_ctrl_c_prints_what_was_measured_so_far(llm):
    code = "import typer; from cli.bench import bench; typer.run(bench)"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "--url", llm.url, "--num-requests", "100000",
         "--concurrency", "2", "--output-len", "4"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 30
        while len(llm.bodies) < 20:
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "requests ok" in out and "TTFT" in out
    assert "Traceback" not in err


# ---------------------------------------------------------------- compare


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "model: m\npools:\n  prefill: {replicas: 2, resources: {GPU: 1}}\n"
        "  decode: {replicas: 1, resources: {GPU: 1}, engine: {max_num_seqs: 7}}\n"
    )
    return path


def test_both_sides_have_the_same_resources(config_file):
    from core.config import load_config

    base, candidate, conditional = make_sides(config_file, (), (), ("dtype=float32",), None, None)
    assert base.resources == candidate.resources == conditional.resources == "3 workers, 3 GPU"
    colocated = load_config(config_file, base.overrides)
    assert (colocated.mode, colocated.pools.colocated.replicas) == ("colocated", 3)
    assert colocated.engine_for("colocated").max_num_seqs == 7
    assert colocated.dtype == "auto"
    apart = [load_config(config_file, side.overrides) for side in (candidate, conditional)]
    assert [config.dtype for config in apart] == ["float32"] * 2
    assert [config.router.max_local_prefill_tokens for config in apart] == [0, 256]


@pytest.mark.parametrize(("of_the_file", "asked", "used"), [(0, 100, 100), (64, None, 64)])
def test_the_conditional_sides_limit_is_the_options_or_the_files(
    tmp_path, of_the_file, asked, used
):
    from core.config import load_config

    path = tmp_path / "x.yaml"
    path.write_text(f"model: m\nrouter: {{max_local_prefill_tokens: {of_the_file}}}\n")
    _, candidate, conditional = make_sides(path, (), (), (), None, asked)
    limits = [
        load_config(path, side.overrides).router.max_local_prefill_tokens
        for side in (candidate, conditional)
    ]
    assert limits == [0, used]


def test_the_files_own_colocated_pool_and_the_option_come_first(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("model: m\nmode: colocated\npools: {colocated: {replicas: 5}}\n")
    base, candidate = make_sides(path, (), (), (), None, 0)
    assert base.resources == "5 workers, all cores"
    assert candidate.resources == "2 workers, all cores"
    assert make_sides(path, (), (), (), 1, None)[0].resources == "1 worker, all cores"
    with pytest.raises(ConfigError, match="pools.nothing"):
        make_sides(path, ("pools.nothing=1",), (), (), None, None)


def measured_run(label: str, gap_s: float) -> LabelledRun:
    records = [
        RequestRecord(i, 0.0, 0.0, ended_s=1.0, token_times_s=[0.1, 0.1 + gap_s, 0.1 + 2 * gap_s],
                      wanted_prompt_tokens=100, wanted_output_tokens=3)
        for i in range(10)
    ]  # fmt: skip
    summary = summarize(RunResult(records, 1.0, ClientLoad(0.1, [0.0])))
    return LabelledRun(label, records, {**summary, "prefix_share": 0.25, "left_out": 0})


COUNTERS = {
    **read_counters({"workers": []}, ""),
    "tokens_prefilled_total": 750.0, "prefix_hit_tokens_total": 250.0,
}  # fmt: skip


@pytest.fixture
def scripted(monkeypatch):
    """No deployment is started: each side's gap between tokens is given, and the order of the
    measurements is returned."""
    order: list[str] = []

    def use(gaps: dict[str, float], fail_after: int | None = None) -> list[str]:
        def run_once(job, side, repetition, repetitions):
            if len(order) == fail_after:
                raise KeyboardInterrupt
            order.append(side.name)
            return measured_run(side.name, gaps[side.name] * (1 + 0.01 * repetition)), COUNTERS

        monkeypatch.setattr(cli.compare, "run_once", run_once)
        return order

    return use


@pytest.mark.parametrize(
    ("apart", "answer", "best"),
    [
        (0.01, "Yes", "disaggregated"),
        (0.2, "No", "colocated"),
        (0.05, "No clear difference", "not clear"),
    ],
)
def test_compare_says_which_wins(scripted, config_file, tmp_path, apart, answer, best):
    order = scripted({BASE: 0.05, CANDIDATE: apart})
    result = pdserve("compare", config_file, "--conditional", 0, "--json", tmp_path / "c.json",
                     "--markdown", tmp_path / "c.md", "--plots", tmp_path / "p")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert order == [BASE, CANDIDATE, CANDIDATE, BASE, BASE, CANDIDATE]
    assert result.stdout.split("Waiting")[-1].split("\n")[1].startswith(answer)
    data = json.loads((tmp_path / "c.json").read_text())
    (verdict,) = data["verdicts"]
    assert (verdict["candidate"], verdict["base"]) == (CANDIDATE, BASE)
    assert verdict["answer"] == {"Yes": "yes", "No": "no"}.get(answer, "no clear difference")
    assert len(data["sides"][0]["repetitions"]) == 3
    written = (tmp_path / "c.md").read_text()
    assert written.startswith("# pdserve compare x.yaml\n\n**" + answer)
    (row,) = [line for line in written.splitlines() if line.startswith("| ITL p99")]
    assert row.endswith(f"| {best} |")
    assert "<svg" in (tmp_path / "p" / "report.html").read_text()


def test_three_sides_are_compared_each_with_each(scripted, config_file, tmp_path):
    """Two that do not differ from each other share the win."""
    order = scripted({BASE: 0.05, CANDIDATE: 0.0101, CONDITIONAL: 0.01})
    result = pdserve("compare", config_file, "--json", tmp_path / "c.json",
                     "--markdown", tmp_path / "c.md")  # fmt: skip
    assert result.exit_code == 0, result.output
    assert order[:6] == [BASE, CANDIDATE, CONDITIONAL, CONDITIONAL, CANDIDATE, BASE]
    verdicts = json.loads((tmp_path / "c.json").read_text())["verdicts"]
    assert [(v["candidate"], v["base"], v["answer"]) for v in verdicts] == [
        (CANDIDATE, BASE, "yes"),
        (CONDITIONAL, BASE, "yes"),
        (CONDITIONAL, CANDIDATE, "no clear difference"),
    ]
    rows = (tmp_path / "c.md").read_text().splitlines()
    (row,) = [line for line in rows if line.startswith("| ITL p99")]
    assert row.endswith("| disaggregated, conditional |") and "-80%" in row


def test_repetitions_can_be_added_to_those_of_before(scripted, config_file, tmp_path):
    """Two are too few to say anything, three are not."""
    written = tmp_path / "c.json"
    arguments = ("compare", config_file, "--conditional", 0, "--json", written, "--resume")
    order = scripted({BASE: 0.05, CANDIDATE: 0.01})
    assert "No clear difference" in pdserve(*arguments, "--repetitions", 2).stdout
    result = pdserve(*arguments, "--repetitions", 1, "--plots", tmp_path / "p")
    assert "\nYes" in result.stdout, result.output
    assert order[4:] == [BASE, CANDIDATE]  # as the third repetition would have been
    assert len(json.loads(written.read_text())["sides"][0]["repetitions"]) == 3
    other = pdserve(*arguments, "--rate", 3)
    assert other.exit_code == 1 and "of another load" in other.stderr
    assert "needs --json" in pdserve("compare", config_file, "--resume").stderr
    written.write_text("[]")
    assert "not what compare writes" in pdserve(*arguments).stderr


def test_ctrl_c_reports_the_complete_repetitions(scripted, config_file):
    scripted({BASE: 0.05, CANDIDATE: 0.01, CONDITIONAL: 0.01}, fail_after=3)
    result = pdserve("compare", config_file)
    assert result.exit_code == 130
    assert "No clear difference" in result.stdout  # one of each shows no noise


def test_ctrl_c_before_all_were_measured_is_said(scripted, config_file):
    scripted({BASE: 0.05, CANDIDATE: 0.01, CONDITIONAL: 0.01}, fail_after=2)
    result = pdserve("compare", config_file)
    assert result.exit_code == 1
    assert "before all sides were measured" in result.stderr


def test_a_comparison_is_of_one_load(config_file):
    result = pdserve("compare", config_file, "--rate", "1,2")
    assert result.exit_code == 1 and "one load" in result.stderr


def test_a_deployment_that_does_not_start_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = tmp_path / "x.yaml"
    path.write_text(f"model: {tmp_path}/nothing.gguf\n")
    result = pdserve("compare", path, "--repetitions", 1)
    assert result.exit_code == 1
    assert "did not start" in result.stderr and "nothing.gguf" in result.stderr
    assert result.stderr.count("\n") == 1


def test_counters_are_summed_over_workers_and_read_from_metrics():
    workers = [
        {"tokens_prefilled_total": 5, "kv_bytes_received_total": 7},
        {"tokens_prefilled_total": 6},
    ]
    metrics = (
        "# HELP pdserve_kv_transfer_seconds x\n"
        "pdserve_kv_transfer_seconds_sum 1.5\npdserve_kv_transfer_seconds_count 3.0\n"
        'pdserve_queue_time_seconds_sum{phase="prefill"} 0.25\n'
    )
    found = read_counters({"workers": workers}, metrics)
    assert found["tokens_prefilled_total"] == 11 and found["kv_bytes_received_total"] == 7
    assert found["kv_transfer_seconds"] == 1.5 and found["kv_transfers"] == 3
    assert found["prefill_queue_seconds"] == 0.25
    gained = difference(found, {**found, "kv_transfers": 5.0})
    assert gained["kv_transfers"] == 2 and gained["kv_transfer_seconds"] == 0


def test_reasons_name_the_numbers():
    moved = {
        **COUNTERS, "kv_transfers": 4.0, "kv_transfer_seconds": 0.2,
        "kv_bytes_received_total": 8e6, "prefill_queued": 2.0, "prefill_queue_seconds": 0.1,
        "decided_local": 1.0, "decided_disaggregated": 3.0,
    }  # fmt: skip
    base = Side("one", (), "", [measured_run("a", 0.4)], [COUNTERS])
    candidate = Side("two", (), "", [measured_run("b", 0.05)], [moved])
    said = " ".join(reasons([base, candidate]))
    assert "97% of the load's tokens; 25% of them repeat" in said
    assert "25% one, 25% two" in said
    assert "2.0 MB and 50.0 ms of transfer a hand-over, 0.04 GB/s" in said
    assert "400 ms one, 50 ms two" in said
    assert "two 50 ms for prefill" in said
    assert "on the decode worker, two: 25%" in said
