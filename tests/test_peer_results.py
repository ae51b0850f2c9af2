"""What `make bench-peers` keeps of its rounds, and what it says of them."""

from pathlib import Path

from benchmarks.peer_results import GOALS, MEASURES, Results, report
from benchmarks.peer_servers import PEERS, Peer, Server
from benchmarks.peers import SCENARIOS


def test_a_later_run_knows_what_an_earlier_one_measured(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    earlier = Results(path)
    for rep, value in ((1, 10.0), (2, 30.0), (3, 14.0), (3, 12.0)):  # the third again
        earlier.add("pdserve", rep, "c1", {"tpot_mean_ms": value, "ttft_p50_ms": None})
    later = Results(path)
    assert later.has("pdserve", 3, "c1") and not later.has("pdserve", 4, "c1")
    assert not later.has("pdserve", 3, "c8") and not later.has("vllm", 3, "c1")
    assert later.median("pdserve", "c1", "tpot_mean_ms") == 12.0
    assert later.median("pdserve", "c1", "ttft_p50_ms") is None
    assert not Results(path, is_fresh=True).has("pdserve", 1, "c1")


def test_ratios_against_goals(tmp_path: Path) -> None:
    results = Results(tmp_path / "results.jsonl")
    results.add("pdserve", 1, "c8", {"total_tok_s": 130.0})
    results.add("vllm", 1, "c8", {"total_tok_s": 100.0})
    results.add("pdserve-pd", 1, "interf", {"itl_p999_ms": 40.0})
    results.add("vllm", 1, "interf", {"itl_p999_ms": 380.0})
    results.add("vllm-256", 1, "interf", {"itl_p999_ms": 100.0})  # the better of the two counts
    server = Server(["/opt/bin/serve", "--port", "1"], "http://x", {"VLLM_A": "1", "B": "2"})
    text = report(results, {"vllm": Peer("vLLM", [server])})
    assert (
        "| 8 streams: tokens/s: pdserve to vllm | 130 | 100 | 1.30 | at least 1.20 | met |" in text
    )
    assert "vllm or vllm-256 | 40 | 100 | 0.40 | at most 0.33 | missed |" in text
    assert "`VLLM_A=1 serve --port 1` on cores 0,1" in text
    assert "1024 tokens" not in text.split("All medians")[0]  # what was not measured is no goal


def test_every_goal_is_measured() -> None:
    assert set(SCENARIOS) == set(PEERS)
    known = {(scenario, measure) for _, scenario, measure in MEASURES}
    for goal in GOALS:
        assert (goal.scenario, goal.measure) in known
        for peer in (goal.ours, *goal.others):
            assert goal.scenario in (*SCENARIOS[peer], "start")
