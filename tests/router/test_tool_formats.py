"""Reasoning and tool calls, found in text that comes in any pieces."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.chat.output import CallDelta, ChatReader, MessageDelta, ReadingPlan
from router.chat.tool_formats import FORMATS, NAMED_CALL, REQUIRED_CALLS, detect_format

NAMES = frozenset({"f", "get_weather", "g"})
Calls = list[tuple[str, str]]


def read(plan: ReadingPlan, pieces: list[str]) -> tuple[str, str, Calls]:
    """Content, reasoning and calls of all deltas joined, as a client joins them."""
    reader = ChatReader(plan)
    deltas = [reader.feed(piece) for piece in pieces] + [reader.feed("", is_last=True)]
    calls: list[CallDelta] = []
    for delta in deltas:
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(calls) and call.id
                calls.append(CallDelta(call.index, call.id, call.name))
            calls[call.index].arguments += call.arguments
    assert len({call.id for call in calls}) == len(calls)
    return (
        "".join(delta.content for delta in deltas),
        "".join(delta.reasoning for delta in deltas),
        [(str(call.name), call.arguments) for call in calls],
    )


def plan_of(name: str | None, reasoning=None, parallel: bool = True) -> ReadingPlan:
    return ReadingPlan(FORMATS[name] if name else None, NAMES, parallel, reasoning)


TRICKY = '{"a": "x </tool_call> \\" {", "b": [1,{"c":2}]}'
CASES: list[tuple[str, str, str, Calls]] = [
    ("hermes", "Just text, 1 < 2.", "Just text, 1 < 2.", []),
    ("hermes", f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {TRICKY}}}\n</tool_call>\n'
     '<tool_call>{"arguments": {}, "name": "g"}</tool_call>\n', "Sure.",
     [("f", TRICKY), ("g", "{}")]),
    ("hermes", '<tool_call>{"name":"f"}</tool_call> done', " done", [("f", "{}")]),
    ("hermes", '<tool_call>{"name":"f","arguments":"{\\"a\\": 1}"}</tool_call>', "",
     [("f", '{"a": 1}')]),
    ("hermes", '<tool_call>{"name":"f","arguments":{"a":', "", [("f", '{"a":')]),
    ("hermes", "<tool_call>no JSON</tool_call> x", "<tool_call>no JSON</tool_call> x", []),
    ("hermes", '<tool_call>{"nam', '<tool_call>{"nam', []),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
     '<tool_call>{"name": 5, "arguments": {}}</tool_call>', []),
    ("hermes", "a <tool_cal", "a <tool_cal", []),
    ("hermes", '<tool_call>{"name": "f"}<tool_call>{"name": "g"}', "", [("f", "{}"), ("g", "{}")]),
    ("llama3_json", ' {"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', "",
     [("f", '{"a": 1}'), ("g", "{}")]),
    ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ("llama3_json", '{"name": "Bob", "parameters": {}}\n', '{"name": "Bob", "parameters": {}}\n',
     []),
    ("llama3_json", '{"name": "f"}', '{"name": "f"}', []),
    ("llama3_json", 'See {"name": "f", "parameters": {}}', 'See {"name": "f", "parameters": {}}',
     []),
    ("pythonic", '[get_weather(city="a, ]b", n=-3, ok=true, l=[1, None]), f()]', "",
     [("get_weather", '{"city": "a, ]b", "n": -3, "ok": true, "l": [1, null]}'), ("f", "{}")]),
    ("pythonic", "[1] says so", "[1] says so", []),
    ("pythonic", "[f(a=g())]", "[f(a=g())]", []),
    ("pythonic", "[print(a=1)]", "[print(a=1)]", []),
    ("pythonic", "[f(a=1", "[f(a=1", []),
    ("mistral", '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, '
     '{"name": "g", "arguments": {}}]', "", [("f", '{"a": 1}'), ("g", "{}")]),
    ("mistral", 'hi [TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g{"b": [2]}', "hi",
     [("f", '{"a": 1}'), ("g", '{"b": [2]}')]),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{"a": 1}', "", [("f", '{"a": 1}')]),
    ("mistral", "[TOOL_CALLS] of course", "[TOOL_CALLS] of course", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "content", "calls"), CASES)
def test_each_format(name, text, content, calls):
    expected = (content, "", calls)
    assert read(plan_of(name), [text]) == expected
    assert read(plan_of(name), list(text)) == expected


FRAGMENTS = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "[", "]", "{",
     "}", '"', "\\", ",", ":", ";", " ", "\n", '{"name": "f", ', '"arguments": ', '{"a": 1}', "f(",
     "a=1", ")", "'", "<|python_tag|>", "<", "é", "x"]
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([*FORMATS, None]),
    st.sampled_from([None, "open", "marked"]),
    st.one_of(
        st.lists(FRAGMENTS, max_size=25).map("".join), st.sampled_from([c[1] for c in CASES])
    ),
    st.data(),
)
def test_deltas_joined_do_not_depend_on_the_pieces(name, reasoning, text, data):
    """V28, V36: also for text that is broken in every way."""
    plan = plan_of(name, reasoning)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(plan, pieces) == read(plan, [text])


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=40))
def test_text_without_a_marker_is_content_to_the_letter(text):
    if not text.lstrip().startswith(("[", "{", "<")):
        for name in FORMATS:
            assert read(plan_of(name), [text]) == (text, "", [])


@pytest.mark.parametrize(
    ("reasoning", "text", "expected"),
    [
        ("marked", "<think>\nhm\n</think>\n\nYes", ("Yes", "hm")),
        ("open", "hm\n</think>\n\nYes ", ("Yes ", "hm")),
        ("open", "<think>hm</thi", ("", "hm</thi")),
        ("marked", "  <thx", ("  <thx", "")),
        ("marked", "plain <think>", ("plain <think>", "")),
    ],
)
def test_reasoning(reasoning, text, expected):
    assert read(plan_of(None, reasoning), list(text)) == (*expected, [])


def test_a_call_without_reasoning():
    got = read(plan_of("hermes", "marked"), ['\n<tool_call>{"name": "f"}</tool_call>'])
    assert got == ("", "", [("f", "{}")])


def test_reasoning_then_a_call():
    text = '<think>I call </tool_call>\n</think>\n<tool_call>{"name": "f"}</tool_call>'
    got = read(plan_of("hermes", "marked"), [text])
    assert got == ("", "I call </tool_call>", [("f", "{}")])


def test_only_the_first_call_if_they_may_not_be_parallel():
    text = '<tool_call>{"name": "f"}</tool_call>' * 3
    assert read(plan_of("hermes", parallel=False), list(text)) == ("", "", [("f", "{}")])


def test_forced_calls():
    text = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    plan = ReadingPlan(REQUIRED_CALLS, NAMES)
    assert read(plan, list(text)) == ("", "", [("f", '{"a": 1}'), ("g", "{}")])
    plan = ReadingPlan(NAMED_CALL, frozenset({"f"}))
    assert read(plan, list(' {"a": "}"}\n')) == ("", "", [("f", '{"a": "}"}')])


def test_arguments_stream_as_they_are_written():
    reader = ChatReader(plan_of("hermes"))
    first = reader.feed('<tool_call>{"name": "f", "arguments": {"a')
    assert [(c.name, c.arguments) for c in first.calls] == [("f", '{"a')]
    assert [(c.name, c.arguments) for c in reader.feed('": 1').calls] == [(None, '": 1')]
    assert reader.feed("}}</tool_call>").calls[0].arguments == "}"
    assert reader.feed("", is_last=True) == MessageDelta()


def test_call_ids_fit_the_family():
    (call,) = ChatReader(plan_of("mistral")).feed("[TOOL_CALLS]f{}").calls
    assert call.id is not None and len(call.id) == 9 and call.id.isalnum()


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}{{ tools | tojson }}", "hermes"),
        ("<tool_call>\n<function=f>", None),
        ("[AVAILABLE_TOOLS] [TOOL_CALLS]", "mistral"),
        ('<|eot_id|> ipython {"name": f, "parameters": {}}', "llama3_json"),
        ("[func_name1(params_name1=params_value1)]", "pythonic"),
        ("{{ messages }}", None),
    ],
)
def test_the_template_shows_the_format(template, name):
    found = detect_format(template)
    assert (found.name if found else None) == name


def test_arguments_of_another_family_are_json_all_the_same():
    _, _, calls = read(plan_of("pythonic"), ['[f(a="é\\n", b={"c": [true]})]'])
    assert json.loads(calls[0][1]) == {"a": "é\n", "b": {"c": [True]}}
