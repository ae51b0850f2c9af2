"""How a request's wish for structure reaches the workers, and what is refused before it does."""

import grpc
import pytest

from core.errors import RequestError
from core.types import Grammar, GrammarKind
from router.chat.structured_output import grammar_of
from router.openai.protocol import parse_chat, parse_completion
from rpc import inference_pb2, inference_pb2_grpc, worker_pb2
from support.fake_answers import says
from support.fake_workers import Fault
from support.router import MODEL, running

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TEXT = '{"type": "object", "properties": {"a": {"type": "integer"}}}'
CHAT = [{"role": "user", "content": "x"}]


def wish(**fields: object) -> Grammar | None:
    of_chat = grammar_of(parse_chat({"messages": CHAT, **fields}))
    assert grammar_of(parse_completion({"prompt": "x", **fields})) == of_chat
    return of_chat


@pytest.mark.parametrize(
    ("fields", "kind", "value"),
    [
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        (
            {"response_format": {"type": "json_schema",
                                 "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}},
            "json_schema", TEXT,
        ),
        ({"guided_json": SCHEMA}, "json_schema", TEXT),
        ({"guided_json": TEXT}, "json_schema", TEXT),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", TEXT),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"guided_grammar": "root ::= x"}, "ebnf", "root ::= x"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "ebnf", "root ::= x"),
        ({"guided_choice": ["yes", 'n"\\é']}, "ebnf",
         'root ::= "yes" | "n\\U00000022\\U0000005c\\U000000e9"'),
    ],
)  # fmt: skip
def test_every_spelling_becomes_one_grammar(fields, kind, value):
    assert wish(**fields) == Grammar(GrammarKind(kind), value)


@pytest.mark.parametrize(
    "fields",
    [{}, {"response_format": {"type": "text"}}, {"response_format": None}, {"guided_json": None},
     {"structured_outputs": {"json_object": False}}],
)  # fmt: skip
def test_nothing_asked_for_is_no_grammar(fields):
    assert wish(**fields) is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"guided_json": {"type": "objekt"}}, "guided_json"),
        ({"guided_json": {"properties": {"a": 3}}}, "guided_json"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"guided_json": {"const": "x" * 70_000}}, "guided_json"),
        ({"guided_json": '{"not":' * 5000 + "{}" + "}" * 5000}, "guided_json"),
        ({"guided_regex": ""}, "guided_regex"),
        ({"guided_regex": "é" * 40_000}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": ["a", ""]}, "guided_choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"structured_outputs": {"regex": 3}}, "structured_outputs"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
    ],
)
def test_what_is_no_grammar_is_refused_by_name(fields, param):
    """V35: as far as that needs no compiler."""
    with pytest.raises(RequestError) as caught:
        wish(**fields)
    assert caught.value.param == param and len(caught.value.message) < 500


async def test_both_legs_get_the_grammar_and_the_last_letter_is_shown():
    """A worker may stop with a grammar's last letter, which is no stop token."""
    async with running() as router:
        for worker in router.cluster.workers.values():
            worker.script = says("ab", eos=ord("!"))
        body = {"prompt": "x", "max_tokens": 9, "stop_token_ids": [ord("!")]}
        answer = await router.complete(**body, guided_regex="ab")
        assert answer["choices"][0]["text"] == "ab"
        for worker in router.cluster.workers.values():
            assert worker.requests[0].sampling.grammar == worker_pb2.Grammar(
                kind=worker_pb2.GRAMMAR_KIND_REGEX, value="ab"
            )


async def test_a_workers_refusal_is_the_clients_400_and_is_not_tried_again():
    """V35."""
    async with running() as router:
        refusal = RequestError("the grammar is refused: foo", param="structured_outputs")
        router.worker("prefill-0").next_fault = lambda: Fault("error", 0, refusal)
        response = await router.post(prompt="x", guided_regex="foo**")
        assert response.status_code == 400
        error = response.json()["error"]
        assert "the grammar is refused" in error["message"]
        assert error["param"] == "structured_outputs"
        assert len(router.worker("prefill-0").requests) == 1
        await router.idle()


async def test_grpc_takes_the_same():
    async with running() as router:
        address = f"127.0.0.1:{router.server.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)

            async def generate(**fields: object) -> None:
                request = inference_pb2.GenerateRequest(
                    model=MODEL, prompt="x", max_tokens=2, **fields
                )
                async for _ in stub.Generate(request):
                    pass

            for fields in (
                {"json_schema": TEXT}, {"json_object": True}, {"regex": "a"},
                {"ebnf": "root ::= x"}, {"choice": inference_pb2.TextChoices(texts=["a"])},
                {"json_object": False},
            ):  # fmt: skip
                await generate(**fields)
            requests = router.worker("prefill-0").requests
            assert [r.sampling.grammar.kind for r in requests] == [1, 2, 3, 4, 4, 0]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await generate(json_schema="{")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
