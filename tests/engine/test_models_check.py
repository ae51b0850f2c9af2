"""The table of `make models-check`: what it measures, and that it sees a wrong model."""

from pathlib import Path

import pytest

from support.models_check import COLUMNS, beyond, check, main
from support.tiny_models import make_tiny


def test_a_family_is_within_every_bound(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deepseek-v3"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if "deepseek-v3 |" in line]
    assert row.count("|") == len(COLUMNS) + 2 and "!" not in row


def test_a_wrong_model_is_beyond_every_bound(tmp_path: Path) -> None:
    errors = check("llama", tmp_path, reference=make_tiny("llama", rms_norm_eps=0.3))
    assert beyond(errors) == list(COLUMNS)
    assert beyond({name: float("nan") for name in COLUMNS}) == list(COLUMNS)
