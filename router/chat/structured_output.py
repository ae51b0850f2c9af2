"""What a request says about the shape of its answer, checked as far as that needs no compiler.

| field | value |
|---|---|
| response_format | text, json_object or json_schema, as OpenAI has them |
| structured_outputs | vLLM's: one of `json`, `json_object`, `regex`, `choice`, `grammar` |
| guided_json, guided_regex, guided_choice, guided_grammar | the same under vLLM's older names |

A worker compiles the grammar, and what it refuses is the client's 400 too.
"""

import json
from collections.abc import Callable
from typing import Any, Protocol

from core.errors import RequestError
from core.types import Grammar, GrammarKind

MAX_GRAMMAR_BYTES = 64 * 1024
_MAX_CHOICES = 1024
_GUIDED = ("json", "regex", "choice", "grammar")


class StructuredBody(Protocol):
    """The fields of a request body that this module reads."""

    @property
    def response_format(self) -> dict[str, Any] | None: ...
    @property
    def structured_outputs(self) -> dict[str, Any] | None: ...
    @property
    def guided_json(self) -> str | dict[str, Any] | None: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...


def grammar_of(body: StructuredBody) -> Grammar | None:
    """The one grammar that a body asks for, if it does. Raises RequestError that names the
    field."""
    wishes: list[tuple[str, str, Any]] = []  # field, kind, value
    if body.response_format is not None:
        wishes += _response_format(body.response_format)
    for kind, value in (body.structured_outputs or {}).items():
        if value is None or (kind == "json_object" and value is False):
            continue
        if kind not in _MAKERS:
            raise RequestError(
                f"structured_outputs.{kind[:40]} is not supported ({', '.join(_MAKERS)} are)",
                param="structured_outputs",
                code="unsupported_parameter",
            )
        wishes.append(("structured_outputs", kind, value))
    for kind in _GUIDED:
        value = getattr(body, f"guided_{kind}")
        if value is not None:
            wishes.append((f"guided_{kind}", kind, value))
    if not wishes:
        return None
    field, kind, value = wishes[0]
    if len(wishes) > 1:
        raise RequestError(f"{wishes[1][0]}: {field} has a grammar already", param=wishes[1][0])
    grammar = _MAKERS[kind](field, value)
    if len(grammar.value.encode()) > MAX_GRAMMAR_BYTES:
        raise RequestError(
            f"{field}: a grammar has at most {MAX_GRAMMAR_BYTES // 1024} KiB", param=field
        )
    return grammar


def _response_format(wish: dict[str, Any]) -> list[tuple[str, str, Any]]:
    field, kind = "response_format", wish.get("type")
    if kind == "text":
        return []
    if kind == "json_object":
        return [(field, "json_object", True)]
    if kind == "json_schema":
        inner = wish.get("json_schema")
        if not isinstance(inner, dict) or "schema" not in inner:
            raise RequestError(f"{field}.json_schema.schema: missing", param=field)
        return [(field, "json", inner["schema"])]
    raise RequestError(
        f"{field}.type: expected text, json_object or json_schema, got {str(kind)[:40]!r}",
        param=field,
    )


def _json_schema(field: str, value: Any) -> Grammar:
    from jsonschema.exceptions import SchemaError
    from jsonschema.validators import Draft202012Validator, validator_for

    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{field}: not JSON: {error}", param=field) from None
    if not isinstance(value, dict):
        raise RequestError(f"{field}: a JSON schema is an object", param=field)
    try:
        text = json.dumps(value)
        if len(text) <= MAX_GRAMMAR_BYTES:  # if not, that is what is wrong with it
            validator_for(value, default=Draft202012Validator).check_schema(value)
    except SchemaError as error:
        where = ".".join(str(part) for part in error.absolute_path)
        raise RequestError(
            f"{field}: not a JSON schema: {where or 'the schema'}: {error.message[:200]}",
            param=field,
        ) from None
    except RecursionError:
        raise RequestError(f"{field}: nested too deeply", param=field) from None
    return Grammar(GrammarKind.JSON_SCHEMA, text)


def _json_object(field: str, value: Any) -> Grammar:
    if value is not True:
        raise RequestError(f"{field}.json_object: expected true or false", param=field)
    return Grammar(GrammarKind.JSON_OBJECT)


def _regex(field: str, value: Any) -> Grammar:
    return Grammar(GrammarKind.REGEX, _text(field, "a regular expression", value))


def _ebnf(field: str, value: Any) -> Grammar:
    return Grammar(GrammarKind.EBNF, _text(field, "a grammar", value))


def _choice(field: str, value: Any) -> Grammar:
    is_list = isinstance(value, list) and 1 <= len(value) <= _MAX_CHOICES
    if not is_list or not all(isinstance(text, str) and text for text in value):
        raise RequestError(f"{field}: expected 1 to {_MAX_CHOICES} texts", param=field)
    return Grammar(GrammarKind.EBNF, "root ::= " + " | ".join(map(_quoted, value)))


def _text(field: str, what: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{field}: expected {what}", param=field)
    return value


def _quoted(text: str) -> str:
    """A literal in EBNF; everything but plain ASCII by its code point."""
    plain = (c if " " <= c <= "~" and c not in '"\\' else f"\\U{ord(c):08x}" for c in text)
    return '"' + "".join(plain) + '"'


_MAKERS: dict[str, Callable[[str, Any], Grammar]] = {
    "json": _json_schema,
    "json_object": _json_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _ebnf,
}
