"""Published trace formats, and errors that name file and line."""

import gzip
from pathlib import Path

import pytest

from core.errors import ConfigError
from loadgen.trace import TraceEntry, read_trace
from loadgen.workload import prefix_share, trace_requests

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
# The project's own copies of public traces lie beside a checkout, if at all.
PUBLIC = Path(__file__).parents[3] / "shared" / "data" / "traces"


@pytest.fixture
def write(tmp_path):
    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text)
        return path

    return write_file


def test_azure(write):
    path = write("a.csv", AZURE + "2023-11-16 18:15:46.6805900,374,44\n"
                                  "2023-11-16 18:15:47.1805900,396,109")  # fmt: skip
    assert read_trace(path) == [
        TraceEntry(0.0, 374, 44),
        TraceEntry(pytest.approx(0.5, abs=1e-5), 396, 109),
    ]


def test_azure_of_the_next_year_has_time_zones(write):
    path = write("a.csv", AZURE + "2024-05-10 00:00:00.009930+00:00,10,2\n"
                                  "2024-05-10 02:00:01.009930+02:00,10,2\n")  # fmt: skip
    assert [entry.at_s for entry in read_trace(path)] == pytest.approx([0.0, 1.0])


def test_burst_gpt_leaves_out_failed_requests(write):
    path = write("b.csv", BURST + "5,ChatGPT,472,18,490,Conversation log\n"
                                  "45,ChatGPT,1087,0,1087,Conversation log\n"
                                  "118,GPT-4,417,276,693,API log\n")  # fmt: skip
    assert read_trace(path) == [TraceEntry(0.0, 472, 18), TraceEntry(113.0, 417, 276)]


def test_mooncake(write):
    first = '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [0, 14]}'
    second = '{"timestamp": 3500, "input_length": 9, "output_length": 1}'
    path = write("m.jsonl", f"{first}\n\n{second}\n")
    assert read_trace(path) == [TraceEntry(0.0, 600, 5, (0, 14)), TraceEntry(2.5, 9, 1)]


def test_lengths_alone_have_no_arrivals(write):
    path = write("l.csv", "num_prefill_tokens,num_decode_tokens,pd_ratio\n74,918,0.08\n")
    assert read_trace(path) == [TraceEntry(None, 74, 918)]


def test_a_packed_trace_and_a_limit(tmp_path):
    path = tmp_path / "a.csv.gz"
    with gzip.open(path, "wt") as file:
        file.write(AZURE + "2023-11-16 18:15:46,1,1\n" * 9)
    assert len(read_trace(path)) == 9
    assert len(read_trace(path, max_requests=4)) == 4


def test_entries_are_in_order_of_arrival(write):
    path = write("b.csv", BURST + "9,m,3,1,4,x\n5,m,2,1,3,x\n")
    assert [(e.at_s, e.num_prompt_tokens) for e in read_trace(path)] == [(0.0, 2), (4.0, 3)]


@pytest.mark.parametrize(
    ("name", "text", "line", "what"),
    [
        ("a.csv", AZURE + "2023-11-16 18:15:46,5,5\nyesterday,1,1\n", 3, "TIMESTAMP"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,0,5\n", 2, "ContextTokens"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,5,many\n", 2, "GeneratedTokens"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,5,1e400\n", 2, "GeneratedTokens"),
        ("a.csv", AZURE + "2023-11-16 18:15:46,5\n", 2, "3 columns, got 2"),
        ("b.csv", BURST + "soon,m,1,1,2,x\n", 2, "Timestamp"),
        ("b.csv", BURST + "1,m,1.5,1,2,x\n", 2, "Request tokens"),
        ("x.csv", "time,tokens\n1,2\n", 1, "unknown columns time, tokens"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5}\n', 1, "'output_length' is missing"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1}\n{oops\n', 2, ""),
        ("m.jsonl", "[1]\n", 1, "expected an object"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [1]}\n',
         1, "hash_ids: 1 blocks"),
        ("m.jsonl", '{"timestamp": null, "input_length": 5, "output_length": 1}\n', 1, "timestamp"),
        ("m.jsonl", '{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": ["a"]}\n',
         1, "hash_ids"),
    ],
)  # fmt: skip
def test_a_malformed_line_is_named(write, name, text, line, what):
    path = write(name, text)
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert f"{path}:{line}: " in str(error.value)
    assert what in str(error.value)


def test_files_that_are_no_traces(write, tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "none.csv")
    with pytest.raises(ConfigError, match="no request"):
        read_trace(write("a.csv", AZURE))
    broken = tmp_path / "a.csv.gz"
    broken.write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match="cannot read trace"):
        read_trace(broken)
    binary = tmp_path / "b.csv"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_trace(binary)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="no ../shared/data/traces beside this checkout")
@pytest.mark.parametrize(
    ("name", "count", "span_s"),
    [
        ("azure2023_conv.csv.gz", 19366, 3502),
        ("azure2023_code.csv.gz", 8819, 3436),
        ("mooncake_conversation.jsonl.gz", 12031, 3537),
        ("mooncake_synthetic.jsonl.gz", 3993, 1022),
    ],
)
def test_public_traces_have_their_published_size(name, count, span_s):
    entries = read_trace(PUBLIC / name)
    assert len(entries) == count
    assert entries[-1].at_s == pytest.approx(span_s, abs=1)


@pytest.mark.skipif(not PUBLIC.is_dir(), reason="no ../shared/data/traces beside this checkout")
@pytest.mark.parametrize(
    ("name", "share"),
    [("mooncake_conversation.jsonl.gz", 0.366), ("mooncake_synthetic.jsonl.gz", 0.640)],
)
def test_public_traces_repeat_the_published_share_of_prefixes(name, share):
    """Published by blocks; by tokens it is a little more, since last blocks are short."""
    requests = trace_requests(read_trace(PUBLIC / name), 0)
    assert prefix_share(requests) == pytest.approx(share, abs=0.015)
