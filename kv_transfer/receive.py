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
    """One hand-over at a decode worker, of `num_tokens` tokens in blocks of `block_size`.

    P's blocks may have another size, which its admission says. Positions and counts are of P's
    blocks: what is final, here, or being pulled. Only `local_ids` are this worker's own.
    `give_back` frees whatever the engine holds for the attempt, in whatever state it is there.
    """

    def __init__(
        self,
        *,
        num_tokens: int,
        token_digest: bytes,
        block_size: int,
        give_back: Callable[[], None],
    ) -> None:
        self.state = _S.ATTACHED
        self.num_tokens = num_tokens
        self.token_digest = token_digest
        self.block_size = block_size
        self.remote_block_size = 0  # unknown before the admission
        self.num_blocks = 0  # P's, for all tokens
        self.remote_ids: tuple[int, ...] = ()
        self.local_ids: tuple[int, ...] = ()
        self.num_held_tokens = 0  # leading tokens that were here already
        self.num_ready = 0  # leading blocks that are final at P
        self.num_here = 0  # leading blocks that are here whole
        self.pulling = (0, 0)  # positions, the end excluded
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
            case Admitted(block_ids, block_size):
                self._admitted(block_ids, block_size)
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

    def _admitted(self, block_ids: tuple[int, ...], block_size: int) -> None:
        if self.state is not _S.ATTACHED:
            self._out_of_turn("a second admission")
            return
        needed = -(-self.num_tokens // block_size)
        if len(block_ids) != needed:
            self.fail(
                HandoverError(f"P has {len(block_ids)} blocks for the prompt, {needed} are needed")
            )
        else:
            self.remote_ids, self.remote_block_size = block_ids, block_size
            self.num_blocks = needed
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
        is_early = self.state is _S.ATTACHED or self.num_ready != self.num_blocks
        if is_early or self.commit is not None:
            self._out_of_turn(f"a commit record at {self.num_ready} of {self.num_blocks} blocks")
        elif (commit.num_tokens, commit.token_digest) != (self.num_tokens, self.token_digest):
            self.fail(HandoverError("the commit record is for other tokens"))
        else:
            self.commit = commit
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
        """This worker's block of every position; the first `num_held` of them need no pull."""
        needed = -(-self.num_tokens // self.block_size)
        if self.state is not _S.RESERVING:
            self._out_of_turn("blocks that nobody asked for")
        elif len(local_ids) != needed or not 0 <= num_held <= needed:
            self.fail(HandoverError(f"{len(local_ids)} blocks were reserved for {needed}"))
        else:
            self.local_ids = local_ids
            self.num_held_tokens = min(num_held * self.block_size, self.num_tokens)
            is_all_held = self.num_held_tokens == self.num_tokens
            whole = self.num_held_tokens // self.remote_block_size
            self.num_here = self.num_blocks if is_all_held else whole
            self.state = _S.RESERVED
            self._go_on()

    @property
    def next_pull(self) -> tuple[int, int] | None:
        """Positions that are final at P and missing here, the end excluded, if a pull may begin.
        Of the first, tokens before `num_held_tokens` are here."""
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
