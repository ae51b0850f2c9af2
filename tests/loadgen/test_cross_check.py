"""An independent client, at the same time on the same server, sees the same within 3 percent."""

import asyncio
import importlib.util
import json
import types
from pathlib import Path

import pytest
from fake_llm import FakeLlm, serving, steady

from loadgen.client import StreamingClient, Target
from loadgen.length import parse_length
from loadgen.prompt import TokenPrompts
from loadgen.runner import Run
from loadgen.summary import summarize
from loadgen.workload import Arrivals, Synthetic, synthetic_requests, with_arrivals

NEUTRAL = Path(__file__).parents[3] / "shared" / "tools" / "load.py"
_NUM_REQUESTS, _NUM_TOKENS, _CONCURRENCY = 40, 20, 4


@pytest.mark.skipif(not NEUTRAL.is_file(), reason="no ../shared/tools/load.py beside this checkout")
async def test_the_neutral_client_measures_the_same(monkeypatch):
    aiohttp = pytest.importorskip("aiohttp", reason="the neutral client needs aiohttp")
    monkeypatch.setenv("BENCH_TOKENIZER", "none")
    spec = importlib.util.spec_from_file_location("neutral_load", NEUTRAL)
    neutral = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(neutral)
    length = parse_length(str(_NUM_TOKENS), "x")
    requests = synthetic_requests(Synthetic(_NUM_REQUESTS, length, length), 0)
    plan = with_arrivals(requests, Arrivals(concurrency=_CONCURRENCY), 0)
    prompts = [TokenPrompts().make(request.prompt) for request in plan]
    with serving(FakeLlm(script_for=lambda body: steady(_NUM_TOKENS, 0.1, 0.02))) as llm:
        arguments = types.SimpleNamespace(url=llm.url, model="fake", extra=json.loads("{}"))
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(connector=connector) as http:
            client = neutral.Client(arguments, http)
            ours = Run(
                StreamingClient(Target(llm.url, "fake")), plan, TokenPrompts(),
                concurrency=_CONCURRENCY,
            )  # fmt: skip
            # At the same time, so that whatever disturbs the one disturbs the other.
            result, theirs = await asyncio.gather(
                ours.run(), neutral.pool(client, prompts, _CONCURRENCY, _NUM_TOKENS)
            )
    summary = summarize(result)
    start = min(r.t0 for r in theirs)
    expected = neutral.summarize(theirs, _NUM_TOKENS, _NUM_TOKENS, start, cpu=0.0)
    assert summary["requests"]["ok"] == expected["n"] - expected["errors"] == _NUM_REQUESTS
    for ours_value, name in (
        (summary["ttft_s"]["p50"] * 1e3, "ttft_p50_ms"),
        (summary["tpot_s"]["mean"] * 1e3, "tpot_mean_ms"),
        (summary["itl_s"]["p50"] * 1e3, "itl_p50_ms"),
        (summary["output_tokens_per_s"], "out_tok_s"),
        (summary["total_tokens_per_s"], "total_tok_s"),
    ):
        assert ours_value == pytest.approx(expected[name], rel=0.03), name
