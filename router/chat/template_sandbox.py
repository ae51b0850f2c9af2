"""Jinja for chat templates: the sandbox of transformers' dialect, with limits.

A template comes with the model, and a hub model is foreign code. It runs in Jinja's immutable
sandbox under four limits: steps (loop iterations and calls), time (looked at on every step), the
size of every value built by an operator, a call or a growing filter, and (in ChatTemplate) the
size of the output. What makes a long value out of a number is refused beforehand. So nested
loops, recursive macros and doubling strings end soon. A value that holds itself many times over
is still printed in full: rendering belongs in a thread, under the caller's own timeout.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import datetime
from typing import Any, cast

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, make_attrgetter
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

MAX_CHARACTERS = 16 * 1024 * 1024  # or items, of one value
_MAX_INDENT = 16
_MAX_BITS = 4096  # of an integer
# They pad to a length given by a number.
_HIDDEN_METHODS = frozenset({"center", "ljust", "rjust", "zfill", "expandtabs"})
_HIDDEN_FILTERS = ("batch", "center", "pprint", "random", "round", "slice", "urlize", "wordwrap")
_WIDE_FORMAT = re.compile(r"\d{4}|\*|\{[^}]*\{")


class TemplateLimitError(Exception):
    """The template does more than any real one needs."""


class _Budget:
    """Steps and time of one render."""

    def __init__(self, steps: int, seconds: float) -> None:
        self._steps_left = steps
        self._deadline = time.monotonic() + seconds

    def spend(self) -> None:
        self._steps_left -= 1
        if self._steps_left < 0:
            raise TemplateLimitError("it takes too many steps")
        if time.monotonic() > self._deadline:
            raise TemplateLimitError("it takes too long")


_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


@contextmanager
def template_budget(steps: int, seconds: float) -> Iterator[None]:
    """Everything that templates of `make_environment` do inside counts against one budget."""
    token = _budget.set(_Budget(steps, seconds))
    try:
        yield
    finally:
        _budget.reset(token)


def joined(pieces: Iterable[str], limit: int = MAX_CHARACTERS, separator: str = "") -> str:
    """The pieces in one string, unless that is longer than the limit."""
    parts, length = [], 0
    for piece in pieces:
        length += len(piece) + len(separator)
        if length > limit:
            raise TemplateLimitError("it builds a text that is too long")
        parts.append(piece)
    return separator.join(parts)


def make_environment() -> jinja2.Environment:
    environment = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    for name in _HIDDEN_FILTERS:
        del environment.filters[name]
    filters: dict[str, Callable[..., Any]] = {
        "tojson": _tojson,
        "indent": _indent,
        "replace": _replace,
        "join": _join,
        "format": _format,
        "_counted": _counted,
        "_sized": _sized,
    }
    environment.filters.update(filters)
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationBlock(Extension):
    """`{% generation %}` marks what a trainer learns from; for a prompt it is its body."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Loops and `~` are wrapped when a template is parsed; operators and calls are intercepted
    when they run."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in list(tree.find_all(nodes.For)):
            loop.iter = _filtered(loop.iter, "_counted")
        for concat in list(tree.find_all(nodes.Concat)):
            # Each part is bounded before it is used: a doubling string is stopped one step late.
            concat.nodes = [_filtered(node, "_sized") for node in concat.nodes]
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not allowed in a chat template")
        if operator == "%" and isinstance(left, str | bytes):
            raise SecurityError("% on strings is not allowed in a chat template")
        if operator == "*" and _product_size(left, right) > MAX_CHARACTERS:
            raise TemplateLimitError("it builds a value that is too long")
        return _sized(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
        _budget.get().spend()
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            _check_method(owner, name, args)
        return _sized(super().call(context, obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str | bytes) and attr in _HIDDEN_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)


def _filtered(node: nodes.Node, name: str) -> nodes.Filter:
    wrapped = nodes.Filter(cast(nodes.Expr, node), name, [], [], None, None)
    return cast(nodes.Filter, wrapped.set_lineno(node.lineno))


# ---------------------------------------------------------------- bounds


@jinja2.pass_context  # which also keeps the compiler from calling it
def _counted(context: Any, iterable: Iterable[Any]) -> Iterator[Any]:
    spend = _budget.get().spend
    for item in iterable:
        spend()
        yield item


def _sized(value: Any) -> Any:
    if isinstance(value, str | list | tuple | bytes) and len(value) > MAX_CHARACTERS:
        raise TemplateLimitError("it builds a value that is too long")
    return value


def _product_size(left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return MAX_CHARACTERS + 1 if (left.bit_length() + right.bit_length()) > _MAX_BITS else 0
    if isinstance(left, int):
        left, right = right, left
    if isinstance(right, int) and isinstance(left, str | list | tuple | bytes):
        return len(left) * right
    return 0


def _check_method(owner: str, name: str, args: Sequence[Any]) -> None:
    """Looks at a string method that may make much out of little before it runs."""
    if name in ("format", "format_map") and _WIDE_FORMAT.search(owner):
        raise SecurityError("a wide format is not allowed in a chat template")
    if name == "replace" and len(args) >= 2:
        _check_replace(owner, args[0], args[1])
    if name == "join" and args:
        joined((str(item) for item in args[0]), separator=owner)


def _check_replace(text: str, old: Any, new: Any) -> None:
    if len(text) + text.count(str(old)) * len(str(new)) > MAX_CHARACTERS:
        raise TemplateLimitError("it builds a text that is too long")


# ---------------------------------------------------------------- filters and functions


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: unlike Jinja's own, it does not escape HTML."""
    if indent is not None:
        _check_indent(indent)
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    _check_indent(width)
    return do_indent(value, width, first, blank)


def _check_indent(width: int | str) -> None:
    if (len(width) if isinstance(width, str) else width) > _MAX_INDENT:
        raise SecurityError(f"an indent of more than {_MAX_INDENT} is not allowed")


def _replace(value: Any, old: str, new: str, count: int | None = None) -> str:
    _check_replace(str(value), old, new)
    return str(value).replace(str(old), str(new), -1 if count is None else count)


@jinja2.pass_environment
def _join(
    environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: Any = None
) -> str:
    if attribute is not None:
        value = map(make_attrgetter(environment, attribute), value)
    return joined((str(item) for item in value), separator=str(d))


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    if _WIDE_FORMAT.search(value):
        raise SecurityError("a wide format is not allowed in a chat template")
    return str(value) % (kwargs or args)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
