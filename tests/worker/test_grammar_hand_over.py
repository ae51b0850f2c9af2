"""Structured output through a prefill and a decode worker: the grammar crosses with the request,
and the matcher on D is rebuilt from what was emitted."""

import asyncio
import json
import re
from dataclasses import replace

import jsonschema
import pytest
import pytest_asyncio
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.errors import RequestError
from core.types import FinishReason, Grammar, GrammarKind
from support.byte_tokenizer import EOS, VOCAB_SIZE
from support.grammars import json_schema, regex, save_byte_tokenizer
from support.pair import request, running_pair, tiny_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", None]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=["plain", "speculative"])
async def pair(tmp_path_factory, request):
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("bytes-llama")
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        initializer_range=0.2,
        eos_token_id=EOS,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    engine = {"num_kv_blocks": 2048, "max_num_seqs": 128, "max_num_batched_tokens": 256}
    decode = dict(engine)
    if request.param == "speculative":
        decode["speculative"] = "{method: ngram, num_tokens: 3, prompt_lookup_min: 1}"
    async with running_pair(tiny_config(folder, **engine), tiny_config(folder, **decode)) as pair:
        yield pair


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode()


async def test_a_hundred_seeds_validate(pair):
    """Fifty with each kind of decoding."""
    grammar = json_schema(SCHEMA)
    requests = [
        request(range(20 + seed, 31 + seed), 300, seed=seed, temperature=1.0,
                stop_token_ids=(EOS,), grammar=grammar)
        for seed in range(50)
    ]  # fmt: skip
    answers = await asyncio.gather(*(pair.generate(r, timeout_s=60) for r in requests))
    assert not [answer.error for answer in answers if answer.error]
    assert {answer.finish_reason for answer in answers} == {FinishReason.STOP}
    texts = [text_of(answer.tokens) for answer in answers]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 45
    stats = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
    is_speculative = pair.decode.runtime.settings.engine.speculative is not None
    assert (stats.tokens_draft_accepted_total > 0) == is_speculative
    await pair.wait_idle()


async def test_the_hand_over_changes_nothing(pair):
    """The same as one engine alone, and as an attempt that resumes in the middle."""
    options = {"grammar": regex("[a-f]{4}-[0-9]{6}"), "stop_token_ids": (EOS,), "seed": 5}
    whole = await pair.alone(request(range(40, 51), 60, temperature=1.0, **options))
    split = await pair.generate(request(range(40, 51), 60, temperature=1.0, **options))
    assert split.tokens == whole.tokens and split.finish_reason is FinishReason.STOP
    assert re.fullmatch("[a-f]{4}-[0-9]{6}", text_of(split.tokens))
    for done in (3, len(whole.tokens) - 1):
        resumed = replace(
            request(range(40, 51), 60, temperature=1.0, **options),
            output_token_ids=tuple(whole.tokens[:done]),
        )
        rest = await pair.generate(resumed)
        assert rest.tokens == whole.tokens[done:] and rest.finish_reason is FinishReason.STOP
    await pair.wait_idle()


async def test_a_first_token_that_completes_the_grammar_never_starts_a_decode_step(pair):
    grammar = Grammar(GrammarKind.EBNF, 'root ::= "x" | "y"')
    answer = await pair.generate(request(range(9), 60, stop_token_ids=(EOS,), grammar=grammar))
    assert text_of(answer.tokens) in ("x", "y")
    assert answer.finish_reason is FinishReason.STOP and answer.decode_started is None
    await pair.wait_idle()


async def test_a_broken_grammar_is_the_clients_error_and_others_go_on(pair):
    others = asyncio.create_task(pair.generate(request(range(30), 60, temperature=1.0)))
    for grammar in (regex("foo**"), json_schema({"type": "objekt"}), regex("a" * 70_000)):
        answer = await pair.generate(request(range(9), grammar=grammar, stop_token_ids=(EOS,)))
        assert isinstance(answer.error, RequestError) and "the grammar is refused" in str(
            answer.error
        )
        alone = await pair.alone(request(range(9), grammar=grammar, stop_token_ids=(EOS,)))
        assert isinstance(alone.error, RequestError)
    assert len((await others).tokens) == 60
    await pair.wait_idle()
