"""Matchers over the byte tokenizer, compiled in this process: tests' grammars mean no harm."""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from core.model_files import ModelFiles
from core.types import Grammar, GrammarKind
from engine.grammar import Matcher
from engine.grammar_process import compile_grammar, tokenizer_info
from support.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer


def regex(pattern: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, pattern)


def json_schema(schema: Any) -> Grammar:
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def save_byte_tokenizer(folder: Path) -> ModelFiles:
    """Beside a model's other files; the model's config names the EOS, or this writes one."""
    byte_tokenizer()._tokenizer.save(str(folder / "tokenizer.json"))
    if not (folder / "config.json").exists():
        (folder / "config.json").write_text(json.dumps({"eos_token_id": EOS}))
    return ModelFiles("bytes", folder, "safetensors")


@cache
def _compiler() -> Any:
    import xgrammar

    with TemporaryDirectory() as folder:
        info = tokenizer_info(save_byte_tokenizer(Path(folder)), VOCAB_SIZE)
    return info, xgrammar.GrammarCompiler(info, max_threads=1)


def matcher_of(grammar: Grammar, stop_token_ids: tuple[int, ...] = (EOS,)) -> Matcher:
    import xgrammar

    info, compiler = _compiler()
    text = compile_grammar(compiler, grammar.kind.value, grammar.value)
    compiled = xgrammar.CompiledGrammar.deserialize_json(text, info)
    return Matcher(compiled, stop_token_ids, VOCAB_SIZE)
