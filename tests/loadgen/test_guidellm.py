"""guidellm and `pdserve bench` measure one server at the same time, and agree within 3 percent.

`make test-bench-peer` installs guidellm into a virtual environment of its own and runs this.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_llm import FakeLlm, serving, steady

from support.byte_tokenizer import byte_tokenizer
from support.live import PDSERVE

ROOT = Path(__file__).parents[2]
GUIDELLM = os.environ.get("GUIDELLM") or shutil.which("guidellm")
_FIRST_S, _GAP_S = 0.1, 0.02
_STREAMS, _NUM_INPUT, _NUM_OUTPUT = 4, 64, 32

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(GUIDELLM is None, reason="guidellm is not here: make test-bench-peer"),
]


def _tokenizer_folder(folder: Path) -> Path:
    """guidellm makes its prompts with a tokenizer from Hugging Face files."""
    folder.mkdir()
    byte_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    files = {
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "config.json": {"model_type": "llama"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    return folder


def _start_guidellm(url: str, folder: Path, num_requests: int) -> subprocess.Popen[bytes]:
    assert GUIDELLM is not None
    arguments = {
        "backend": f"kind=openai_http,target={url},model=fake,request_format=/v1/completions",
        "profile": f"kind=concurrent,streams={_STREAMS}",
        "constraint": f"kind=max_requests,count={num_requests}",
        "tokenizer": f"kind=huggingface_auto,model={_tokenizer_folder(folder / 'tokenizer')}",
        "data": f"kind=synthetic_text,prompt_tokens={_NUM_INPUT},output_tokens={_NUM_OUTPUT}",
        "output": f"kind=json,path={folder / 'guidellm.json'}",
    }
    options = [part for name, value in arguments.items() for part in (f"--{name}", value)]
    log = (folder / "guidellm.log").open("wb")
    with log:
        return subprocess.Popen(
            [GUIDELLM, "run", *options, "--disable-progress"],
            stdout=log, stderr=log, env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
            start_new_session=True,  # it has processes of its own
        )  # fmt: skip


def _bench(url: str, folder: Path, num_requests: int) -> dict[str, Any]:
    done = subprocess.run(
        [
            PDSERVE, "bench", "--url", url, "--num-requests", str(num_requests),
            "--concurrency", str(_STREAMS), "--input-len", str(_NUM_INPUT),
            "--output-len", str(_NUM_OUTPUT), "--json", str(folder / "ours.json"),
        ],
        cwd=ROOT, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((folder / "ours.json").read_text())["runs"][0]


def test_guidellm_measures_the_same(tmp_path: Path) -> None:
    num_requests = 200
    paced = FakeLlm(script_for=lambda body: steady(_NUM_OUTPUT, _FIRST_S, _GAP_S))
    with serving(paced) as llm:
        process = _start_guidellm(llm.url, tmp_path, num_requests)
        try:
            # At the same time, so that whatever disturbs the one disturbs the other.
            deadline = time.monotonic() + 120
            while not llm.bodies:
                assert process.poll() is None, (tmp_path / "guidellm.log").read_text()
                assert time.monotonic() < deadline, "guidellm sends nothing"
                time.sleep(0.05)
            ours = _bench(llm.url, tmp_path, num_requests)
            assert process.wait(120) == 0, (tmp_path / "guidellm.log").read_text()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    (benchmark,) = json.loads((tmp_path / "guidellm.json").read_text())["benchmarks"]
    theirs = {name: value["successful"] for name, value in benchmark["metrics"].items()
              if isinstance(value, dict) and "successful" in value}  # fmt: skip
    assert ours["requests"]["ok"] == theirs["time_to_first_token_ms"]["count"] == num_requests
    # What guidellm calls the inter-token latency of a request is the TPOT of everybody else.
    rows = [
        ("TTFT p50, ms", theirs["time_to_first_token_ms"]["median"], 1e3 * ours["ttft_s"]["p50"]),
        ("TPOT p50, ms", theirs["inter_token_latency_ms"]["median"], 1e3 * ours["tpot_s"]["p50"]),
        ("E2E p50, ms", 1e3 * theirs["request_latency"]["median"], 1e3 * ours["e2e_s"]["p50"]),
        ("output tokens", theirs["output_token_count"]["total_sum"], ours["output_tokens"]),
    ]
    print("\n| | guidellm | pdserve bench | difference |\n|---|---|---|---|")
    for name, their, our in rows:
        print(f"| {name} | {their:.2f} | {our:.2f} | {100 * (our / their - 1):+.2f} % |")
    for name, their, our in rows:
        assert our == pytest.approx(their, rel=0.03), name
