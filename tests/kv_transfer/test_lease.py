"""The lease table: every event in every state, and no block unpinned twice or never."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from core.errors import EngineError, HandoverError, PdserveError, RequestError
from core.types import FinishReason
from kv_transfer.lease import LeaseState, LeaseTable

LEASE_SECONDS = 30.0
DIGEST = b"digest of the tokens"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Unpins:
    def __init__(self) -> None:
        self.calls: list[tuple[str, PdserveError | None]] = []

    def __call__(self, request_id: str, error: PdserveError | None) -> None:
        self.calls.append((request_id, error))

    @property
    def ids(self) -> list[str]:
        return [request_id for request_id, _ in self.calls]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def unpins() -> Unpins:
    return Unpins()


@pytest.fixture
def table(clock: Clock, unpins: Unpins) -> LeaseTable:
    return LeaseTable(lease_seconds=LEASE_SECONDS, clock=clock, unpin=unpins)


def committed(table: LeaseTable, request_id: str = "a") -> None:
    table.open(request_id, DIGEST, 20)
    table.admitted(request_id, [3, 4])
    table.ready(request_id, 1)
    table.ready(request_id, 2)
    table.commit(request_id, 7, None)


def test_whole_life(table: LeaseTable, unpins: Unpins) -> None:
    committed(table)
    lease = table.attach("a", DIGEST)
    assert lease.block_ids == [3, 4]
    assert lease.first_token == 7
    assert unpins.calls == []
    assert table.release("a") is True
    table.detach(lease)
    assert lease.state is LeaseState.RELEASED
    assert unpins.calls == [("a", None)]
    assert len(table) == 0


def test_attach_may_come_first(table: LeaseTable, unpins: Unpins) -> None:
    lease = table.attach("a", DIGEST)
    assert lease.state is LeaseState.EXPECTED
    committed(table)
    assert table.release("a") is True
    assert unpins.ids == ["a"]


def test_attach_first_for_other_tokens_ends_the_attempt(table: LeaseTable, unpins: Unpins) -> None:
    lease = table.attach("a", b"other tokens")
    with pytest.raises(HandoverError, match="other tokens"):
        table.open("a", DIGEST, 20)
    assert lease.state is LeaseState.FAILED
    assert unpins.calls == []  # nothing was allocated yet


def test_handles_are_single_use(table: LeaseTable, unpins: Unpins) -> None:
    committed(table)
    table.attach("a", DIGEST)
    with pytest.raises(HandoverError, match="attached before"):
        table.attach("a", DIGEST)
    assert table.release("a") is True
    assert table.release("a") is False
    with pytest.raises(HandoverError):
        table.attach("a", DIGEST)
    with pytest.raises(RequestError, match="used before"):
        table.open("a", DIGEST, 20)
    assert unpins.ids == ["a"]


def test_attach_for_other_tokens_is_refused(table: LeaseTable) -> None:
    committed(table)
    with pytest.raises(HandoverError, match="other tokens"):
        table.attach("a", b"other tokens")
    assert table.attach("a", DIGEST).state is LeaseState.COMMITTED


def test_unknown_attempt_is_not_pinned(table: LeaseTable) -> None:
    assert table.release("nobody") is False


@pytest.mark.parametrize("is_committed", [False, True])
def test_detach_ends_the_attempt_at_once(
    table: LeaseTable, unpins: Unpins, is_committed: bool
) -> None:
    if is_committed:
        committed(table)
    else:
        table.open("a", DIGEST, 20)
    lease = table.attach("a", DIGEST)
    table.detach(lease)
    table.detach(lease)
    assert unpins.ids == ["a"]
    assert isinstance(unpins.calls[0][1], HandoverError)
    assert table.release("a") is False


def test_late_events_after_the_end_change_nothing(table: LeaseTable, unpins: Unpins) -> None:
    committed(table)
    lease = table.attach("a", DIGEST)
    table.fail("a", EngineError("gone"))
    table.ready("a", 3)
    table.commit("a", 9, None)
    table.finish("a", FinishReason.STOP)
    assert (lease.state, lease.num_ready_blocks) == (LeaseState.FAILED, 2)
    assert unpins.ids == ["a"]


def test_finish_frees_nothing_twice(table: LeaseTable, unpins: Unpins) -> None:
    table.open("a", DIGEST, 20)
    lease = table.attach("a", DIGEST)
    table.finish("a", FinishReason.LENGTH)
    assert lease.finish_reason is FinishReason.LENGTH
    table.detach(lease)
    assert lease.state is LeaseState.FINISHED
    assert unpins.calls == []


def test_time_ends_what_nobody_holds(table: LeaseTable, clock: Clock, unpins: Unpins) -> None:
    committed(table, "held for nobody")
    committed(table, "held for somebody")
    attached = table.attach("held for somebody", DIGEST)
    table.open("still computing", DIGEST, 20)
    expected = table.attach("never prefilled", DIGEST)
    clock.now += LEASE_SECONDS - 1
    table.sweep()
    assert unpins.calls == []
    clock.now += 2
    table.sweep()
    assert unpins.ids == ["held for nobody"]
    assert attached.state is LeaseState.COMMITTED  # a lease is a stream, not a deadline
    assert expected.state is LeaseState.FAILED
    assert len(table) == 2


class LeaseMachine(RuleBasedStateMachine):
    """P, D and the clock act in any order on a few attempts. A model of what is pinned checks
    that blocks are unpinned exactly once, and that a yes to release means never before."""

    IDS = st.sampled_from(["a", "b", "c"])

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.unpins = Unpins()
        self.table = LeaseTable(lease_seconds=LEASE_SECONDS, clock=self.clock, unpin=self.unpins)
        self.opened: set[str] = set()
        self.finished: set[str] = set()
        self.committed: set[str] = set()
        self.released: set[str] = set()

    @rule(request_id=IDS)
    def open(self, request_id: str) -> None:
        is_new = request_id not in self.opened
        try:
            self.table.open(request_id, DIGEST, 20)
        except (RequestError, HandoverError):
            return
        assert is_new
        self.opened.add(request_id)

    @rule(request_id=IDS, digest=st.sampled_from([DIGEST, DIGEST, b"other"]))
    def attach(self, request_id: str, digest: bytes) -> None:
        try:
            lease = self.table.attach(request_id, digest)
        except HandoverError:
            return
        assert lease.state is not LeaseState.FAILED

    @rule(request_id=IDS)
    def detach(self, request_id: str) -> None:
        lease = self.table.get(request_id)
        if lease is not None and lease.is_attached:
            self.table.detach(lease)
            assert lease.state.is_terminal

    @rule(request_id=IDS)
    def commit(self, request_id: str) -> None:
        self.table.ready(request_id, 1)
        self.table.commit(request_id, 5, None)
        lease = self.table.get(request_id)
        if lease is not None and lease.state is LeaseState.COMMITTED:
            self.committed.add(request_id)

    @rule(request_id=IDS)
    def finish(self, request_id: str) -> None:
        lease = self.table.get(request_id)
        was_computing = lease is not None and lease.state is LeaseState.COMPUTING
        self.table.finish(request_id, FinishReason.STOP)
        if was_computing:
            self.finished.add(request_id)

    @rule(request_id=IDS)
    def fail(self, request_id: str) -> None:
        self.table.fail(request_id, EngineError("x"))

    @rule(request_id=IDS)
    def release(self, request_id: str) -> None:
        was_unpinned = request_id in self.unpins.ids
        if self.table.release(request_id):
            assert request_id in self.committed
            assert not was_unpinned
            assert request_id not in self.released
            self.released.add(request_id)

    @rule(seconds=st.sampled_from([1.0, 20.0, 31.0]))
    def time_passes(self, seconds: float) -> None:
        self.clock.now += seconds
        self.table.sweep()

    @precondition(lambda self: len(self.table) > 0)
    @rule()
    def everyone_leaves(self) -> None:
        """When the peers are gone and the lease has passed, nothing is left."""
        for request_id in "abc":
            self.detach(request_id)
            lease = self.table.get(request_id)
            if lease is not None and lease.state is LeaseState.COMPUTING:
                self.table.fail(request_id, EngineError("cancelled"))
        self.clock.now += LEASE_SECONDS + 1
        self.table.sweep()
        assert len(self.table) == 0

    @invariant()
    def unpinned_exactly_once(self) -> None:
        ids = self.unpins.ids
        assert len(ids) == len(set(ids))
        for request_id in self.opened:
            lease = self.table.get(request_id)
            assert lease is not None
            must_be_free = lease.state in (LeaseState.RELEASED, LeaseState.FAILED)
            assert (request_id in ids) == must_be_free
            assert lease.ended.is_set() == lease.state.is_terminal
        assert not set(ids) - self.opened


LeaseMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
TestLeaseMachine = LeaseMachine.TestCase
