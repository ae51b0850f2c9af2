"""How models of several families write tool calls.

    hermes       <tool_call>{"name": ..., "arguments": {...}}</tool_call>     Hermes, Qwen 2.5 and 3
    llama3_json  {"name": ..., "parameters": {...}}; {...}                    Llama 3.1 and 3.2
    pythonic     [name(key="value"), ...]                                     Llama 3.2 and 4
    mistral      [TOOL_CALLS][{"name": ..., "arguments": {...}}] or
                 [TOOL_CALLS]name[ARGS]{...}                                  Mistral

What is no call after all is content, as it was written. Where a format has no marker of its own,
only the names of tools that the request offers make a call. Arguments stream as the model writes
them; a model may write bad JSON, and clients must expect that.
"""

import ast
import json
import re
import warnings
from collections.abc import Callable
from typing import Any

from router.chat.output import Reading, ReadingBool, ReadingText, Scanner, ToolFormat

Names = frozenset[str]
Accepts = Callable[[str], bool]  # whether a name may be called
_ARGUMENTS = ("arguments", "parameters")
_CALL, _END_CALL = "<tool_call>", "</tool_call>"
_MISTRAL_CALLS, _MISTRAL_ARGS, _MISTRAL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_PYTHON_TAG = "<|python_tag|>"
_PYTHON_START, _PYTHON_END = "<|python_start|>", "<|python_end|>"
_JSON_WORDS = {"true": True, "false": False, "null": None}
_NAME = re.compile(r"[\w.-]{1,128}")


# ---------------------------------------------------------------- JSON


class _Taken:
    """Characters as they are consumed, for the case that they turn out to be no call."""

    def __init__(self, scanner: Scanner) -> None:
        self.scanner = scanner
        self.text = ""

    def take(self) -> ReadingText:
        character = yield from self.scanner.take()
        self.text += character
        return character

    def skip_blank(self) -> Reading:
        self.text += yield from self.scanner.skip_blank()


def _value(taken: _Taken, emit: Callable[[str], None] | None = None) -> ReadingText:
    """One JSON value, loosely: up to its closing quote or bracket, or the end of a bare word; ""
    if the text ends in it. `emit` hears every character."""
    start = len(taken.text)
    depth = 0
    is_quoted = is_escaped = False
    while character := (yield from taken.scanner.peek()):
        if not is_quoted and not depth and (character in ",}]:" or character.isspace()):
            return taken.text[start:]
        yield from taken.take()
        if emit is not None:
            emit(character)
        if is_quoted:
            is_quoted = is_escaped or character != '"'
            is_escaped = character == "\\" and not is_escaped
        elif character == '"':
            is_quoted = True
        else:
            depth += (character in "{[") - (character in "}]")
        if not is_quoted and not depth and character in '"}]':
            return taken.text[start:]
    return ""


def _call_object(scanner: Scanner, accepts: Accepts, needs_arguments: bool) -> Reading:
    """One call as a JSON object, from its opening brace. Everything is content if it is none."""
    taken = _Taken(scanner)
    is_call = yield from _members(taken, accepts, needs_arguments)
    if not is_call:
        scanner.content(taken.text)


def _members(taken: _Taken, accepts: Accepts, needs_arguments: bool) -> ReadingBool:
    """The members of the object. True once a call was started."""
    scanner = taken.scanner
    name: str | None = None
    early: str | None = None  # arguments that came before the name
    has_started = False
    yield from taken.take()
    while True:
        yield from taken.skip_blank()
        character = yield from scanner.peek()
        if character == ",":
            yield from taken.take()
            continue
        if character != '"':
            break
        key = yield from _value(taken)
        yield from taken.skip_blank()
        if (yield from scanner.peek()) != ":":
            return has_started
        yield from taken.take()
        yield from taken.skip_blank()
        is_arguments = key.strip('"') in _ARGUMENTS
        opens = (yield from scanner.peek()) == "{"
        if is_arguments and name is not None and opens and not has_started:
            scanner.start_call(name)
            has_started = True
            yield from _value(taken, scanner.arguments)
            continue
        value = yield from _value(taken)
        if key == '"name"':
            name = _text_of(value)
            if name is None or not _NAME.fullmatch(name) or not accepts(name):
                return has_started
        elif is_arguments:
            early = _as_object(value)
        if name is not None and early is not None and not has_started:
            scanner.start_call(name)
            scanner.arguments(early)
            has_started = True
    if character == "}":
        yield from taken.take()
        if name is not None and not has_started and not needs_arguments:
            scanner.start_call(name)
            scanner.arguments("{}")
            has_started = True
    return has_started


def _text_of(value: str) -> str | None:
    try:
        text = json.loads(value)
    except (ValueError, RecursionError):
        return None
    return text if isinstance(text, str) else None


def _as_object(value: str) -> str | None:
    """JSON text of an object; some models write it once more inside a string."""
    inner = _text_of(value)
    text = value if inner is None else inner
    try:
        return text if isinstance(json.loads(text), dict) else None
    except (ValueError, RecursionError):
        return None


def _anything(name: str) -> bool:
    return True


# ---------------------------------------------------------------- formats


def _read_hermes(scanner: Scanner, names: Names) -> Reading:
    while (yield from scanner.content_until(_CALL)):
        blank = yield from scanner.skip_blank()
        if (yield from scanner.peek()) != "{":
            scanner.content(_CALL + blank)
            continue
        before = scanner.num_calls
        taken = _Taken(scanner)
        if not (yield from _members(taken, _anything, needs_arguments=False)):
            scanner.content(_CALL + blank + taken.text)
        if scanner.num_calls == before:
            continue
        blank = yield from scanner.skip_blank()
        rest = yield from scanner.match(_END_CALL)
        if rest != _END_CALL:
            scanner.unread(blank + rest)


def _read_llama3_json(scanner: Scanner, names: Names) -> Reading:
    blank = yield from scanner.skip_blank()
    tag = yield from scanner.match(_PYTHON_TAG)
    if tag and tag != _PYTHON_TAG:
        scanner.content(blank + tag)
        return
    yield from scanner.skip_blank()
    if (yield from scanner.peek()) != "{":
        scanner.content(blank + tag)
        return
    while (yield from scanner.peek()) == "{":
        yield from _call_object(scanner, names.__contains__, needs_arguments=True)
        between = yield from scanner.skip_blank()
        if (yield from scanner.peek()) != ";":
            scanner.content(between)
            return
        yield from scanner.take()
        yield from scanner.skip_blank()


def _read_mistral(scanner: Scanner, names: Names) -> Reading:
    while (yield from scanner.content_until(_MISTRAL_CALLS)):
        taken = _Taken(scanner)
        yield from taken.skip_blank()
        if (yield from scanner.peek()) == "[":
            yield from taken.take()
            yield from read_call_list(scanner)
        else:
            yield from _mistral_named(taken)


def read_call_list(scanner: Scanner) -> Reading:
    """Call objects of a JSON list, behind its opening bracket."""
    while True:
        yield from scanner.skip_blank()
        character = yield from scanner.peek()
        if character == "{":
            yield from _call_object(scanner, _anything, needs_arguments=False)
        elif character == ",":
            yield from scanner.take()
        else:
            if character == "]":
                yield from scanner.take()
            return


def _mistral_named(taken: _Taken) -> Reading:
    scanner = taken.scanner
    while (character := (yield from scanner.peek())) and character not in "{[":
        yield from taken.take()
    name = taken.text.strip()
    if character == "[" and _NAME.fullmatch(name):
        bracket = ""
        while character and not bracket.endswith(_MISTRAL_ARGS) and character != "{":
            bracket += yield from taken.take()
            character = yield from scanner.peek()
        yield from taken.skip_blank()
        character = yield from scanner.peek()
        if not bracket.endswith(_MISTRAL_ARGS) or not bracket.startswith(
            (_MISTRAL_ARGS, _MISTRAL_ID)
        ):
            character = ""
    if character != "{" or not _NAME.fullmatch(name):
        scanner.content(_MISTRAL_CALLS + taken.text)
        return
    scanner.start_call(name)
    yield from _value(_Taken(scanner), scanner.arguments)


def _read_pythonic(scanner: Scanner, names: Names) -> Reading:
    blank = yield from scanner.skip_blank()
    tag = yield from scanner.match(_PYTHON_START)
    if (tag and tag != _PYTHON_START) or (yield from scanner.peek()) != "[":
        scanner.content(blank + tag)
        return
    bracket = yield from scanner.take()
    while True:
        taken = _Taken(scanner)
        yield from taken.skip_blank()
        call = yield from _python_call(taken)
        parsed = _parse_call(call, names) if call else None
        if parsed is None:
            scanner.content(blank + tag + bracket + taken.text)
            return
        scanner.start_call(parsed[0])
        scanner.arguments(json.dumps(parsed[1], ensure_ascii=False))
        blank = tag = bracket = ""
        yield from scanner.skip_blank()
        if (yield from scanner.peek()) != ",":
            break
        yield from scanner.take()
    if (yield from scanner.peek()) == "]":
        yield from scanner.take()
    end = yield from scanner.match(_PYTHON_END)
    if end != _PYTHON_END:
        scanner.content(end)


def _python_call(taken: _Taken) -> ReadingText:
    """`name(...)` up to the bracket that closes it; "" if that never comes."""
    start = len(taken.text)
    depth = 0
    quote = ""
    while character := (yield from taken.take()):
        if quote:
            if character == "\\":
                yield from taken.take()
            elif character == quote:
                quote = ""
        elif character in "\"'" and depth:
            quote = character
        elif character in "([{":
            depth += 1
        elif character in ")]}":
            depth -= 1
            if depth <= 0:
                return taken.text[start:] if depth == 0 else ""
        elif not depth and not _NAME.fullmatch(character):
            return ""  # text such as "[1] says", not a call
    return ""


def _parse_call(source: str, names: Names) -> tuple[str, dict[str, Any]] | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes that Python would not write
            tree = ast.parse(source, mode="eval").body
        if not isinstance(tree, ast.Call) or tree.args:
            return None
        name = ast.unparse(tree.func)
        if name not in names:
            return None
        arguments = {str(k.arg): _literal(k.value) for k in tree.keywords if k.arg is not None}
        if len(arguments) != len(tree.keywords):
            return None
        json.dumps(arguments, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError):
        return None
    return name, arguments


def _literal(node: ast.expr) -> Any:
    """A Python literal, or one of JSON's own words."""
    if isinstance(node, ast.Name):
        return _JSON_WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    return ast.literal_eval(node)


def _read_required(scanner: Scanner, names: Names) -> Reading:
    yield from scanner.skip_blank()
    if (yield from scanner.match("[")):
        yield from read_call_list(scanner)


def _read_named(scanner: Scanner, names: Names) -> Reading:
    yield from scanner.skip_blank()
    if (yield from scanner.peek()):
        scanner.start_call(next(iter(names)))
        yield from _value(_Taken(scanner), scanner.arguments)


# Of answers that a grammar forces.
REQUIRED_CALLS = ToolFormat("required", _read_required)
NAMED_CALL = ToolFormat("named", _read_named)
FORMATS = {
    form.name: form
    for form in (
        ToolFormat("hermes", _read_hermes, (_CALL, _END_CALL)),
        ToolFormat("llama3_json", _read_llama3_json, (_PYTHON_TAG,)),
        ToolFormat("pythonic", _read_pythonic, (_PYTHON_START, _PYTHON_END)),
        ToolFormat(
            "mistral", _read_mistral, (_MISTRAL_CALLS, _MISTRAL_ARGS, _MISTRAL_ID), short_ids=True
        ),
    )
}


def detect_format(template: str) -> ToolFormat | None:
    """The format that a model's chat template teaches it; None if it is none of these."""
    if "[TOOL_CALLS]" in template:
        return FORMATS["mistral"]
    if "<tool_call>" in template:
        # Qwen3-Coder and GLM write XML inside the same marker.
        return None if "<function=" in template or "<arg_key>" in template else FORMATS["hermes"]
    if "[func_name1(" in template:
        return FORMATS["pythonic"]
    if '"parameters": ' in template and ("ipython" in template or "<|eot_id|>" in template):
        return FORMATS["llama3_json"]
    return None
