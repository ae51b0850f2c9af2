"""The decode worker's side of one hand-over, as states and events.

    ATTACHED     the Attach stream is being opened, or is open; nothing is reserved here
    RESERVING    P has its blocks; ours are asked for
    RESERVED     ours, and none of them is being written; `next_pull` says what may be pulled
    PULLING      the blocks of `pulling` are being written
    COMMITTED    every block is here, and P's commit record; being verified
    RELEASING    verified; P is being asked whether its blocks were pinned without a gap
    STOPPING     the outcome is known, but a pull may still write: it is being cancelled
    QUARANTINED  the outcome is known, a copy is in doubt: the blocks are kept until it is quiet
    RELEASED     terminal: the blocks are the sequence's, decode
    FINISHED     terminal: P's first token was the last; given back
    ABORTED      terminal: `error` says why; given back

    state                           event                    -> state
    ATTACHED                        admitted                    RESERVING
    RESERVING                       reserved                    RESERVED
    RESERVING, RESERVED, PULLING    ready, commit               same, noted
    RESERVED                        begin_pull                  PULLING
    PULLING                         pulled                      RESERVED
    RESERVED                        with every block here and
                                    the commit record           COMMITTED
    COMMITTED                       verified                    RELEASING
    RELEASING                       fenced: pinned              RELEASED
    RELEASING                       fenced: not pinned          ABORTED
    RELEASING                       lost                        same: the fence's answer decides
    ATTACHED, RESERVING, RESERVED   finished                    FINISHED
    PULLING                         finished, lost, fail        STOPPING
    PULLING                         pull_ended                  ABORTED
    STOPPING                        pulled, pull_ended          FINISHED or ABORTED
    PULLING, STOPPING               in_doubt                    QUARANTINED
    QUARANTINED                     quiet                       FINISHED or ABORTED
    any other that is not terminal  lost, fail                  ABORTED
    any that is not terminal        an event out of turn        as fail
    STOPPING, QUARANTINED           any other                   same
    terminal                        any                         same

Five states have a piece of work, which the worker does: RESERVING, RESERVED with a `next_pull`
(it pulls), COMMITTED (it verifies), RELEASING, and RELEASED (it starts decoding). The first
outcome stands: later ones change nothing. Blocks are given back exactly once, by the one call of
`give_back` on the way into FINISHED or ABORTED, and never while a pull may write into them. The
machine does no I/O and knows no time; every bound is its caller's.
"""

from collections.abc import Callable
from enum import StrEnum

from core.errors import HandoverError
from core.types import FinishReason
from kv_transfer.events import Admitted, Commit, Event, Finished, Ready


class ReceiveState(StrEnum):
    ATTACHED = "attached"
    RESERVING = "reserving"
    RESERVED = "reserved"
    PULLING = "pulling"
    COMMITTED = "committed"
    RELEASING = "releasing"
    STOPPING = "stopping"
    QUARANTINED = "quarantined"
    RELEASED = "released"
    FINISHED = "finished"
    ABORTED = "aborted"

    @property
    def is_terminal(self) -> bool:
        return self in (ReceiveState.RELEASED, ReceiveState.FINISHED, ReceiveState.ABORTED)

    @property
    def is_live(self) -> bool:
        """The hand-over may still succeed."""
        return not (self.is_terminal or self in (ReceiveState.STOPPING, ReceiveState.QUARANTINED))


_S = ReceiveState


class Receive:
    """One hand-over at a decode worker: `num_blocks` blocks for `num_tokens` tokens.

    `give_back` frees whatever the engine holds for the attempt, in whatever state it is there.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        token_digest: bytes,
        num_blocks: int,
        give_back: Callable[[], None],
    ) -> None:
        self.state = _S.ATTACHED
        self.num_tokens = num_tokens
        self.token_digest = token_digest
        self.num_blocks = num_blocks
        self.remote_ids: tuple[int, ...] = ()
        self.local_ids: tuple[int, ...] = ()
        self.num_held = 0  # leading blocks that were here already
        self.num_ready = 0  # leading blocks that are final at P
        self.num_here = 0  # leading blocks that are here
        self.pulling = (0, 0)  # positions, the end excluded
        self.tail_blocks = 0  # not yet here when the commit record came
        self.commit: Commit | None = None
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self._is_finished = False
        self._give_back = give_back

    @property
    def is_decided(self) -> bool:
        """The outcome is known and the worker may answer; blocks may still be in quarantine."""
        return self.state.is_terminal or self.state is _S.QUARANTINED

    @property
    def is_finished(self) -> bool:
        """P's first token was the last."""
        return self._is_finished

    # ------------------------------------------------------------ from P

    def announced(self, event: Event) -> None:
        if not self.state.is_live:
            return
        match event:
            case Admitted(block_ids):
                self._admitted(block_ids)
            case Ready(num_blocks):
                self._ready(num_blocks)
            case Commit():
                self._committed(event)
            case Finished(reason):
                if self.commit is not None:
                    self._out_of_turn("an end of the sequence after the commit record")
                    return
                self._is_finished, self.finish_reason = True, reason
                self._stop()

    def _admitted(self, block_ids: tuple[int, ...]) -> None:
        if self.state is not _S.ATTACHED:
            self._out_of_turn("a second admission")
        elif len(block_ids) != self.num_blocks:
            self.fail(
                HandoverError(
                    f"P has {len(block_ids)} blocks for the prompt, {self.num_blocks} are needed"
                )
            )
        else:
            self.remote_ids = block_ids
            self.state = _S.RESERVING

    def _ready(self, num_blocks: int) -> None:
        if self.state is _S.ATTACHED or self.commit is not None:
            self._out_of_turn("blocks before the admission or after the commit record")
        elif not self.num_ready < num_blocks <= self.num_blocks:
            self._out_of_turn(f"{num_blocks} final blocks after {self.num_ready}")
        else:
            self.num_ready = num_blocks
            self._go_on()

    def _committed(self, commit: Commit) -> None:
        if self.num_ready != self.num_blocks or self.commit is not None:
            self._out_of_turn(f"a commit record at {self.num_ready} of {self.num_blocks} blocks")
        elif (commit.num_tokens, commit.token_digest) != (self.num_tokens, self.token_digest):
            self.fail(HandoverError("the commit record is for other tokens"))
        elif len(commit.checksums) not in (0, self.num_blocks):
            self._out_of_turn(f"{len(commit.checksums)} checksums for {self.num_blocks} blocks")
        else:
            self.commit = commit
            self.tail_blocks = self.num_blocks - self.num_here
            self._go_on()

    def lost(self, error: Exception) -> None:
        """The Attach stream has ended, and with it the lease."""
        if self.state is not _S.RELEASING:
            self.fail(error)

    # ------------------------------------------------------------ from this worker

    def fail(self, error: Exception) -> None:
        """The attempt is not wanted any more, or cannot go on."""
        if self.state.is_live:
            self.error = error
            self._stop()

    def reserved(self, local_ids: tuple[int, ...], num_held: int) -> None:
        """This worker's block of every position; the first `num_held` need no pull."""
        if self.state is not _S.RESERVING:
            self._out_of_turn("blocks that nobody asked for")
        elif len(local_ids) != self.num_blocks or not 0 <= num_held <= self.num_blocks:
            self.fail(HandoverError(f"{len(local_ids)} blocks were reserved for {self.num_blocks}"))
        else:
            self.local_ids = local_ids
            self.num_held = self.num_here = num_held
            if self.commit is not None:
                self.tail_blocks = self.num_blocks - num_held
            self.state = _S.RESERVED
            self._go_on()

    @property
    def next_pull(self) -> tuple[int, int] | None:
        """Positions that are final at P and missing here, the end excluded, if a pull may begin."""
        if self.state is not _S.RESERVED or self.num_here >= self.num_ready:
            return None
        return self.num_here, self.num_ready

    def begin_pull(self) -> None:
        """From now on the blocks of `pulling`, which were `next_pull`, may be written."""
        if (positions := self.next_pull) is None:
            self._out_of_turn("a pull")
        else:
            self.pulling = positions
            self.state = _S.PULLING

    def pulled(self) -> None:
        """Every block of `pulling` is here."""
        if self.state is _S.PULLING:
            self.num_here = self.pulling[1]
            self.state = _S.RESERVED
            self._go_on()
        else:
            self._pull_is_quiet("the end of a pull")

    def pull_ended(self, error: Exception) -> None:
        """The pull has failed or was cancelled, and writes no more."""
        if self.state is _S.PULLING:
            self.error = error
            self._end()
        else:
            self._pull_is_quiet("the failure of a pull")

    def _pull_is_quiet(self, what: str) -> None:
        if self.state is _S.STOPPING:
            self._end()
        else:
            self._out_of_turn(what)

    def in_doubt(self, error: Exception) -> None:
        """The pull has ended, but may still write until `quiet`."""
        if self.state not in (_S.PULLING, _S.STOPPING):
            self._out_of_turn("a copy in doubt")
            return
        if self.error is None and not self._is_finished:
            self.error = error
        self.state = _S.QUARANTINED

    def quiet(self) -> None:
        if self.state is _S.QUARANTINED:
            self._end()
        else:
            self._out_of_turn("quiet")

    def verified(self) -> None:
        """The blocks are what P computed."""
        if self.state is _S.COMMITTED:
            self.state = _S.RELEASING
        else:
            self._out_of_turn("a verification")

    def fenced(self, is_pinned: bool) -> None:
        """P's answer: whether every block was pinned from the admission until now."""
        if self.state is not _S.RELEASING:
            self._out_of_turn("an answer to a release")
        elif is_pinned:
            self.state = _S.RELEASED
        else:
            self.fail(HandoverError("P had given the blocks away"))

    # ------------------------------------------------------------ inside

    def _go_on(self) -> None:
        is_reserved = self.state is _S.RESERVED
        if is_reserved and self.commit is not None and self.num_here == self.num_blocks:
            self.state = _S.COMMITTED

    def _out_of_turn(self, what: str) -> None:
        self.fail(HandoverError(f"{what} came while the hand-over was {self.state}"))

    def _stop(self) -> None:
        if self.state is _S.PULLING:
            self.state = _S.STOPPING
        else:
            self._end()

    def _end(self) -> None:
        self.state = _S.FINISHED if self._is_finished else _S.ABORTED
        self._give_back()
