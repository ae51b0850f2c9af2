"""The search, and the command around it."""

import json

import pytest
from typer.testing import CliRunner

from cli.main import app
from core.config import AutoscaleConfig, parse_config
from core.errors import ConfigError
from planner.fit import DecodePoint, PrefillPoint, fit
from planner.fitted import FITTED
from planner.hardware import HARDWARE, MODELS, kv_capacity
from planner.layout import Layout, Pool
from planner.machines import build
from planner.report import as_yaml
from planner.result import Slo
from planner.search import Goal, Searcher, layouts
from planner.simulate import Options
from planner.step_model import FittedModel, RooflineModel
from planner.trace import Trace, TraceRequest, sampled

LENGTHS = [TraceRequest(0.0, 200 + 37 * i, 20 + 7 * i) for i in range(40)]
TRACE = sampled(LENGTHS, 400, 5.0)
GOAL = Goal(Slo(0.5, 0.03), seconds=4.0, requests=200)


def plan_for(gpus: int, trace: Trace = TRACE, goal: Goal = GOAL):
    return Searcher(build("h100", "llama-3.1-8b", gpus), trace, goal).plan(gpus)


@pytest.mark.parametrize("gpus", [1, 2, 3, 8, 50])
def test_no_layout_asks_for_more_gpus_than_there_are(gpus):
    found = layouts(gpus, (1, 2, 4, 8))
    assert found and all(0 < layout.gpus <= gpus for layout in found)
    assert any(layout.is_disaggregated for layout in found) == (gpus > 1)
    assert all(pool.replicas > 0 for layout in found for pool in layout.pools.values())


def test_more_gpus_never_serve_less():
    goodputs = []
    for gpus in (1, 2, 4):
        plan = plan_for(gpus)
        assert all(f.layout.gpus <= gpus for f in plan.best)
        assert plan.smallest is None or plan.smallest.gpus <= gpus
        goodputs.append(plan.best[0].goodput)
    assert goodputs[0] < goodputs[1] * 1.03 < goodputs[2] * 1.06


def test_a_pool_that_grows_never_attains_less():
    searcher = Searcher(build("h100", "llama-3.1-8b", 8), TRACE, GOAL)
    for pools in ("colocated", "split"):
        attained = []
        for n in (1, 2, 4):
            layout = Layout(colocated=Pool(n)) if pools == "colocated" else Layout(Pool(n), Pool(n))
            attained.append(searcher.run(layout, 40.0).attainment(GOAL.slo))
        assert attained[0] - 0.02 <= attained[1] <= attained[2] + 0.02, pools


def test_the_goodput_is_the_edge_of_the_goal():
    searcher = Searcher(build("h100", "llama-3.1-8b", 2), TRACE, GOAL)
    found = searcher.goodput(Layout(Pool(1), Pool(1)))
    assert found is not None and searcher.holds(found.at_goodput)
    assert not searcher.holds(searcher.run(found.layout, found.goodput * 1.3))
    assert searcher.goodput(found.layout, at_least=found.goodput * 1.3) is None


def test_an_slo_shorter_than_a_step_has_no_plan():
    assert plan_for(2, goal=Goal(Slo(0.001, 0.001), seconds=1.0, requests=50)).best == ()


def test_the_same_inputs_give_the_same_plan():
    assert [f.goodput for f in plan_for(2).best] == [f.goodput for f in plan_for(2).best]


def test_exact_and_fast_plans_agree():
    goodputs = []
    for exact in (False, True):
        goal = Goal(GOAL.slo, seconds=1.0, requests=100)
        capability = build("h100", "llama-3.1-8b", 2)
        searcher = Searcher(capability, TRACE, goal, Options(exact=exact))
        found = searcher.goodput(Layout(Pool(1), Pool(1)))
        assert found is not None
        goodputs.append(found.goodput)
    assert goodputs[0] == pytest.approx(goodputs[1], rel=0.1)


def test_the_yaml_is_a_deployment():
    capability = build("h100", "llama-3.1-8b", 8)
    text = as_yaml(Layout(Pool(2, 2), Pool(3)), capability, "two\nlines")
    config = parse_config(text)
    assert (config.pools.prefill.replicas, config.pools.decode.replicas) == (2, 3)
    assert config.pools.prefill.tensor_parallel_size == 2 and config.mode == "disaggregated"
    assert config.pools.prefill.resources == {"GPU": 1.0}
    assert parse_config(as_yaml(Layout(colocated=Pool(1)), capability, "")).mode == "colocated"


def test_the_yaml_says_how_pools_follow_the_load():
    bounds = {"prefill": AutoscaleConfig(min=1, max=8, ttft_p90=0.5),
              "decode": AutoscaleConfig(min=2, max=8, tpot_p90=0.03)}  # fmt: skip
    capability = build("h100", "llama-3.1-8b", 8)
    text = as_yaml(Layout(Pool(2), Pool(3)), capability, "", bounds, switch_roles=True)
    pools = parse_config(text).pools
    assert {"prefill": pools.prefill.autoscale, "decode": pools.decode.autoscale} == bounds
    assert pools.prefill.roles == pools.decode.roles == ["prefill", "decode"]
    assert "autoscale: {min: 1, max: 8, ttft_p90: 0.5}" in text


def test_a_fit_finds_the_coefficients_it_was_made_from():
    truth = FittedModel(5.0, 0.02, 1e-6, 7.0, 0.01, 5e-5)
    prefills = [
        PrefillPoint(1, n + c, c, truth.step(n, n * c + n * n / 2, 0, 0))
        for n in (512, 1024, 4096)
        for c in (0, 2048)
    ]
    decodes = [
        DecodePoint(b, c, truth.step(0, 0.0, b, b * c)) for b in (1, 16, 64) for c in (128, 4096)
    ]
    found = fit(prefills, decodes)
    assert found.max_error < 1e-6
    with pytest.raises(ConfigError, match="three prefill"):
        fit(prefills[:1], decodes)


@pytest.mark.parametrize("key", sorted(k for k in FITTED if k[1] != "qwen3-0.6b"))
def test_the_roofline_is_near_what_is_known(key):
    """Within a factor of two at usual sizes: a guess, and not worse than that. DistServe's OPT
    figures are of an older engine, and slower."""
    hardware, model, tp = HARDWARE[key[0]], MODELS[key[1]], key[2]
    known, guess = FITTED[key], RooflineModel(hardware, model, tp)
    low = 0.4 if model.name.startswith("opt") else 0.6
    for step in ((2048, 2048**2 / 2, 0, 0), (0, 0.0, 32, 32 * 1024)):
        assert low < guess.step(*step) / known.step(*step) < 1.6
    assert kv_capacity(hardware, model, tp) >= 0


def write_trace(path) -> None:
    rows = "".join(
        f"2023-11-16 18:{i // 60:02}:{i % 60:02}.0000000,{300 + i},{10 + i % 50}\n"
        for i in range(300)
    )
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)


def test_the_command_prints_json_and_writes_a_config(tmp_path):
    write_trace(tmp_path / "trace.csv")
    arguments = [
        *("plan", "--trace", str(tmp_path / "trace.csv"), "--hardware", "h100"),
        *("--model", "llama-3.1-8b", "--slo-ttft", "0.5", "--slo-tpot", "0.03", "--gpus", "2"),
        *("--seconds", "2", "--requests", "100", "--cost-per-gpu-hour", "2.5"),
        *("--out", str(tmp_path / "plan.yaml")),
    ]
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    best = report["layouts"][0]
    assert best["gpus"] <= 2 and best["goodput_per_gpu"] > 0
    assert best["cost"]["per_hour"] == 2.5 * best["gpus"]
    assert report["fewest_gpus"]["gpus"] == 1
    assert parse_config((tmp_path / "plan.yaml").read_text()).mode == best["layout"]["mode"]
    more = ["--autoscale", "1..1", "--switch-roles"]
    text = CliRunner().invoke(app, [*arguments, *more])
    assert text.exit_code == 0 and "best of each kind" in text.stdout
    assert "Autoscaled, 1 to 1 workers a pool" in text.stdout
    pools = parse_config((tmp_path / "plan.yaml").read_text()).pools
    assert pools.decode.autoscale == AutoscaleConfig(min=1, max=1, tpot_p90=0.03)
    assert pools.decode.roles == ["prefill", "decode"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--hardware": "abacus"}, "hardware abacus: not known; known are a100"),
        ({"--model": "llama-3.1-70b"}, "does not fit on 1 x h100"),
        ({"--slo-tpot": "0.0001"}, "no layout meets the SLO"),
        ({"--trace": "/nowhere.csv"}, "cannot read trace"),
        ({"--autoscale": "3..2"}, "--autoscale 3..2: expected MIN..MAX workers of each pool"),
        ({"--autoscale": "1..4"}, "up to 4 GPUs"),
    ],
)
def test_the_command_says_what_is_wrong(tmp_path, change, message):
    write_trace(tmp_path / "trace.csv")
    options = {
        "--trace": str(tmp_path / "trace.csv"), "--hardware": "h100", "--model": "llama-3.1-8b",
        "--slo-ttft": "0.5", "--slo-tpot": "0.03", "--gpus": "1", "--requests": "50",
        "--seconds": "1", **change,
    }  # fmt: skip
    done = CliRunner().invoke(app, ["plan", *(part for pair in options.items() for part in pair)])
    assert done.exit_code == 1 and message in done.output
