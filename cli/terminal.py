"""What the command says, and how: progress for people, one line for an error."""

import contextlib
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import TracebackType

import typer
from rich.console import Console
from rich.markup import escape
from rich.status import Status

from core.errors import PdserveError


@contextmanager
def clear_errors(verbose: bool | None = None) -> Iterator[None]:
    """Turns an error into one line on stderr and exit code 1. The traceback is for --verbose, or,
    in a command that has no such option, for what was not expected."""
    try:
        yield
    except (typer.Exit, typer.Abort, KeyboardInterrupt):
        raise
    except Exception as error:
        expected = isinstance(error, PdserveError)
        if verbose or (verbose is None and not expected):
            traceback.print_exc()
        what = str(error) if expected else f"unexpected {type(error).__name__}: {error}"
        hint = "; --verbose shows where" if verbose is False and not expected else ""
        print(f"pdserve: error: {' '.join(what.split())}{hint}", file=sys.stderr)
        raise typer.Exit(1) from error


class Reporter(AbstractContextManager["Reporter"]):
    """Tells what is going on. On a terminal the present activity spins in the last line and what
    is done stays above it; anywhere else each activity is one line, said once.

    It keeps the stdout of its birth: others may redirect `sys.stdout` meanwhile."""

    def __init__(self) -> None:
        self.console = Console(file=sys.stdout, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._last = ""

    def say(self, what: str) -> None:
        """One line of plain text, never wrapped. A terminal or pipe that is gone is no error:
        what is reported must go on, or be cleaned up."""
        with contextlib.suppress(OSError, SystemExit):  # rich exits on a broken pipe
            self.console.print(what, markup=False)

    def doing(self, what: str) -> None:
        is_terminal = self.console.is_terminal
        stage = what if is_terminal else re.sub(r" \d+%", "", what)  # a log needs no percentages
        if stage == self._last:
            return
        self._last = stage
        if not is_terminal:
            self.say(stage)
            return
        with contextlib.suppress(OSError, SystemExit):
            if self._status is None:
                self._status = self.console.status(escape(what))
                self._status.start()
            else:
                self._status.update(escape(what))

    def done(self, what: str) -> None:
        """A stage is over, or something happened that should stay visible."""
        self._marked("[green]✓[/green]", what)

    def warn(self, what: str) -> None:
        self._marked("[yellow]![/yellow]", what)

    def rest(self) -> None:
        """Nothing is being done now."""
        self._last = ""
        status, self._status = self._status, None
        if status is not None:
            with contextlib.suppress(OSError, SystemExit):
                status.stop()

    def _marked(self, mark: str, what: str) -> None:
        with contextlib.suppress(OSError, SystemExit):
            self.console.print(f"{mark} {escape(what)}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.rest()
