"""A decode worker leaves cores to prompts that other processes of its host read."""

import time
from pathlib import Path

import pytest

from engine.prompt_sign import PromptSign
from support.pair import hand_over_config, prompt, request, running_pair
from support.prompt_signs import raised_elsewhere

PACE = 1.0  # s, the longest that may be configured


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a sign that workers of this test look at, each with one of two cores."""
    path = tmp_path / "sign"
    sign = PromptSign(path)
    monkeypatch.setattr("worker.runtime.host_sign", lambda: sign)
    monkeypatch.setattr("worker.runtime.available_cpus", lambda: 2)
    return path


async def test_its_steps_keep_the_pace_and_its_answers_are_the_same(
    tiny_model_dir: Path, path: Path
) -> None:
    asked = request(prompt(12), max_tokens=4, temperature=0.0)
    async with running_pair(hand_over_config(tiny_model_dir, decode_pace=PACE)) as pair:
        with raised_elsewhere(path):
            since = time.monotonic()
            paced = await pair.generate(asked)
            elapsed = time.monotonic() - since
        await pair.wait_idle()
        free = await pair.alone(request(prompt(12), max_tokens=4, temperature=0.0))
        await pair.wait_idle()
    assert paced.error is None and paced.tokens == free.tokens
    assert elapsed >= 2 * PACE  # between the steps for its last three tokens


async def test_with_all_cores_or_no_pace_nothing_waits(
    tiny_model_dir: Path, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = request(prompt(12), max_tokens=40, temperature=0.0)
    with raised_elsewhere(path):
        async with running_pair(hand_over_config(tiny_model_dir, decode_pace=0.0)) as pair:
            assert len((await pair.generate(asked)).tokens) == 40  # else it would run out of time
            await pair.wait_idle()
        monkeypatch.setattr("worker.runtime.available_cpus", lambda: 1)
        async with running_pair(hand_over_config(tiny_model_dir, decode_pace=PACE)) as pair:
            assert len((await pair.generate(asked)).tokens) == 40
            await pair.wait_idle()
