"""Both sides of a hand-over, their router and a bad network, in thousands of orders of events."""

import random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from kv_transfer.lease import LeaseTable
from kv_transfer.receive import Receive, ReceiveState
from support.kv_world import Move, World


def populate(world: World, rng: random.Random) -> None:
    for _ in range(rng.randint(1, 8)):
        size = min(world.p.block_size, world.d.block_size)
        world.add(rng.randint(1, 5 * size), rng.choice([0, 0, 1, 5]), rng.random() < 0.15)


def play(seed: int, fault_rate: float, **options: object) -> World:
    """One life of a world: any order, faults among it, then peace; checked on the way."""
    rng = random.Random(seed)
    world = World(
        checksum=rng.random() < 0.5,
        p_blocks=rng.randint(5, 9),
        d_blocks=rng.choice([5, 8, 20]),
        p_size=rng.choice([1, 1, 2, 4]),
        d_size=rng.choice([1, 1, 2, 4]),
        **options,  # type: ignore[arg-type]
    )
    populate(world, rng)
    weights: dict[str, float] = {}  # by kind: some things are slow in this world

    def weight(move: Move) -> float:
        kind = move[0].partition(" ")[2]
        return weights.setdefault(kind, rng.choice([1.0, 1.0, 1.0, 0.02]))

    for _ in range(rng.randint(5, 200)):
        faults = world.faults()
        moves = world.moves()
        if faults and (not moves or rng.random() < fault_rate):
            moves = faults
        if moves:
            rng.choices(moves, [weight(move) for move in moves])[0][1]()
    world.settle(rng.randrange)
    return world


def test_thousands_of_orders() -> None:
    outcomes: dict[str, int] = {}
    for seed in range(1000):
        world = play(seed, fault_rate=(0.0, 0.03, 0.1, 0.3)[seed % 4])
        for attempt in world.attempts.values():
            outcomes[attempt.outcomes[0]] = outcomes.get(attempt.outcomes[0], 0) + 1
        fresh = world.add(3)  # whatever has happened, the next request is served
        world.settle()
        assert fresh.outcomes == ["done"], seed
    assert all(outcomes[kind] > 200 for kind in ("done", "failed", "left")), outcomes


def test_without_faults_everything_succeeds() -> None:
    for seed in range(100):
        world = play(seed, fault_rate=0.0)
        assert {a.outcomes[0] for a in world.attempts.values()} <= {"done"}, seed


class ModelMachine(RuleBasedStateMachine):
    """The same, driven by hypothesis, which shrinks what it finds."""

    @initialize(seed=st.integers(0, 1000), checksum=st.booleans())
    def start(self, seed: int, checksum: bool) -> None:
        self.world = World(checksum=checksum)
        populate(self.world, random.Random(seed))

    @rule(pick=st.integers(0, 200))
    def move(self, pick: int) -> None:
        if moves := self.world.moves():
            moves[pick % len(moves)][1]()

    @rule(pick=st.integers(0, 200))
    def move_on(self, pick: int) -> None:
        for _ in range(5):
            self.move(pick)

    @rule(pick=st.integers(0, 200))
    def fault(self, pick: int) -> None:
        faults = self.world.faults()
        faults[pick % len(faults)][1]()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()


ModelMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestModelMachine = ModelMachine.TestCase


# ------------------------------------------------------------------ the model sees what is wrong


class GivesBackTooEarly(Receive):
    """V04: frees on a cancel, whatever is still being written."""

    def _stop(self) -> None:
        self._end()


class IgnoresDoubt(Receive):
    def in_doubt(self, error: Exception) -> None:
        self.pull_ended(error)


class CommitsWithABlockMissing(Receive):
    def _ready(self, num_blocks: int) -> None:
        super()._ready(num_blocks)
        self.num_here = max(self.num_here, num_blocks - 1)


class CountsAPartlyHeldBlock(Receive):
    """Of P's block, which is larger, D has a part."""

    def reserved(self, local_ids: tuple[int, ...], num_held: int) -> None:
        super().reserved(local_ids, num_held)
        if self.state is ReceiveState.RESERVED:
            self.num_here = -(-self.num_held_tokens // self.remote_block_size)


class NeverGivesBack(Receive):
    """V01"""

    def _end(self) -> None:
        super()._end()
        self._give_back = lambda: None

    def lost(self, error: Exception) -> None:
        self._give_back = lambda: None
        super().lost(error)


class UnpinsAtTheCommit(LeaseTable):
    """Frees what a copy may still be reading."""

    def commit(self, request_id: str, *args: Any) -> None:
        super().commit(request_id, *args)
        self._unpin(request_id, None)


@pytest.mark.parametrize(
    "broken",
    [
        GivesBackTooEarly,
        IgnoresDoubt,
        CommitsWithABlockMissing,
        CountsAPartlyHeldBlock,
        NeverGivesBack,
        UnpinsAtTheCommit,
    ],
)
def test_the_model_sees(broken: type) -> None:
    """A test that cannot fail proves nothing: each of these is found."""
    kind = "receive" if issubclass(broken, Receive) else "leases"
    with pytest.raises(AssertionError):
        for seed in range(500):
            play(seed, 0.1, **{kind: broken})


class DecodesWithoutTheFence(Receive):
    def verified(self) -> None:
        self.state = ReceiveState.RELEASED


class AlwaysSaysPinned(LeaseTable):
    def release(self, request_id: str) -> bool:
        super().release(request_id)
        return True


@pytest.mark.parametrize("broken", [None, DecodesWithoutTheFence, AlwaysSaysPinned])
def test_only_the_fence_sees_reuse_at_p(broken: type | None) -> None:
    """P loses D's stream in the middle of a pull and gives the blocks to the next prompt; D has
    not heard of it when its copy is over, and there are no checksums."""
    options: dict[str, Any] = {}
    if broken is not None:
        options["receive" if issubclass(broken, Receive) else "leases"] = broken
    world = World(checksum=False, p_blocks=2, d_blocks=8, **options)
    first, second = world.add(2), world.add(2)

    def do(*names: str) -> None:
        for name in names:
            dict(world.moves() + world.faults())[name]()

    do("a0 prefill leg goes out", "a0 decode leg goes out", "a0 attach arrives", "a0 P admits")
    do("a0 P computes", *["a0 P announces"] * 3, *["a0 event arrives"] * 3)
    do("a0 D admits", "a0 pull begins", "a0 stream breaks at P")
    do("a1 prefill leg goes out", "a1 P admits", "a1 P computes")
    do("a0 block lands", "a0 block lands", "a0 wire is quiet", "a0 D verifies")
    if broken is not None:
        with pytest.raises(AssertionError, match="decodes a wrong block"):
            if broken is AlwaysSaysPinned:
                do("a0 D asks for release", "a0 release arrives", "a0 answer arrives")
            do("a0 D answers")
        return
    do("a0 D asks for release", "a0 release arrives", "a0 answer arrives", "a0 D answers")
    assert first.outcomes == ["failed"]
    world.settle()
    assert second.outcomes == ["done"]
