"""Requests on their way from the router to a worker."""

from dataclasses import fields

from core.types import GenerationRequest, Grammar, GrammarKind, Pooling, SamplingParams
from rpc import codec

SAMPLING = SamplingParams(
    max_tokens=7, min_tokens=2, temperature=0.5, top_k=3, top_p=0.25, min_p=0.125, seed=9,
    presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.5, logit_bias={3: 1.0},
    logprobs=2, stop_token_ids=(4,), grammar=Grammar(GrammarKind.REGEX, "a+"), prompt_logprobs=1,
    pooling=Pooling.LAST,
)  # fmt: skip
REQUEST = GenerationRequest(
    "attempt", (1, 2), SAMPLING, output_token_ids=(3,), cache_salt="salt", client_request_id="mine"
)


def test_no_field_of_a_request_is_lost_on_the_way():
    usual = GenerationRequest("", (), SamplingParams(max_tokens=1))
    for ours, default in ((REQUEST, usual), (SAMPLING, usual.sampling)):
        for field in fields(ours):
            assert getattr(ours, field.name) != getattr(default, field.name), field.name
    assert codec.request_from_pb(codec.request_to_pb(REQUEST)) == REQUEST
