"""Grammars: what may be compiled, how a matcher follows a sequence, and that a grammar's compiler
can neither hang nor take the worker along."""

import json
import os
import re
import signal

import pytest

from core.config import EngineConfig
from core.errors import EngineError, RequestError
from core.types import FinishReason, Grammar, GrammarKind
from engine import grammar as grammar_module
from engine.engine import Engine
from engine.grammar import GrammarCompiler
from engine.grammar_process import refuse_unsupported
from support.byte_tokenizer import EOS, VOCAB_SIZE
from support.grammars import json_schema, matcher_of, regex, save_byte_tokenizer
from support.mock_model import MockModel, block_table_of, collect, make_request, run_to_end

AB = regex("a[bc]{3}d?")


def make_engine(num_kv_blocks: int = 64, **config: object) -> Engine:
    options = {"block_size": 4, "max_num_batched_tokens": 32, **config}
    return Engine(MockModel(VOCAB_SIZE), EngineConfig(**options), num_kv_blocks)


def request(name: str, grammar: Grammar, **sampling: object):
    prompt = range(10, 18)
    options = {"temperature": 1.0, "max_tokens": 60, "stop_token_ids": (EOS,), **sampling}
    return make_request(name, prompt, grammar=grammar, **options)


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


@pytest.mark.parametrize("seed", range(5))
def test_output_follows_the_grammar_and_ends_with_it(seed):
    engine = make_engine()
    for name, pattern in (("x", "a[bc]{3}d?"), ("y", "(one|two|three)")):
        engine.add(request(name, regex(pattern), seed=seed), matcher_of(regex(pattern)))
    engine.add(make_request("free", range(5), temperature=1.0, seed=seed))
    tokens = run_to_end(engine)
    assert re.fullmatch("a[bc]{3}d?", text_of(tokens["x"]))
    # Nothing can follow: it ends with its last letter, without a step for EOS.
    assert text_of(tokens["y"]) in ("one", "two", "three") and EOS not in tokens["y"]
    alone = make_engine()
    alone.add(make_request("free", range(5), temperature=1.0, seed=seed))
    assert run_to_end(alone)["free"] == tokens["free"]


def test_the_finish_reason_is_stop_for_a_grammar_that_ends_and_length_for_one_that_does_not():
    engine = make_engine()
    engine.add(request("x", regex("abc")), matcher_of(regex("abc")))
    engine.add(request("y", regex("a{100}"), max_tokens=3), matcher_of(regex("a{100}")))
    reasons = {}
    while engine.has_work():
        reasons |= {o.request_id: o.finish_reason for o in engine.step() if o.finish_reason}
    assert reasons == {"x": FinishReason.STOP, "y": FinishReason.LENGTH}


def test_a_stop_token_is_allowed_only_where_the_grammar_may_end():
    matcher = matcher_of(regex("ab*"))
    assert not matcher.allowed()[0, EOS]
    assert matcher.accept(ord("a")) and matcher.allowed()[0, EOS]
    assert not matcher.is_finished
    assert matcher.allowed()[0].nonzero().flatten().tolist() == [ord("b"), EOS]
    assert matcher.accept(EOS) and matcher.is_finished and matcher.is_terminated


def test_drafted_tokens_are_looked_at_and_forgotten():
    matcher = matcher_of(AB)
    assert matcher.valid_prefix(b"abcx") == list(b"abc")
    assert matcher.valid_prefix(b"xa") == []
    masks = matcher.allowed(b"abc")
    assert [row.nonzero().flatten().tolist() for row in masks] == [
        [ord("a")], *[[ord("b"), ord("c")]] * 3,
    ]  # fmt: skip
    assert matcher.accept(ord("a")) and not matcher.accept(ord("a"))


def test_min_tokens_gives_way_to_a_grammar_that_has_ended():
    grammar = regex("(ab)?")
    engine = make_engine()
    engine.add(request("x", grammar, min_tokens=10), matcher_of(grammar))
    assert text_of(run_to_end(engine)["x"]) == "ab"


@pytest.mark.parametrize("num_blocks", [64, 9])
def test_the_matcher_survives_preemption(num_blocks):
    """With 9 blocks the two sequences cannot both go on."""
    grammar = regex("([ab]c){14}")
    engine = make_engine(num_blocks)
    for name in ("x", "y"):
        engine.add(request(name, grammar, seed=3), matcher_of(grammar))
    tokens = run_to_end(engine)
    assert (engine.stats().preemptions_total > 0) == (num_blocks == 9)
    for name in ("x", "y"):
        assert re.fullmatch("([ab]c){14}", text_of(tokens[name]))
    assert tokens["x"] == tokens["y"]


@pytest.mark.parametrize("is_preempted", [False, True])
@pytest.mark.parametrize("resumed", [0, 3])
def test_the_first_token_of_a_peer_is_accepted_exactly_once(resumed, is_preempted):
    """What P and earlier attempts have emitted is replayed on D, never twice."""
    grammar = regex("[a-z]{9}")
    whole = make_engine()
    whole.add(request("x", grammar, seed=7), matcher_of(grammar))
    expected = run_to_end(whole)["x"]
    assert len(expected) == 9
    engine = make_engine()
    again = make_request(
        "x", range(10, 18), output=expected[:resumed], grammar=grammar, temperature=1.0,
        max_tokens=60, seed=7, stop_token_ids=(EOS,),
    )  # fmt: skip
    engine.add_remote(again, matcher_of(grammar))
    engine.step()
    table = block_table_of(engine, "x")
    tokens = [*range(10, 18), *expected[:resumed]]
    for position, token in enumerate(tokens):
        engine.kv_cache[table[position // 4], 0, 0, 0, position % 4, 0] = token
        engine.kv_cache[table[position // 4], 0, 1, 0, position % 4, 0] = position
    engine.start_decode("x", expected[resumed])
    if is_preempted:
        engine.scheduler._preempt(engine.scheduler.running[0])
    assert run_to_end(engine)["x"] == expected[resumed + 1 :]


def test_a_first_token_against_the_grammar_ends_that_sequence_alone():
    engine = make_engine()
    engine.add_remote(request("x", AB), matcher_of(AB))
    engine.add(request("y", AB), matcher_of(AB))
    engine.step()
    engine.start_decode("x", ord("z"))
    errors, tokens = {}, {}
    while engine.has_work():
        outputs = engine.step()
        errors |= {o.request_id: o.error for o in outputs if o.error}
        collect(tokens, [o for o in outputs if not o.error])
    assert list(errors) == ["x"] and "against the grammar" in errors["x"]
    assert "y" in tokens
    engine.check_integrity()


def test_what_does_not_fit_is_refused_at_the_door():
    engine = make_engine()
    with pytest.raises(RequestError, match="needs its matcher"):
        engine.add(request("x", AB))
    with pytest.raises(RequestError, match="against the grammar"):
        bad = make_request("x", range(5), output=list(b"zz"), grammar=AB)
        engine.add(bad, matcher_of(AB))
    with pytest.raises(RequestError, match="nothing is left"):
        done = make_request("x", range(5), output=[*b"abbb", EOS], grammar=AB)
        engine.add(done, matcher_of(AB))
    assert not engine.has_work()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"anyOf": [{"if": {}}]}, "if"),
        ({"$defs": {"a": {"contains": {}}}}, "contains"),
        ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
        ({"items": {"$ref": "http://example.org/x"}}, r"\$ref"),
        (
            {"required": ["a"], "properties": {"b": {}}, "additionalProperties": False},
            "'a' is required",
        ),
        ({"required": ["a"], "patternProperties": {"^a": {"type": "null"}}}, "'a' is required"),
    ],
)
def test_a_schema_that_could_not_be_held_is_refused_by_name(schema, named):
    with pytest.raises(ValueError, match=named):
        refuse_unsupported(schema)


def test_a_property_may_be_called_like_a_keyword():
    refuse_unsupported(
        {"properties": {"not": {}, "if": {"enum": [{"contains": 1}]}}, "required": ["if"]}
    )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "object", "required": ["a"]}, ['{"a": [1]}'], ["{}", '{"b": 1}']),
        (
            {"type": "object", "properties": {"b": {"type": "null"}}, "required": ["a"],
             "additionalProperties": {"type": "integer"}},
            ['{"b": null, "a": 3}', '{"a": 3}', '{"a": 3, "c": 4}'],
            ['{"b": null}', '{"a": "x"}', '{"c": 4}'],
        ),
        (
            {"type": "array", "items": {"anyOf": [{"type": "object", "required": ["a"]}]}},
            ['[{"a": 1}]', "[]"],
            ["[{}]"],
        ),
    ],
)  # fmt: skip
def test_a_required_property_needs_no_schema_of_its_own(schema, good, bad):
    for text in (*good, *bad):
        matcher = matcher_of(json_schema(schema))
        fits = all(map(matcher.accept, text.encode())) and matcher.accept(EOS)
        assert fits == (text in good), text


@pytest.fixture(scope="module")
def compiler(tmp_path_factory):
    files = save_byte_tokenizer(tmp_path_factory.mktemp("bytes"))
    compiler = GrammarCompiler(files, VOCAB_SIZE + 7)  # models pad their vocabulary
    yield compiler
    compiler.close()
    with pytest.raises(EngineError, match="stopping"):
        compiler.matcher(regex("not cached"), (EOS,))


@pytest.mark.parametrize(
    ("kind", "value", "reason"),
    [
        (GrammarKind.REGEX, "foo**", "repetition"),
        (GrammarKind.REGEX, "(" * 30_000, ""),
        (GrammarKind.EBNF, "root ::= nobody", "not defined"),
        (GrammarKind.EBNF, "", ""),
        (GrammarKind.JSON_SCHEMA, "{", ""),
        (GrammarKind.JSON_SCHEMA, '{"type": "objekt"}', "objekt"),
        (GrammarKind.JSON_SCHEMA, '{"properties": {"a": 3}}', ""),
        (GrammarKind.JSON_SCHEMA, "[" * 30_000, "deep"),
        (GrammarKind.JSON_SCHEMA, " " * 70_000, "bytes"),
    ],
)
def test_a_broken_grammar_is_refused_with_the_reason(compiler, kind, value, reason):
    with pytest.raises(RequestError, match=f"the grammar is refused: .*{reason}"):
        compiler.matcher(Grammar(kind, value), (EOS,))


def test_good_grammars_compile_once_and_matchers_are_fresh(compiler):
    grammar = json_schema({"type": "object", "properties": {"a": {"type": "integer"}}})
    first = compiler.matcher(grammar, (EOS,))
    assert first.accept(ord("{"))
    process = compiler._process
    second = compiler.matcher(grammar, ())  # the model's own EOS ends it
    assert second.accept(ord("{")) and compiler._process is process
    assert compiler.matcher(Grammar(GrammarKind.JSON_OBJECT), (EOS,)).valid_prefix(
        json.dumps({"x": [1, {"y": None}]}).encode()
    ) == list(b'{"x": [1, {"y": null}]}')
    assert not first.allowed()[0, VOCAB_SIZE:].any()


def test_a_compilation_that_runs_away_is_cut_off_and_the_next_one_works(compiler, monkeypatch):
    compiler.matcher(regex("warm"), (EOS,))
    os.kill(compiler._process._popen.pid, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(grammar_module, "_COMPILE_SECONDS", 0.1)
        with pytest.raises(RequestError, match="to compile"):
            compiler.matcher(regex("hangs"), (EOS,))
    assert compiler._process is None
    assert compiler.matcher(regex("warm"), (EOS,)).accept(ord("w"))  # cached: no process needed
    compiler.matcher(regex("next"), (EOS,))
    os.kill(compiler._process._popen.pid, signal.SIGKILL)
    compiler._process._popen.wait()
    assert compiler.matcher(regex("after that"), (EOS,)).accept(ord("a"))
