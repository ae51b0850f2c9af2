"""Requests against a server whose answers are scripted."""

import asyncio

import pytest
from fake_llm import FakeLlm, Script, serving, steady

from core.errors import ConfigError, PdserveError, UnavailableError
from loadgen.benchmark import Service, Workload, fitting, measure, prepare
from loadgen.client import StreamingClient, Target, base_url, server_info
from loadgen.length import parse_length
from loadgen.prompt import TokenPrompts, WordPrompts
from loadgen.record import RequestRecord
from loadgen.runner import Run
from loadgen.summary import Slo, summarize
from loadgen.workload import Arrivals, Synthetic, synthetic_requests, with_arrivals


def synthetic(count, prompt="20", output="5") -> Synthetic:
    return Synthetic(count, parse_length(prompt, "x"), parse_length(output, "x"))


def plan_of(count, arrivals=Arrivals(concurrency=1), **more):
    return with_arrivals(synthetic_requests(synthetic(count, **more), 0), arrivals, 0)


async def one(llm: FakeLlm, script: Script, **target) -> RequestRecord:
    llm.script_for = lambda body: script
    client = StreamingClient(Target(llm.url, "fake", **target))
    record = RequestRecord(0, 0.0, wanted_prompt_tokens=3, wanted_output_tokens=5)
    await client.send(client.target.body([1, 2, 3], 5), record)
    return record


@pytest.fixture
def llm():
    with serving(FakeLlm()) as running:
        yield running


async def test_a_stream_is_measured_chunk_by_chunk(llm):
    record = await one(llm, Script([0.05, 0.15, 0.05], cached=2))
    assert record.is_ok
    assert len(record.token_times_s) == 3  # neither the finish nor the usage is a token
    first, second = record.gaps_s
    assert first > second
    assert record.ttft_s < first + second
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 3, 2)
    assert record.sent_s <= record.token_times_s[0] <= record.token_times_s[-1] <= record.ended_s


async def test_several_tokens_in_a_chunk_are_counted_by_the_server(llm):
    record = await one(llm, Script([0.0, 0.05, 0.05], tokens_per_chunk=4))
    assert (len(record.token_times_s), record.num_output_tokens) == (3, 12)
    assert record.tpot_s == pytest.approx((record.e2e_s - record.ttft_s) / 11)


async def test_without_usage_chunks_are_tokens(llm):
    record = await one(llm, Script([0.0] * 4, usage=False))
    assert record.is_ok
    assert (record.output_tokens, record.num_output_tokens, record.num_prompt_tokens) == (
        None,
        4,
        3,
    )


async def test_a_chat_opening_is_no_token(llm):
    llm.script_for = lambda body: steady(3)
    client = StreamingClient(Target(llm.url, "fake", endpoint="chat"))
    record = RequestRecord(0, 0.0)
    await client.send(client.target.body("two words", 3), record)
    assert record.is_ok
    assert len(record.token_times_s) == 3
    assert llm.bodies[-1]["messages"] == [{"role": "user", "content": "two words"}]


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script([], status=429), "HTTP 429"),
        (Script([], status=500), "HTTP 500"),
        (Script([0.0, 0.0], ends="cut"), "cut off"),
        (Script([0.0, 0.0], ends="error"), "error in stream"),
        (Script([], ends="done"), "no tokens"),
        (Script([], ends="close"), "disconnected"),
    ],
)
async def test_each_failure_has_a_kind(llm, script, kind):
    record = await one(llm, script)
    assert record.error == kind
    assert not record.is_ok


async def test_a_silent_server_is_a_timeout_and_none_a_failed_connect(llm):
    assert (await one(llm, steady(2, first_s=30), timeout_s=0.2)).error == "timeout"
    client = StreamingClient(Target("http://127.0.0.1:1", "fake"))
    record = RequestRecord(0, 0.0)
    await client.send(b"{}", record)
    assert record.error == "connect"


async def test_key_and_extra_fields_are_sent_and_null_removes_one(llm):
    await one(llm, steady(1), api_key="secret", extra={"top_k": 1, "temperature": None})
    assert llm.headers[-1]["authorization"] == "Bearer secret"
    assert llm.bodies[-1]["top_k"] == 1
    assert "temperature" not in llm.bodies[-1]
    assert llm.bodies[-1]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("url", ["h:1", "http://h:1", "http://h:1/", "http://h:1/v1", "h:1/v1/"])
def test_urls_may_end_as_people_write_them(url):
    assert base_url(url) == "http://h:1"


# ---------------------------------------------------------------- loops


async def test_a_closed_loop_keeps_its_concurrency(llm):
    llm.script_for = lambda body: steady(3, 0.01, 0.01)
    client = StreamingClient(Target(llm.url, "fake"))
    result = await Run(client, plan_of(30), TokenPrompts(), concurrency=4).run()
    assert [record.index for record in result.records] == list(range(30))
    assert all(record.is_ok for record in result.records)
    assert llm.most_in_flight == 4


async def test_an_open_loop_does_not_wait_for_a_late_server(llm):
    """Twenty requests are due before the first answer begins: all are sent by then."""
    llm.script_for = lambda body: steady(2, first_s=1.5)
    client = StreamingClient(Target(llm.url, "fake"))
    plan = plan_of(20, Arrivals(rate=40.0))
    assert plan[-1].at_s < 1.2
    result = await Run(client, plan, TokenPrompts()).run()
    assert llm.most_in_flight == 20
    assert [r.scheduled_s for r in result.records] == [request.at_s for request in plan]
    first_answer = min(record.token_times_s[0] for record in result.records)
    assert max(record.sent_s for record in result.records) < first_answer
    assert all(record.sent_s >= record.scheduled_s - 0.005 for record in result.records)


async def test_a_blocked_client_shows_in_the_schedule_and_not_in_the_server(llm):
    """Coordinated omission: what is late because we were late counts from when it was due."""
    llm.script_for = lambda body: steady(2)
    client = StreamingClient(Target(llm.url, "fake"))
    run = Run(client, plan_of(40, Arrivals(rate=100.0)), TokenPrompts())

    async def hog() -> None:
        await asyncio.sleep(0.05)
        import time

        time.sleep(0.5)  # the loop is blocked on purpose

    result, _ = await asyncio.gather(run.run(), hog())
    summary = summarize(result)
    assert summary["client"]["send_delay_s"]["max"] > 0.3
    assert summary["ttft_scheduled_s"]["p90"] > 2 * summary["ttft_s"]["p50"]


async def test_stopping_keeps_what_was_measured(llm):
    llm.script_for = lambda body: steady(2) if len(llm.bodies) <= 3 else steady(2, first_s=60)
    client = StreamingClient(Target(llm.url, "fake"))
    run = Run(client, plan_of(50), TokenPrompts(), concurrency=2)
    running = asyncio.create_task(run.run())
    async with asyncio.timeout(20):
        while llm.in_flight < 2 or len(llm.bodies) < 5:
            await asyncio.sleep(0.01)
    run.stop()
    result = await running
    assert result.was_stopped
    requests = summarize(result)["requests"]
    assert (requests["sent"], requests["ok"], requests["interrupted"]) == (5, 3, 2)
    assert requests["failed"] == 0


# ---------------------------------------------------------------- any server


async def measured(service: Service, count=6, prompt="40", **more):
    prepared = await prepare(service, 0)
    workload = Workload(synthetic(count, prompt), **more)
    run = await measure(
        prepared, workload, Arrivals(concurrency=2), Slo(), salt="", label="x"
    )  # fmt: skip
    return prepared, run


async def test_pdserve_gets_token_ids_of_the_exact_length(llm):
    prepared, run = await measured(Service(llm.url))
    assert isinstance(prepared.prompts, TokenPrompts)
    assert all(len(body["prompt"]) == 40 and body["ignore_eos"] for body in llm.bodies)
    assert run.summary["lengths_off"] == {"prompt": 0, "output": 0}
    assert run.summary["prompt_tokens"] == 240


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
async def test_another_server_gets_words_corrected_by_its_usage(endpoint):
    with serving(FakeLlm(owned_by="someone", tokens_per_word=1.5, overhead=7)) as llm:
        prepared, run = await measured(Service(llm.url, endpoint=endpoint), prompt="100")
    assert isinstance(prepared.prompts, WordPrompts)
    assert "ignore_eos" not in llm.bodies[-1]
    assert run.summary["prompt_tokens"] == pytest.approx(600, abs=6)  # a word is 1.5 tokens


async def test_without_usage_a_word_is_a_token():
    answer = Script([0.0], usage=False)
    with serving(FakeLlm(script_for=lambda body: answer, owned_by="someone")) as llm:
        prepared, run = await measured(Service(llm.url))
    assert prepared.prompts == WordPrompts()
    assert any("usage" in note for note in prepared.notes)
    assert run.summary["prompt_tokens"] == 240


async def test_a_server_that_refuses_is_an_error_before_the_run(llm):
    llm.script_for = lambda body: Script([], status=404)
    with pytest.raises(PdserveError, match="HTTP 404.*no, scripted"):
        await prepare(Service(llm.url), num_warmup=1)
    with pytest.raises(UnavailableError):
        await prepare(Service("http://127.0.0.1:1"), 0)
    with pytest.raises(ConfigError, match="--prompts ids"):
        await prepare(Service(llm.url, endpoint="chat", prompts="ids"), 0)


async def test_the_model_is_the_named_one_or_the_first(llm):
    llm.max_model_len = 512
    assert (await server_info(llm.url, None, None)).model == "fake"
    info = await server_info(llm.url, "other", None)
    assert (info.model, info.is_extended, info.max_model_len) == ("other", False, None)
    assert (await server_info(llm.url, "fake", None)).max_model_len == 512


def test_requests_that_no_model_can_serve_are_left_out():
    plan = plan_of(9, prompt="uniform:1:100")
    fit, left_out = fitting(plan, 55)
    assert len(fit) + left_out == 9 and 0 < left_out < 9
    assert all(r.num_prompt_tokens + r.num_output_tokens <= 55 for r in fit)
    assert fitting(plan, None) == (plan, 0)
