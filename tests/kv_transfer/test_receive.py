"""D's machine, event by event: the table of kv_transfer/README.md is what these tests read."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from core.errors import HandoverError
from core.types import FinishReason
from kv_transfer.events import Admitted, Commit, Finished, Ready
from kv_transfer.receive import Receive, ReceiveState

README = Path(__file__).parents[2] / "kv_transfer" / "README.md"
DIGEST = b"digest"
COMMIT = Commit(num_tokens=20, token_digest=DIGEST, checksums=(1, 2, 3), first_token=7)
LOST = HandoverError("x")


def machine() -> Receive:
    made: list[int] = []
    receive = Receive(
        num_tokens=20, token_digest=DIGEST, block_size=8, give_back=lambda: made.append(1)
    )
    receive.test_given_back = made  # type: ignore[attr-defined]
    return receive


# Each from the one before, unless it says otherwise.
def in_state(state: str) -> Receive:
    m = machine()
    steps: list[tuple[str, Callable[[], None]]] = [
        ("attached", lambda: None),
        ("reserving", lambda: m.announced(Admitted((4, 5, 6), 8))),
        ("reserved", lambda: m.reserved((1, 2, 3), 0)),
        ("pulling", lambda: (m.announced(Ready(2)), m.begin_pull())),  # type: ignore[arg-type,func-returns-value]
    ]
    for name, step in steps:
        step()
        if name == state:
            return m
    if state in ("stopping", "quarantined"):
        m.fail(LOST)
        if state == "quarantined":
            m.in_doubt(LOST)
        return m
    m.pulled()
    m.announced(Ready(3))
    m.announced(COMMIT)
    m.begin_pull()
    m.pulled()
    if state == "releasing":
        m.verified()
    return m


EVENTS: dict[str, Callable[[Receive], None]] = {
    "admitted": lambda m: m.announced(Admitted((4, 5, 6), 8)),
    "reserved": lambda m: m.reserved((1, 2, 3), 0),
    "ready": lambda m: m.announced(Ready(m.num_ready + 1)),
    "commit": lambda m: m.announced(COMMIT),
    "finished": lambda m: m.announced(Finished(FinishReason.STOP)),
    "begin_pull": lambda m: m.begin_pull(),
    "pulled": lambda m: m.pulled(),
    "pull_ended": lambda m: m.pull_ended(LOST),
    "in_doubt": lambda m: m.in_doubt(LOST),
    "quiet": lambda m: m.quiet(),
    "verified": lambda m: m.verified(),
    "fenced: pinned": lambda m: m.fenced(True),
    "fenced: not pinned": lambda m: m.fenced(False),
    "lost": lambda m: m.lost(LOST),
    "fail": lambda m: m.fail(LOST),
}


def table() -> list[tuple[str, str, str]]:
    """(event, state, what the README says) for each cell of D's second table."""
    text = README.read_text().partition("## D: a receive")[2]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    start = next(i for i, row in enumerate(rows) if row[0] == "event")
    states = rows[start][1:]
    cells = []
    for row in rows[start + 2 :]:
        if len(row) != len(states) + 1:
            break
        event = re.sub(r" \(.*\)", "", row[0])
        cells += [(event, state, said) for state, said in zip(states, row[1:], strict=True)]
    return cells


@pytest.mark.parametrize(("event", "state", "said"), table())
def test_the_readme_is_the_code(event: str, state: str, said: str) -> None:
    m = in_state(state)
    assert m.state == state
    # The guard of a cell: everything is here, and all that P has to say was said.
    if event in ("begin_pull", "commit") and state != "attached" and m.state.is_live:
        while m.num_ready < 3 and m.commit is None:
            m.announced(Ready(m.num_ready + 1))
    if event == "commit" and state == "reserved":
        m.begin_pull()
        m.pulled()
    given_back = len(m.test_given_back)  # type: ignore[attr-defined]
    EVENTS[event](m)
    expected = re.split(r"[,:]| or ", said)[0].strip()
    if expected in ("-", "noted"):
        expected = state
    assert m.state == expected
    is_given_back = len(m.test_given_back) - given_back  # type: ignore[attr-defined]
    assert is_given_back == (m.state in (ReceiveState.ABORTED, ReceiveState.FINISHED))


def test_the_table_is_whole() -> None:
    states = [s.value for s in ReceiveState if not s.is_terminal]
    assert sorted(table()) == sorted(set(table()))
    assert {(event, state) for event, state, _ in table()} == {
        (event, state) for event in EVENTS for state in states
    }


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("end", ["released", "finished", "aborted"])
def test_after_the_end_nothing_happens(event: str, end: str) -> None:
    m = in_state("releasing") if end == "released" else in_state("attached")
    {
        "released": lambda: m.fenced(True),
        "finished": lambda: m.announced(Finished(FinishReason.STOP)),
        "aborted": lambda: m.fail(LOST),
    }[end]()
    assert m.state == end
    EVENTS[event](m)
    assert m.state == end
    assert len(m.test_given_back) == (end != "released")  # type: ignore[attr-defined]


def test_whole_life_with_a_held_prefix() -> None:
    m = machine()
    m.announced(Admitted((4, 5, 6), 8))
    m.announced(Ready(1))
    m.reserved((1, 2, 3), 2)
    assert m.next_pull is None  # what is ready is here already
    m.announced(Ready(3))
    assert m.next_pull == (2, 3)
    m.begin_pull()
    m.announced(COMMIT)
    assert m.state is ReceiveState.PULLING
    m.pulled()
    m.verified()
    m.fenced(True)
    assert m.state is ReceiveState.RELEASED and m.is_decided


def test_ps_blocks_are_larger() -> None:
    """What D holds ends in the middle of P's block: the rest of that is pulled."""
    m = Receive(num_tokens=60, token_digest=DIGEST, block_size=8, give_back=lambda: None)
    m.announced(Admitted((4, 5), 32))
    m.reserved(tuple(range(8)), 5)
    assert (m.num_blocks, m.num_here, m.num_held_tokens) == (2, 1, 40)
    m.announced(Ready(1))
    assert m.next_pull is None
    m.announced(Ready(2))
    assert m.next_pull == (1, 2)
    m.begin_pull()
    m.announced(Commit(60, DIGEST, (), 7))
    m.pulled()
    assert m.state is ReceiveState.COMMITTED


def test_ps_blocks_are_smaller() -> None:
    m = Receive(num_tokens=60, token_digest=DIGEST, block_size=32, give_back=lambda: None)
    m.announced(Admitted(tuple(range(8)), 8))
    m.announced(Ready(3))
    m.reserved((1, 2), 0)
    assert m.next_pull == (0, 3)
    m.begin_pull()
    m.pulled()
    m.announced(Ready(8))
    assert m.next_pull == (3, 8)


@pytest.mark.parametrize("remote_size", [8, 16, 32])
def test_a_hit_of_everything_pulls_no_block_of_any_size(remote_size: int) -> None:
    m = Receive(num_tokens=24, token_digest=DIGEST, block_size=8, give_back=lambda: None)
    num_blocks = -(-24 // remote_size)
    m.announced(Admitted(tuple(range(num_blocks)), remote_size))
    m.announced(Ready(num_blocks))
    m.reserved((1, 2, 3), 3)
    assert m.next_pull is None
    m.announced(Commit(24, DIGEST, (), 7))
    assert m.state is ReceiveState.COMMITTED


@pytest.mark.parametrize(("ids", "size"), [((4, 5), 8), ((4, 5, 6), 16), ((4,), 1)])
def test_an_admission_with_too_many_or_too_few_blocks(ids: tuple[int, ...], size: int) -> None:
    m = machine()
    m.announced(Admitted(ids, size))
    assert m.state is ReceiveState.ABORTED and "blocks for the prompt" in str(m.error)


def test_full_hit_pulls_nothing() -> None:
    """V03"""
    m = machine()
    m.announced(Admitted((4, 5, 6), 8))
    m.reserved((1, 2, 3), 3)
    m.announced(Ready(3))
    assert m.next_pull is None
    m.announced(COMMIT)
    assert m.state is ReceiveState.COMMITTED


@pytest.mark.parametrize(
    "commit",
    [
        Commit(19, DIGEST, (1, 2, 3), 7),
        Commit(20, b"another", (1, 2, 3), 7),
    ],
)
def test_commit_record_for_something_else(commit: Commit) -> None:
    """V05"""
    m = in_state("reserved")
    m.announced(Ready(3))
    m.announced(commit)
    assert m.state is ReceiveState.ABORTED
    assert isinstance(m.error, HandoverError)


def test_commit_record_before_every_block() -> None:
    m = in_state("pulling")
    m.announced(COMMIT)
    assert m.state is ReceiveState.STOPPING


def test_finish_during_a_pull_in_doubt_is_still_a_finish() -> None:
    m = in_state("pulling")
    m.announced(Finished(FinishReason.LENGTH))
    m.in_doubt(LOST)
    assert m.is_decided and m.is_finished and m.error is None
    assert m.test_given_back == []  # type: ignore[attr-defined]
    m.quiet()
    assert m.state is ReceiveState.FINISHED
