"""What a chat model writes, taken apart while it streams: reasoning, content, tool calls.

A reader sees one character after the other, however they were grouped on their way: so the deltas
of a stream, joined, are the message of a response in one piece.
"""

import secrets
import string
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Literal

THINK, END_THINK = "<think>", "</think>"
_ALPHANUMERIC = string.ascii_letters + string.digits

# A `yield` waits for the next character; at the end of the text that is "".
Reading = Generator[None, None, None]
ReadingText = Generator[None, None, str]
ReadingBool = Generator[None, None, bool]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls. `read` gets the scanner and the names of the
    request's tools. `markers` are shown in the text even where the tokenizer calls them special.
    """

    name: str
    read: Callable[["Scanner", frozenset[str]], Reading]
    markers: tuple[str, ...] = ()
    short_ids: bool = False  # nine letters and digits, which Mistral's templates insist on


@dataclass(frozen=True, slots=True)
class ReadingPlan:
    """What to look for in the answers to one request."""

    tool_format: ToolFormat | None = None
    tool_names: frozenset[str] = frozenset()
    parallel_calls: bool = True  # False: calls after the first are dropped
    # Whether `<think>` may come, or was in the prompt already.
    reasoning: Literal["marked", "open"] | None = None

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts of the tokens that part the answer."""
        tool_markers = self.tool_format.markers if self.tool_format is not None else ()
        return (*tool_markers, *((THINK, END_THINK) if self.reasoning is not None else ()))


@dataclass(slots=True)
class CallDelta:
    """What is new in one tool call; id and name come once, with its first delta."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass(slots=True)
class MessageDelta:
    """What is new in one message. False if nothing is."""

    content: str = ""
    reasoning: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


class Scanner:
    """The text of one choice as a stream of characters, and what it has been found to mean.

    White space that ends the reasoning, or stands between content and a tool call, is dropped."""

    def __init__(self, *, parallel: bool = True, short_ids: bool = False) -> None:
        self.num_calls = 0
        self._parallel = parallel
        self._short_ids = short_ids
        self._pending = ""  # read by nobody yet
        self._has_ended = False
        self._delta = MessageDelta()
        self._blank = ""  # white space that may be the last of the content
        self._reasoning_blank = ""

    def send(self, character: str) -> None:
        """The next character; "" says that there is none."""
        self._pending += character
        self._has_ended = not character

    def take_delta(self) -> MessageDelta:
        delta, self._delta = self._delta, MessageDelta()
        return delta

    def left_over(self) -> str:
        """What was looked at and not taken."""
        text, self._pending = self._pending, ""
        return text

    def end(self) -> None:
        """No text will come."""
        if not self.num_calls:
            self._delta.content += self._blank
        self._blank = ""

    # ------------------------------------------------------------ characters

    def peek(self) -> ReadingText:
        """The next character, which stays; "" at the end."""
        while not self._pending and not self._has_ended:
            yield
        return self._pending[:1]

    def take(self) -> ReadingText:
        character = yield from self.peek()
        self._pending = self._pending[1:]
        return character

    def unread(self, text: str) -> None:
        """What was taken is still to come."""
        self._pending = text + self._pending

    def skip_blank(self) -> ReadingText:
        """White space, consumed."""
        skipped = ""
        while (yield from self.peek()).isspace():
            skipped += yield from self.take()
        return skipped

    def match(self, literal: str) -> ReadingText:
        """Consumes as much of `literal` as is there: all of it if it matches."""
        consumed = ""
        for wanted in literal:
            if (yield from self.peek()) != wanted:
                break
            consumed += yield from self.take()
        return consumed

    def content_until(self, marker: str) -> ReadingBool:
        """Content up to `marker`, which is consumed. False: the text ended without it."""
        held = ""
        while character := (yield from self.take()):
            held += character
            while not marker.startswith(held):
                self.content(held[0])
                held = held[1:]
            if held == marker:
                return True
        self.content(held)
        return False

    def reasoning_until(self, marker: str) -> ReadingBool:
        """As `content_until`, for reasoning."""
        held = ""
        while character := (yield from self.take()):
            held += character
            while not marker.startswith(held):
                self.reason(held[0])
                held = held[1:]
            if held == marker:
                return True
        self.reason(held)
        return False

    # ------------------------------------------------------------ what they mean

    def content(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._delta.content += self._blank + kept
            self._blank = ""
        self._blank += text[len(kept) :]

    def reason(self, text: str) -> None:
        kept = text.rstrip()
        if kept:
            self._delta.reasoning += self._reasoning_blank + kept
            self._reasoning_blank = ""
        self._reasoning_blank += text[len(kept) :]

    def start_call(self, name: str) -> None:
        self._blank = ""
        self.num_calls += 1
        if self._is_kept:
            call_id = (
                "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
                if self._short_ids
                else f"call_{secrets.token_hex(12)}"
            )
            self._delta.calls.append(CallDelta(self.num_calls - 1, call_id, name))

    def arguments(self, text: str) -> None:
        """More of the last call's arguments."""
        if not self._is_kept:
            return
        calls, index = self._delta.calls, self.num_calls - 1
        if not calls or calls[-1].index != index:
            calls.append(CallDelta(index))
        calls[-1].arguments += text

    @property
    def _is_kept(self) -> bool:
        return self._parallel or self.num_calls <= 1


def read_reasoning(scanner: Scanner, is_open: bool) -> Reading:
    """A `<think>...</think>` at the beginning. `is_open`: it began in the prompt already."""
    blank = yield from scanner.skip_blank()
    marker = yield from scanner.match(THINK)
    if marker != THINK:
        if not is_open:
            scanner.unread(blank + marker)
            return
        scanner.unread(marker)
    yield from scanner.skip_blank()
    yield from scanner.reasoning_until(END_THINK)
    yield from scanner.skip_blank()


class ChatReader:
    """Takes one choice apart."""

    def __init__(self, plan: ReadingPlan) -> None:
        form = plan.tool_format
        self._scanner = Scanner(
            parallel=plan.parallel_calls, short_ids=form is not None and form.short_ids
        )
        self._run: Reading | None = self._reading(plan)
        self._advance()

    @property
    def has_calls(self) -> bool:
        return self._scanner.num_calls > 0

    def feed(self, text: str, is_last: bool = False) -> MessageDelta:
        """What `text` adds. Some of it may be held back until it is clear what it means, but
        nothing behind the last text."""
        for position, character in enumerate(text):
            if self._run is None:  # nothing but content can come
                self._scanner.content(text[position:])
                break
            self._scanner.send(character)
            self._advance()
        if is_last:
            if self._run is not None:
                self._scanner.send("")
                self._advance()
            self._scanner.end()
        return self._scanner.take_delta()

    def _advance(self) -> None:
        assert self._run is not None
        try:
            next(self._run)
        except StopIteration:
            self._run = None
            self._scanner.content(self._scanner.left_over())

    def _reading(self, plan: ReadingPlan) -> Reading:
        if plan.reasoning is not None:
            yield from read_reasoning(self._scanner, plan.reasoning == "open")
        if plan.tool_format is not None:
            yield from plan.tool_format.read(self._scanner, plan.tool_names)
