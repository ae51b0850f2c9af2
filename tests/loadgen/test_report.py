"""Charts, pages and files of given records."""

import csv
import json
import xml.etree.ElementTree as ElementTree

import pytest

from core.errors import ConfigError
from loadgen.chart import Chart, LabelledRun, Series, cdf_charts, charts_of
from loadgen.page import page
from loadgen.png import write_pngs
from loadgen.record import RequestRecord
from loadgen.report import latency_table, markdown, rate_table, sweep_table, write_csv, write_json
from loadgen.runner import ClientLoad, RunResult
from loadgen.summary import Slo, summarize
from loadgen.svg import svg


def record(index, times, **more) -> RequestRecord:
    at = index * 0.5
    return RequestRecord(
        index, at, at, ended_s=at + times[-1] if times else at,
        token_times_s=[at + t for t in times], wanted_prompt_tokens=8, **more,
    )  # fmt: skip


def run_of(*records, label="run", load=None) -> LabelledRun:
    result = RunResult(list(records), 5.0, ClientLoad(0.1, [0.001]))
    return LabelledRun(label, records, summarize(result, Slo(ttft_s=0.5)), load)


@pytest.fixture
def run() -> LabelledRun:
    return run_of(
        record(0, [0.1, 0.2, 0.4]),
        record(1, [0.3, 0.4, 0.5]),
        record(2, [], error="HTTP 503", detail="busy, <later>"),
    )


def chart(charts, name) -> Chart:
    return next(chart for chart in charts if chart.name == name)


def test_a_cdf_has_every_value_and_ends_at_all(run):
    (line,) = chart(charts_of([run]), "cdf-ttft").series
    assert line.x == pytest.approx((100.0, 300.0))
    assert line.y == (50.0, 100.0)
    (gaps,) = chart(charts_of([run]), "cdf-itl").series
    assert gaps.x == pytest.approx((100.0, 100.0, 100.0, 200.0))


def test_a_large_cdf_is_thinned_and_keeps_its_ends():
    times = [0.001 * (i + 1) for i in range(5000)]
    runs = [run_of(*(record(i, [t]) for i, t in enumerate(times)))]
    (line,) = chart(cdf_charts(runs), "cdf-ttft").series
    assert len(line.x) == 400
    assert (line.x[0], line.x[-1], line.y[-1]) == pytest.approx((1.0, 5000.0, 100.0))


def test_the_timeline_has_both_phases_of_each_good_request(run):
    waiting, decoding = chart(charts_of([run]), "timeline").series
    assert waiting.x == (0.0, 0.5) and waiting.x_end == pytest.approx((0.1, 0.8))
    assert decoding.x == waiting.x_end and decoding.x_end == pytest.approx((0.4, 1.0))


def test_a_sweep_has_curves_over_the_load_in_its_order(run):
    fast = run_of(record(0, [0.2, 0.3]), label="2", load=2.0)
    slow = run_of(record(0, [0.1, 0.2]), label="1", load=1.0)
    p50 = chart(charts_of([fast, slow]), "ttft-over-load").series[0]
    assert p50.x == (1.0, 2.0)
    assert p50.y == pytest.approx((100.0, 200.0))
    assert not [c for c in charts_of([run]) if c.name.endswith("over-load")]


def test_a_run_without_success_has_no_charts():
    assert charts_of([run_of(record(0, [], error="connect"))]) == []


def test_every_chart_is_wellformed_svg_inside_its_frame(run):
    single = Chart(
        "x", "One <point> & more", "a", "b", (Series("s", "line", (3.0,), (4.0,)),), True
    )
    for made in [*charts_of([run]), single]:
        root = ElementTree.fromstring(svg(made))
        for circle in root.iter("circle"):
            assert 0 <= float(circle.get("cx")) <= 640
            assert 0 <= float(circle.get("cy")) <= 300
        assert len([g for g in root.iter("g")]) == len(made.series)


def test_the_page_is_self_contained_and_escapes(run):
    text = page("A <b>", ["x & y"], [latency_table(run.summary)], charts_of([run]), "footer")
    assert "A &lt;b&gt;" in text and "x &amp; y" in text
    assert "<script" not in text and "http" not in text and "url(" not in text
    assert text.count("<svg") == text.count("</svg>") == len(charts_of([run]))
    assert "prefers-color-scheme: dark" in text


def test_tables_say_what_happened(run):
    load = dict(rate_table(run.summary)[2])
    assert load["requests ok"] == "2 of 3"
    assert load["failed: HTTP 503"] == "1"
    assert load["goodput (TTFT <= 0.5 s)"].endswith("requests/s")
    (name, *cells) = latency_table(run.summary)[2][0]
    assert (name, cells[1]) == ("TTFT", "200.0")
    assert sweep_table([run])[2][0][1] == "2/3"


def test_markdown_escapes_bars():
    assert markdown(("c", ("a", "b"), [["x|y", "1"]])).splitlines()[2:] == [
        "| a | b |", "|---|---|", "| x\\|y | 1 |",
    ]  # fmt: skip


def test_csv_has_a_line_for_each_request(run, tmp_path):
    path = tmp_path / "deep" / "x.csv"
    write_csv(path, [run])
    with path.open(newline="") as file:
        first, second, failed = csv.DictReader(file)
    assert float(first["ttft_s"]) == pytest.approx(0.1)
    assert float(second["first_token_s"]) == pytest.approx(0.8)
    assert failed["error"] == "HTTP 503" and failed["detail"] == "busy, <later>"
    assert failed["ttft_s"] == ""


def test_json_is_strict(run, tmp_path):
    write_json(tmp_path / "x.json", run.summary)
    assert json.loads((tmp_path / "x.json").read_text())["requests"]["ok"] == 2
    failed = run_of(record(0, [], error="connect"))
    write_json(tmp_path / "y.json", failed.summary)  # NaN would raise


def test_a_file_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        write_json(tmp_path / "file" / "x.json", {})


def test_png_files(run, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    paths = write_pngs(charts_of([run]), tmp_path)
    assert len(paths) == len(charts_of([run]))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in paths)
