"""What `support.kv_world` is made of: block pools, copies under way, and attempts."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from core.errors import PdserveError
from kv_transfer.events import Event, EventFeed
from kv_transfer.lease import Lease
from kv_transfer.receive import Receive

Content = tuple[str, int]  # the prompt's attempt, the token: what a right slot of a block holds


class Pool:
    """Blocks with owners. Content outlives its owner, until somebody writes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.owner: list[str | None] = [None] * num_blocks
        self.content: list[list[Content | None]] = [[None] * block_size for _ in self.owner]

    def needs(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def slot(self, table: Sequence[int], token: int) -> tuple[int, int]:
        """The block and the place in it."""
        return table[token // self.block_size], token % self.block_size

    def allocate(self, count: int, owner: str) -> list[int] | None:
        free = [block for block, holder in enumerate(self.owner) if holder is None][:count]
        if len(free) < count:
            return None
        for block in free:
            self.owner[block] = owner
        return free

    def free(self, owner: str) -> None:
        self.owner = [None if holder == owner else holder for holder in self.owner]


@dataclass
class Pull:
    """A copy under way. Tokens land one by one; `doubted`: the worker has given up on it, but the
    wire has not."""

    tokens: list[int]
    remote: Sequence[int]  # block tables
    local: Sequence[int]
    source: Pool  # of the incarnation that it reads from
    doubted: bool = False
    flips: bool = False  # the next block that lands is garbage


@dataclass
class Attempt:
    id: str
    num_tokens: int
    num_held: int  # blocks that D's prefix cache has
    is_last_token: bool  # P's first token ends it
    machine: Receive
    # At P.
    lease: Lease | None = None
    table: list[int] | None = None
    num_computed: int = 0
    # The legs, as the router has them: unsent, sent, open, ended.
    prefill_leg: str = "unsent"
    decode_leg: str = "unsent"
    outcomes: list[str] = field(default_factory=list)
    # The Attach stream: P's end, and what is on its way to D.
    stream: str = "none"  # none, asked, open, broken
    feed: EventFeed | None = None
    on_way: list[Event | PdserveError] = field(default_factory=list)
    pull: Pull | None = None
    # none, asked, a bool answered, lost
    release: object = "none"
    incarnation: int = 0
    num_given_back: int = 0
    is_decoding: bool = False
