"""What processes of a host see of each other's prompts."""

import errno
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.prompt_sign import PromptSign
from support.prompt_signs import raised_elsewhere


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "sign"


@pytest.fixture
def sign(path: Path) -> Iterator[PromptSign]:
    sign = PromptSign(path)
    yield sign
    sign.close()


def test_it_is_seen_as_long_as_any_other_process_raises_it(path: Path, sign: PromptSign) -> None:
    assert not sign.is_raised()
    with raised_elsewhere(path):
        assert sign.is_raised()
        with raised_elsewhere(path):
            assert sign.is_raised()
        assert sign.is_raised()
    assert not sign.is_raised()


def test_a_process_that_was_killed_has_let_go(path: Path, sign: PromptSign) -> None:
    with raised_elsewhere(path) as other:
        assert sign.is_raised()
        other.kill()
        other.wait()
        assert not sign.is_raised()


def test_nobody_sees_its_own_or_waits_for_others(path: Path, sign: PromptSign) -> None:
    with raised_elsewhere(path) as other:
        with sign.raised():
            assert sign.is_raised()  # the other's
        assert sign.is_raised()
        with sign.raised():
            other.kill()
            other.wait()
            assert not sign.is_raised()


def test_where_the_file_cannot_be_had_there_is_no_sign(
    tmp_path: Path, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "link").symlink_to(path)
    for impossible in (tmp_path / "missing" / "sign", tmp_path / "link"):
        sign = PromptSign(impossible)
        with sign.raised():
            assert not sign.is_raised()
        sign.close()
    assert len(caplog.records) == 2 and not path.exists()


def test_where_files_cannot_be_locked_there_is_none(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("engine.prompt_sign.fcntl.lockf", no_locks)
    sign = PromptSign(path)
    with sign.raised():
        assert not sign.is_raised()
    assert "No locks available" in caplog.text


def test_a_stranger_who_has_the_file_alone_stops_nobody(path: Path, sign: PromptSign) -> None:
    code = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
sys.stdin.read()
"""
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline()
        with sign.raised():
            pass
        other.kill()
