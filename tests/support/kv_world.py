"""A prefill worker, a decode worker, a router and the network between them, in virtual time.

The lease table, the event feed and the receiving machine are the project's own; engines, pools,
wires and the router are models of a few lines. `moves()` lists everything that may happen next,
`faults()` what may go wrong; whoever drives picks any of them in any order. Every move checks the
promises that must hold at once, and `settle()` those that must hold in the end:

- nothing is written into a block at D that is not the attempt's own any more,
- what is decoded is what P computed, every block of it, however P's blocks were reused meanwhile,
- each attempt has one outcome at the router, and is given back or decoded, once,
- when all is over every block of both pools is free and no lease is left.
"""

from collections.abc import Callable

from core.errors import CancelledByPeerError, HandoverError, PdserveError, UnavailableError
from core.types import FinishReason
from kv_transfer.events import EventFeed
from kv_transfer.lease import LeaseTable
from kv_transfer.receive import Receive, ReceiveState
from support.kv_attempt import Attempt, Pool, Pull

LEASE_SECONDS = 30.0
Move = tuple[str, Callable[[], None]]


class World:
    def __init__(
        self,
        *,
        checksum: bool = True,
        receive: type[Receive] = Receive,
        leases: type[LeaseTable] = LeaseTable,
        p_blocks: int = 6,
        d_blocks: int = 5,
        p_size: int = 1,
        d_size: int = 1,
    ) -> None:
        """`p_size` and `d_size` are tokens in a block."""
        self.checksum = checksum
        self._receive, self._leases = receive, leases
        self._p_blocks, self._p_size = p_blocks, p_size
        self.now = 0.0
        self.attempts: dict[str, Attempt] = {}
        self.d = Pool(d_blocks, d_size)
        self.incarnation = 0
        self._start_p()

    def _start_p(self) -> None:
        self.p = Pool(self._p_blocks, self._p_size)
        self.leases = self._leases(
            lease_seconds=LEASE_SECONDS, clock=lambda: self.now, unpin=self._unpin
        )
        self.waiting: list[str] = []  # at P's engine, first come first served

    def _unpin(self, request_id: str, error: PdserveError | None) -> None:
        self.p.free(request_id)
        if request_id in self.waiting:
            self.waiting.remove(request_id)

    def add(self, num_tokens: int, num_held: int = 0, is_last_token: bool = False) -> Attempt:
        attempt_id = f"a{len(self.attempts)}"

        def give_back() -> None:
            attempt = self.attempts[attempt_id]
            attempt.num_given_back += 1
            assert attempt.num_given_back == 1, "given back twice"
            assert not attempt.is_decoding, "given back while it decodes"
            self.d.free(attempt_id)

        machine = self._receive(
            num_tokens=num_tokens,
            token_digest=attempt_id.encode(),
            block_size=self.d.block_size,
            give_back=give_back,
        )
        num_held = min(num_held, self.d.needs(num_tokens))
        attempt = Attempt(attempt_id, num_tokens, num_held, is_last_token, machine)
        self.attempts[attempt_id] = attempt
        return attempt

    # ------------------------------------------------------------ what may happen

    def moves(self) -> list[Move]:
        found: list[Move] = []
        for a in self.attempts.values():
            found += [(f"{a.id} {name}", act) for name, act in self._moves_of(a)]
        return found

    def _moves_of(self, a: Attempt) -> list[Move]:
        state, found = a.machine.state, []

        def may(name: str, condition: object, act: Callable[[Attempt], None]) -> None:
            if condition:
                found.append((name, lambda: act(a)))

        is_here = a.incarnation == self.incarnation
        may("prefill leg goes out", a.prefill_leg == "unsent", self._open_prefill)
        may("decode leg goes out", a.decode_leg == "unsent", self._open_decode)
        may("attach arrives", a.stream == "asked", self._attach)
        if is_here and a.lease is not None:
            is_first = self.waiting[:1] == [a.id]
            may("P admits", is_first and self._has_room(self.p, a), self._admit)
            may("P computes", a.table is not None and not a.lease.ended.is_set()
                and a.num_computed < a.num_tokens, self._compute)  # fmt: skip
        may("P announces", a.stream == "open" and a.lease and a.lease.changed.is_set(),
            self._announce)  # fmt: skip
        may("event arrives", a.on_way, self._arrive)
        may("prefill leg ends", a.prefill_leg == "open" and a.lease is not None
            and a.lease.ended.is_set(), self._prefill_ends)  # fmt: skip
        if a.decode_leg != "open":
            may("block lands", a.pull and a.pull.tokens, self._land)
            may("wire is quiet", a.pull and not a.pull.tokens, self._wire_is_quiet)
            return found
        may("D admits", state is ReceiveState.RESERVING and self._has_room(self.d, a),
            self._reserve)  # fmt: skip
        may("pull begins", a.machine.next_pull, self._begin_pull)
        may("block lands", a.pull and a.pull.tokens, self._land)
        may("wire is quiet", a.pull and not a.pull.tokens, self._wire_is_quiet)
        may("pull is cancelled", state is ReceiveState.STOPPING, self._pull_cancelled)
        may("D verifies", state is ReceiveState.COMMITTED, self._verify)
        may("D asks for release", state is ReceiveState.RELEASING and a.release == "none",
            self._ask)  # fmt: skip
        may("release arrives", a.release == "asked", self._release)
        may("answer arrives", isinstance(a.release, bool), self._answer)
        may("release times out", a.release == "lost", self._time_out)
        may("D answers", a.machine.is_decided, self._decode_decided)
        return found

    def faults(self) -> list[Move]:
        found: list[Move] = [("P restarts", self._restart_p), ("time passes", self._time)]
        for a in self.attempts.values():

            def may(name: str, condition: object, act: Callable[[Attempt], None],
                    a: Attempt = a) -> None:  # fmt: skip
                if condition:
                    found.append((f"{a.id} {name}", lambda: act(a)))

            may("router leaves", "open" in (a.prefill_leg, a.decode_leg), self._router_leaves)
            may("prefill leg breaks", a.prefill_leg == "open", self._prefill_breaks)
            may("stream breaks at P", a.stream == "open", self._break_at_p)
            may("stream breaks at D", a.stream in ("asked", "open"), self._break_at_d)
            pulling = a.pull is not None and not a.pull.doubted
            is_pulling = pulling and a.machine.state is ReceiveState.PULLING
            may("pull fails", is_pulling, self._pull_fails)
            may("pull is in doubt", pulling, self._doubt)
            may("byte flips", is_pulling and self.checksum, self._flip)
            may("engine error at P", a.table is not None, self._engine_error)
            may("release is lost", a.release == "asked", lambda a: setattr(a, "release", "lost"))
            may("answer is lost", isinstance(a.release, bool),
                lambda a: setattr(a, "release", "lost"))  # fmt: skip
        return found

    @staticmethod
    def _has_room(pool: Pool, a: Attempt) -> bool:
        return pool.owner.count(None) >= pool.needs(a.num_tokens)

    # ------------------------------------------------------------ the router

    def _open_prefill(self, a: Attempt) -> None:
        a.prefill_leg = "open"
        a.incarnation = a.incarnation or self.incarnation
        try:
            if a.incarnation != self.incarnation:
                raise HandoverError("an earlier life")
            a.lease = self.leases.open(a.id, a.id.encode(), a.num_tokens)
            self.waiting.append(a.id)
        except PdserveError:
            self._leg_failed(a, "prefill")

    def _open_decode(self, a: Attempt) -> None:
        a.decode_leg = "open"
        a.incarnation = a.incarnation or self.incarnation
        a.stream = "asked"

    def _prefill_ends(self, a: Attempt) -> None:
        assert a.lease is not None
        if a.lease.error is not None:
            self._leg_failed(a, "prefill")
        else:
            a.prefill_leg = "ended"

    def _leg_failed(self, a: Attempt, leg: str) -> None:
        setattr(a, f"{leg}_leg", "ended")
        if not a.outcomes:
            a.outcomes.append("failed")
        self._cancel_legs(a)

    def _cancel_legs(self, a: Attempt) -> None:
        if a.prefill_leg == "open":
            a.prefill_leg = "ended"
            if a.incarnation == self.incarnation:
                self.leases.fail(a.id, CancelledByPeerError("cancelled"))
        if a.decode_leg == "open":
            # The call is cancelled; what D still has to do for the attempt goes on.
            a.machine.fail(CancelledByPeerError("cancelled"))
            if a.is_decoding:
                self._stop_decoding(a)
            elif a.machine.state is ReceiveState.RELEASED:
                a.num_given_back += 1
                self.d.free(a.id)
            if a.machine.state is not ReceiveState.STOPPING:
                a.decode_leg = "ended"
                self._break_at_d(a)
        for leg in ("prefill_leg", "decode_leg"):
            if getattr(a, leg) == "unsent":
                setattr(a, leg, "ended")

    def _router_leaves(self, a: Attempt) -> None:
        if not a.outcomes:
            a.outcomes.append("left")
        self._cancel_legs(a)

    def _prefill_breaks(self, a: Attempt) -> None:
        if a.incarnation == self.incarnation:
            self.leases.fail(a.id, CancelledByPeerError("cut"))
        self._leg_failed(a, "prefill")

    # ------------------------------------------------------------ P

    def _admit(self, a: Attempt) -> None:
        self.waiting.remove(a.id)
        a.table = self.p.allocate(self.p.needs(a.num_tokens), a.id)
        assert a.table is not None
        self.leases.admitted(a.id, a.table)

    def _compute(self, a: Attempt) -> None:
        assert a.table is not None and a.lease is not None
        first = a.num_computed
        a.num_computed = min(first + 2, a.num_tokens)
        for token in range(first, a.num_computed):
            block, place = self.p.slot(a.table, token)
            assert self.p.owner[block] == a.id
            self.p.content[block][place] = (a.id, token)
        is_whole = a.num_computed == a.num_tokens
        if is_whole and a.is_last_token:
            self.p.free(a.id)
            self.leases.finish(a.id, FinishReason.STOP)
            return
        # A partial block is final only when the whole prompt is computed.
        num_final = len(a.table) if is_whole else a.num_computed // self.p.block_size
        assert a.lease is not None
        if num_final > a.lease.num_ready_blocks:
            self.leases.ready(a.id, num_final)
        if is_whole:
            self.leases.commit(a.id, 7, None)

    def _engine_error(self, a: Attempt) -> None:
        if a.incarnation == self.incarnation:
            self.leases.fail(a.id, UnavailableError("engine error"))

    def _restart_p(self) -> None:
        self.leases.fail_all(UnavailableError("gone"))
        self.incarnation += 1
        self._start_p()
        for a in self.attempts.values():
            if a.stream == "open":
                self._break_at_p(a)
            if a.prefill_leg == "open":
                self._leg_failed(a, "prefill")

    def _time(self) -> None:
        self.now += LEASE_SECONDS / 2
        self.leases.sweep()

    # ------------------------------------------------------------ the Attach stream

    def _attach(self, a: Attempt) -> None:
        try:
            if a.incarnation != self.incarnation:
                raise HandoverError("an earlier life")
            lease = self.leases.attach(a.id, a.id.encode())
        except PdserveError as error:
            a.stream = "broken"
            a.on_way.append(error)
            return
        a.lease = a.lease or lease
        a.feed, a.stream = EventFeed(lease, self.p.block_size), "open"
        lease.changed.set()

    def _announce(self, a: Attempt) -> None:
        assert a.feed is not None and a.lease is not None
        try:
            event = a.feed.next()
        except PdserveError as error:
            self._detach(a, error)
            return
        if event is not None:
            a.on_way.append(event)
        else:
            a.lease.changed.clear()
        if a.feed.is_over:
            self._detach(a, HandoverError("ended the lease"))

    def _detach(self, a: Attempt, error: PdserveError) -> None:
        a.stream = "broken"
        a.on_way.append(error)
        if a.lease is not None and a.incarnation == self.incarnation:
            self.leases.detach(a.lease)

    def _break_at_p(self, a: Attempt) -> None:
        """What was on its way may arrive or not; here it does, and then the end."""
        self._detach(a, UnavailableError("the stream broke"))

    def _break_at_d(self, a: Attempt) -> None:
        """D sees the end first; P as soon as this move is over."""
        is_open = a.stream == "open"
        a.stream, a.on_way = "broken", []
        a.machine.lost(UnavailableError("the stream broke"))
        if is_open and a.lease is not None and a.incarnation == self.incarnation:
            self.leases.detach(a.lease)

    def _arrive(self, a: Attempt) -> None:
        event = a.on_way.pop(0)
        if isinstance(event, PdserveError):
            a.machine.lost(event)
        else:
            a.machine.announced(event)

    # ------------------------------------------------------------ D

    def _reserve(self, a: Attempt) -> None:
        blocks = self.d.allocate(self.d.needs(a.num_tokens), a.id)
        assert blocks is not None
        for block in blocks:
            self.d.content[block] = [None] * self.d.block_size
        for token in range(min(a.num_held * self.d.block_size, a.num_tokens)):
            block, place = self.d.slot(blocks, token)
            self.d.content[block][place] = (a.id, token)
        a.machine.reserved(tuple(blocks), a.num_held)

    def _begin_pull(self, a: Attempt) -> None:
        assert a.pull is None, "two pulls at once"
        m = a.machine
        m.begin_pull()
        start, end = (position * m.remote_block_size for position in m.pulling)
        tokens = range(max(start, m.num_held_tokens), min(end, m.num_tokens))
        a.pull = Pull(list(tokens), m.remote_ids, m.local_ids, self.p)

    def _land(self, a: Attempt) -> None:
        assert a.pull is not None
        pull = a.pull
        token = pull.tokens.pop(0)
        block, place = self.d.slot(pull.local, token)
        assert self.d.owner[block] == a.id, "a block is written that has another owner"
        remote, there = pull.source.slot(pull.remote, token)
        content = pull.source.content[remote][there]
        self.d.content[block][place] = None if pull.flips else content
        pull.flips = False

    def _wire_is_quiet(self, a: Attempt) -> None:
        assert a.pull is not None
        pull, a.pull = a.pull, None
        if pull.doubted:
            a.machine.quiet()
        else:
            a.machine.pulled()
        self._after_stop(a)

    def _pull_cancelled(self, a: Attempt) -> None:
        if a.pull is not None:  # posts nothing more
            a.pull = None
        a.machine.pull_ended(HandoverError("cancelled"))
        self._after_stop(a)

    def _pull_fails(self, a: Attempt) -> None:
        a.pull = None
        a.machine.pull_ended(HandoverError("the wire broke"))

    def _doubt(self, a: Attempt) -> None:
        assert a.pull is not None
        a.pull.doubted = True
        a.machine.in_doubt(HandoverError("in doubt"))
        self._after_stop(a)

    def _after_stop(self, a: Attempt) -> None:
        """A cancelled call ends when its pull has."""
        if a.decode_leg == "open" and a.outcomes and a.machine.is_decided:
            a.decode_leg = "ended"
            self._break_at_d(a)

    def _flip(self, a: Attempt) -> None:
        assert a.pull is not None
        a.pull.flips = True

    def _verify(self, a: Attempt) -> None:
        if self.checksum:
            for token in range(a.machine.num_held_tokens, a.num_tokens):
                block, place = self.d.slot(a.machine.local_ids, token)
                if self.d.content[block][place] != (a.id, token):
                    a.machine.fail(HandoverError("corrupt"))
                    return
        a.machine.verified()

    def _ask(self, a: Attempt) -> None:
        a.release = "asked"

    def _release(self, a: Attempt) -> None:
        if a.incarnation != self.incarnation:
            a.release = "lost"
        else:
            a.release = self.leases.release(a.id)

    def _answer(self, a: Attempt) -> None:
        assert isinstance(a.release, bool)
        a.machine.fenced(a.release)
        a.release = "done"

    def _time_out(self, a: Attempt) -> None:
        a.machine.fail(HandoverError("no answer to the release"))
        a.release = "done"

    def _decode_decided(self, a: Attempt) -> None:
        state = a.machine.state
        if state is ReceiveState.RELEASED and not a.is_decoding:
            for token in range(a.num_tokens):
                block, place = self.d.slot(a.machine.local_ids, token)
                assert self.d.owner[block] == a.id, "decodes a block that is not its own"
                assert self.d.content[block][place] == (a.id, token), "decodes a wrong block"
            a.is_decoding = True
            return
        if a.is_decoding or a.machine.is_finished:
            if not a.outcomes:
                a.outcomes.append("done")
            if a.is_decoding:
                self._stop_decoding(a)
            a.decode_leg = "ended"
            self._break_at_d(a)
            return
        self._break_at_d(a)
        self._leg_failed(a, "decode")

    def _stop_decoding(self, a: Attempt) -> None:
        assert a.num_given_back == 0, "decoded and given back"
        a.is_decoding = False
        a.num_given_back += 1
        self.d.free(a.id)

    # ------------------------------------------------------------ the end

    def settle(self, pick: Callable[[int], int] = lambda count: 0) -> None:
        """Nothing goes wrong any more: lets everything happen and holds the end against what was
        promised. `pick(n)` chooses among n moves."""
        for _ in range(3):
            for _ in range(10_000):
                moves = self.moves()
                if not moves:
                    break
                moves[pick(len(moves))][1]()
            else:
                raise AssertionError("it never comes to rest")
            self.now += LEASE_SECONDS + 1
            self.leases.sweep()
        for a in self.attempts.values():
            assert len(a.outcomes) == 1, f"{a.id} has outcomes {a.outcomes}"
            assert a.decode_leg == a.prefill_leg == "ended"
            assert a.machine.state.is_terminal or a.machine.state is ReceiveState.ATTACHED
            assert a.num_given_back <= 1
        assert len(self.leases) == 0, "a lease is left"
        assert not any(self.p.owner), "P leaks blocks"
        assert not any(self.d.owner), "D leaks blocks"
