"""A deployment whose laws are known is measured: its profile must say those laws again."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.planner_side_by_side import side_by_side, trace_of
from cli.main import app
from core.config import parse_config
from core.errors import ConfigError, UnavailableError
from loadgen.benchmark import Prepared
from loadgen.client import Target
from loadgen.prompt import TokenPrompts
from loadgen.record import RequestRecord
from planner.machines import build
from planner.measure import Measurer
from planner.profile import Profile, load_profile, profile_of, save_profile
from planner.shared_host import Slowdown
from planner.step_model import FittedModel
from support.virtual_time import run_virtual

STEPS = FittedModel(5.0, 1.0, 2e-4, 12.0, 0.5, 0.002)
TRUTH = Profile(
    "m", {1: STEPS}, {1: 16_000}, 23_040.0, 2e9, 0.006, 0.004, Slowdown(1.3, 1.2), 64
)  # fmt: skip


class KnownDeployment:
    """A client and the deployment behind it, in virtual time. One prompt at a time is computed;
    each sequence takes its steps by itself."""

    def __init__(self, truth: Profile = TRUTH) -> None:
        self.target = Target("http://known", "m")
        self.truth = truth
        self.fails = False
        self.workers = [self._worker("prefill"), self._worker("decode")]
        self._prefill = asyncio.Lock()
        self._decoding: dict[int, int] = {}  # tokens of KV, by request
        self._timelines: list[dict[str, Any]] = []

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def _worker(self, role: str) -> dict[str, Any]:
        return {"role": role, "kv_blocks": {"total": 1000}, "block_size": 16,
                "kv_block_bytes": 16 * 23_040, "max_num_seqs": 64}  # fmt: skip

    async def get(self, path: str, **params: int) -> Any:
        if path == "/cluster":
            return {"workers": self.workers}
        if path == "/debug/requests":
            recent = self._timelines[-params["limit"] :][::-1]
            return {"requests": [{k: t[k] for k in ("id", "num_prompt_tokens")} for t in recent]}
        return self._timelines[int(path.rsplit("/", 1)[1])]

    async def send(self, body: bytes, record: RequestRecord) -> None:
        asked = json.loads(body)
        num_prompt, num_output = len(asked["prompt"]), asked["max_tokens"]
        record.sent_s = self.now()
        if self.fails:
            record.error = "timeout"
            return
        await asyncio.sleep(self.truth.dispatch_s)
        async with self._prefill:
            seconds = STEPS.step(num_prompt, num_prompt * num_prompt / 2, 0, 0)
            if self._decoding and self.truth.slowdown is not None:
                seconds *= self.truth.slowdown.prefill
            kv_bytes = num_prompt * 23_040
            self._note(num_prompt, seconds, kv_bytes)
            await asyncio.sleep(seconds)
        record.token_times_s.append(self.now())
        if num_output > 1:
            await asyncio.sleep(self.truth.hand_over_s + kv_bytes / self.truth.link_bytes_per_s)
            await self._decode(record, num_prompt, num_output - 1)
        record.ended_s = self.now()

    async def _decode(self, record: RequestRecord, num_prompt: int, num_tokens: int) -> None:
        for step in range(num_tokens):
            self._decoding[record.index] = num_prompt + 1 + step
            seconds = STEPS.step(0, 0.0, len(self._decoding), sum(self._decoding.values()))
            if self._prefill.locked() and self.truth.slowdown is not None:
                seconds *= self.truth.slowdown.decode
            await asyncio.sleep(seconds)
            record.token_times_s.append(self.now())
        del self._decoding[record.index]

    def _note(self, num_prompt: int, seconds: float, kv_bytes: int) -> None:
        attempt = {
            "decision": "disaggregated",
            "prefill": {"chunks": [{"seconds": seconds}]},
            "decode": {"kv_bytes": kv_bytes,
                       "kv_transfer_seconds": kv_bytes / self.truth.link_bytes_per_s},
        }  # fmt: skip
        self._timelines.append(
            {"id": len(self._timelines), "num_prompt_tokens": num_prompt,
             "sequences": [{"attempts": [attempt]}]}
        )  # fmt: skip


def measured(deployment: KnownDeployment) -> Profile:
    async def measure() -> Profile:
        prepared = Prepared(deployment, TokenPrompts(), None, [])  # type: ignore[arg-type]
        measurer = Measurer(prepared)
        measurer._get = deployment.get  # type: ignore[method-assign]
        return profile_of(await measurer.measure())[0]

    return run_virtual(measure())


def test_a_known_deployment_is_found_again():
    profile = measured(KnownDeployment())
    found = profile.steps[1]
    assert found.step(500, 125_000, 0, 0) == pytest.approx(STEPS.step(500, 125_000, 0, 0), rel=0.01)
    for batch, context in ((1, 100), (4, 400), (8, 80)):
        kv = batch * context
        assert found.step(0, 0.0, batch, kv) == pytest.approx(
            STEPS.step(0, 0.0, batch, kv), rel=0.05
        )
    assert profile.link_bytes_per_s == pytest.approx(2e9, rel=1e-6)
    assert profile.hand_over_s == pytest.approx(0.006, abs=0.001)
    assert profile.dispatch_s == pytest.approx(0.004, rel=0.01)
    assert profile.slowdown is not None
    assert profile.slowdown.prefill == pytest.approx(1.3, rel=0.02)
    assert profile.slowdown.decode == pytest.approx(1.2, rel=0.05)
    assert (profile.model, profile.kv_tokens, profile.kv_bytes_per_token) == (
        "m", {1: 16_000}, 23_040.0
    )  # fmt: skip


def test_workers_that_do_not_disturb_each_other_have_no_slowdown():
    profile = measured(KnownDeployment(replace(TRUTH, slowdown=None)))
    assert profile.slowdown is not None
    assert profile.slowdown.prefill == pytest.approx(1.0, abs=0.01)
    assert profile.slowdown.decode == pytest.approx(1.0, abs=0.05)


def test_a_deployment_of_another_shape_is_refused():
    deployment = KnownDeployment()
    deployment.workers.append(deployment.workers[0])
    with pytest.raises(ConfigError, match="one prefill and one decode worker"):
        measured(deployment)


def test_a_request_that_fails_ends_the_measurement():
    deployment = KnownDeployment()
    deployment.fails = True
    with pytest.raises(UnavailableError, match="a request failed: timeout"):
        measured(deployment)


def test_the_very_same_requests_are_simulated():
    """One request at a time: the simulation of the truth is the arithmetic itself."""
    records = []
    for index, num_prompt in enumerate((100, 300, 700)):
        prefill = STEPS.step(num_prompt, num_prompt * num_prompt / 2, 0, 0)
        start, first = 50.0 + 10 * index, 50.0 + 10 * index + 0.004 + prefill
        # The time of a hand-over and of ten steps.
        rest = 0.006 + num_prompt * 23_040 / 2e9
        rest += sum(STEPS.step(0, 0.0, 1, num_prompt + 1 + i) for i in range(10))
        record = RequestRecord(index, start, start, token_times_s=[first, first + rest])
        record.prompt_tokens, record.output_tokens = num_prompt, 11
        records.append(record)
    assert [r.arrival for r in trace_of(records).requests] == [0.0, 10.0, 20.0]
    for exact in (False, True):
        figures = side_by_side(records, TRUTH, exact)
        assert [f.name for f in figures] == ["TTFT p50", "TTFT p90", "TPOT p50", "TPOT p90"]
        assert all(abs(figure.error) < 1e-6 for figure in figures), figures


def test_a_profile_travels_in_a_file_and_plans(tmp_path):
    path = tmp_path / "here.json"
    save_profile(path, TRUTH)
    assert load_profile(path) == TRUTH
    (tmp_path / "t.csv").write_text("num_prefill_tokens,num_decode_tokens\n200,40\n400,20\n")
    done = CliRunner().invoke(app, [
        "plan", "--trace", str(tmp_path / "t.csv"), "--hardware", str(path), "--rate", "1",
        "--slo-ttft", "2", "--slo-tpot", "0.05", "--gpus", "3", "--requests", "60",
        "--seconds", "1", "--out", str(tmp_path / "plan.yaml"),
    ])  # fmt: skip
    assert done.exit_code == 0, done.output
    assert "TP1 measured, here.json" in done.stdout
    written = (tmp_path / "plan.yaml").read_text()
    assert "GPU: 1" not in written and "max_num_seqs: 64" in written
    assert parse_config(written).model == "m"


def test_a_profile_knows_its_model(tmp_path):
    save_profile(tmp_path / "here.json", TRUTH)
    with pytest.raises(ConfigError, match="was measured with m, not with llama"):
        build(str(tmp_path / "here.json"), "llama-3.1-8b", 2)
    with pytest.raises(ConfigError, match="say which model"):
        build("h100", None, 2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"steps_ms": {}}, "at least"),
        ({"kv_tokens": {"2": 5}}, "the same degrees"),
        ({"link_bytes_per_s": 0}, "above 0"),
        ({"speed": 3}, "not a performance profile"),
        ({"steps_ms": {"1": {"prefill_base": 1}}}, "not a performance profile"),
    ],
)
def test_a_broken_profile_says_what_is_wrong(tmp_path, change, said):
    path = tmp_path / "x.json"
    save_profile(path, TRUTH)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=said):
        load_profile(path)


def test_a_profile_that_is_not_there_or_no_json(tmp_path):
    with pytest.raises(ConfigError, match="not a performance profile"):
        load_profile(tmp_path / "nothing.json")
    (tmp_path / "x.json").write_text("[1]")
    with pytest.raises(ConfigError, match="not a performance profile"):
        load_profile(tmp_path / "x.json")


def test_the_command_wants_a_name_that_plan_will_know(tmp_path):
    done = CliRunner().invoke(app, ["profile", "--url", "http://x", "--out", str(tmp_path / "x")])
    assert done.exit_code == 1 and ".json" in done.output
