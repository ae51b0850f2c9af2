"""Compiles grammars in a process of its own, because a grammar comes from a client.

A compilation may take too long, take all memory or end the process; here that costs the client
one 400. One JSON object a line comes in and goes out; the caller sets the time limit and kills.
The end of the input ends the process.
"""

import json
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from core.model_files import ModelFiles
from core.vocabulary import load_vocabulary

# What one compilation may take beyond what the process has when it is ready.
_MEMORY_BYTES = 1 << 30
_WHERE = re.compile(r"^\[[\d:]+\] \S+\.(?:cc|h):\d+: ")
# A rule for one character of a string, as a grammar prints it.
_CHARACTERS = re.compile(r'^(\S+ ::= \(\(\[\^)(\\"\\\\\\r\\n\]\)\))$', re.M)
# JSON schema words that xgrammar leaves out without a word: the output would not be valid.
_UNSUPPORTED = (
    "contains", "dependentRequired", "dependentSchemas", "else", "if", "maxContains",
    "minContains", "not", "then", "unevaluatedItems", "uniqueItems",
)  # fmt: skip
# Their values are data or maps by name, not schemas.
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_DATA = ("const", "enum", "default", "examples", "required")


def tokenizer_info(files: ModelFiles, vocab_size: int) -> Any:
    """xgrammar's view of the vocabulary. The model may have more ids than the tokenizer."""
    import xgrammar

    vocabulary = load_vocabulary(files)
    return xgrammar.TokenizerInfo(
        vocabulary.tokens[:vocab_size],
        xgrammar.VocabType.RAW,
        vocab_size=vocab_size,
        stop_token_ids=list(vocabulary.eos_token_ids) or None,
    )


def compile_grammar(compiler: Any, kind: str, value: str) -> str:
    """The compiled grammar in xgrammar's own JSON. Raises ValueError or RuntimeError."""
    if kind == "json_object":
        kind, value = "json_schema", '{"type": "object"}'
    if kind == "json_schema":
        schema = json.loads(value)
        refuse_unsupported(schema)
        if name_required(schema):
            value = json.dumps(schema)
        compiled = compiler.compile_grammar(_json_grammar(value))
    elif kind == "regex":
        compiled = compiler.compile_regex(value)
    else:
        compiled = compiler.compile_grammar(value)
    return compiled.serialize_json()


def _json_grammar(schema: str) -> Any:
    """A schema's grammar, with what xgrammar 0.2.9 gets wrong put right: in a string of limited
    length it allows raw control characters, which are no JSON."""
    import xgrammar

    # Without a limit a model may write nothing but spaces for ever.
    grammar = xgrammar.Grammar.from_json_schema(schema, max_whitespace_cnt=32)
    text, count = _CHARACTERS.subn(lambda m: m[1] + r"\0-\x1f" + m[2], str(grammar))
    return xgrammar.Grammar.from_ebnf(text) if count else grammar


def refuse_unsupported(schema: Any) -> None:
    """Raises ValueError that names the first part that could not be held."""
    if not isinstance(schema, dict):
        return
    for word in _UNSUPPORTED:
        if word in schema and schema[word] is not False:
            raise ValueError(f"the keyword {word!r} is not supported")
    if len(schema.get("allOf") or ()) > 1:
        raise ValueError("'allOf' with more than one schema is not supported")
    if not str(schema.get("$ref", "#")).startswith("#"):
        raise ValueError(f"'$ref' to another document is not supported: {schema['$ref'][:80]!r}")
    properties = schema.get("properties")
    required = schema.get("required")
    if isinstance(required, list) and isinstance(properties or {}, dict):
        for name in required:
            if name not in (properties or {}) and not _may_be_named(schema):
                raise ValueError(
                    f"{name!r} is required, not among 'properties', and not free to be anything"
                )
    for word, value in schema.items():
        if word in _NAMED_SCHEMAS and isinstance(value, dict):
            for inner in value.values():
                refuse_unsupported(inner)
        elif word not in _DATA:
            for inner in value if isinstance(value, list) else [value]:
                refuse_unsupported(inner)


def _may_be_named(schema: dict[str, Any]) -> bool:
    """Whether a property that no other keyword speaks of can be put among `properties`."""
    return schema.get("additionalProperties") is not False and "patternProperties" not in schema


def name_required(schema: Any) -> bool:
    """Puts properties that are required and not named among `properties`, with what
    `additionalProperties` says of them: xgrammar would not require them. True if it did."""
    if isinstance(schema, list):
        return any([name_required(inner) for inner in schema])
    if not isinstance(schema, dict):
        return False
    changed = any(
        [
            name_required(
                list(value.values())
                if word in _NAMED_SCHEMAS and isinstance(value, dict)
                else value
            )
            for word, value in schema.items()
            if word not in _DATA and isinstance(value, (dict, list))
        ]
    )
    required = schema.get("required")
    if isinstance(required, list) and isinstance(schema.get("properties", {}), dict):
        named = schema.setdefault("properties", {}) if required else {}
        for name in required:
            if name not in named:
                named[name] = schema.get("additionalProperties", True)
                changed = True
    return changed


def _answer(compiler: Any, line: bytes) -> dict[str, str]:
    question = json.loads(line)
    try:
        return {"compiled": compile_grammar(compiler, question["kind"], question["value"])}
    except MemoryError:
        return {"error": "it needs too much memory"}
    except RecursionError:
        return {"error": "it is nested too deeply"}
    # xgrammar raises RuntimeError and subclasses of its own.
    except Exception as error:
        return {"error": _WHERE.sub("", str(error)).split("\n")[0][:300]}


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    limit = size + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def main() -> None:
    """Arguments: the model's path and format, the size of its vocabulary, seconds to live for
    one question (when nobody is left to kill us)."""
    path, format_, vocab_size, seconds = sys.argv[1:]
    assert format_ in ("safetensors", "gguf")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the worker's; it closes our input
    answers, sys.stdout = sys.stdout.buffer, sys.stderr  # a stray print must not be an answer
    import xgrammar

    files = ModelFiles("", Path(path), format_)  # type: ignore[arg-type]
    info = tokenizer_info(files, int(vocab_size))
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    _limit_memory()
    answers.write(b'{"ready": true}\n')
    answers.flush()
    for line in sys.stdin.buffer:
        signal.alarm(int(seconds))
        answers.write(json.dumps(_answer(compiler, line)).encode() + b"\n")
        answers.flush()
        signal.alarm(0)


if __name__ == "__main__":
    main()
