"""Messages in all their forms, real templates against transformers, and hostile templates."""

import copy
import sys

import pytest

from core.errors import ModelError, PdserveError, RequestError
from router.chat.template import ChatTemplate, normalize_messages
from router.text.tokenizer import load_tokenizer
from support.models import smollm2_files

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# The traits that families use: loop controls, namespaces, macros, tojson, slices, tests, blocks.
FEATURES = """{{- bos_token }}
{%- macro show(part) -%}[{{ part | trim }}]{%- endmacro -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages[::-1] -%}
    {%- if m.role == "user" and ns.last < 0 -%}{%- set ns.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- if tools is not none and tools %}{{ tools | tojson(indent=4) }}{% endif -%}
{%- for m in messages %}
    {%- if m.role == "system" %}{% continue %}{% endif %}
    {%- if loop.first or loop.last %}*{% endif -%}
    {{ loop.index }}/{{ loop.length }} {{ m.role ~ ":" ~ show(m.content) }}
    {%- if m.tool_calls is defined and m.tool_calls -%}
        {%- for call in m.tool_calls %} {{ call.function.name }}=
        {{- call.function.arguments | tojson }}
        {%- for k, v in call.function.arguments | items %} <{{ k }}={{ v }}>{% endfor %}
        {%- endfor -%}
    {%- endif -%}
    {% if m.role == "assistant" %}
        {%- generation %}{{ "é<&>" | tojson }}{% endgeneration %}
    {% endif %}
    {%- if m.content.startswith("stop") %}{% break %}{% endif %}
{% endfor -%}
{{ ns.last }} {{ "x" * 3 }} {{ "%s-%s" | format("a", 1) }} {{ "{}".format(2) }}
{{ ["a", "b"] | join(",") }} {{ messages | map(attribute="role") | join("+") }}
{%- if add_generation_prompt %} >{% endif %}{{ undefined_name }}{{ eos_token }}"""


def user(text="hello"):
    return {"role": "user", "content": text}


def prompt(*messages, source=CHATML, **options):
    return ChatTemplate(source).render(list(messages), **options)


# ---------------------------------------------------------------- rendering


TOOL_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "f", "arguments": '{"city": "Zürich", "n": [1, 2]}'},
}
CHAT = [
    {"role": "system", "content": "be brief"},
    user(" what? "),
    {"role": "assistant", "content": None, "tool_calls": [TOOL_CALL]},
    {"role": "tool", "content": "22 °C", "tool_call_id": "c1"},
    user("stop now"),
    user("never"),
]


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_features_equal_transformers(add_generation_prompt, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    special = {"bos_token": "<s>", "eos_token": "</s>"}
    ours = ChatTemplate(FEATURES, special).render(CHAT, add_generation_prompt, tools)
    theirs, _ = render_jinja_template(
        conversations=[normalize_messages(CHAT)],
        tools=tools,
        chat_template=FEATURES,
        add_generation_prompt=add_generation_prompt,
        **special,
    )
    assert ours == theirs[0]
    assert "<city=Zürich>" in ours and "never" not in ours


def test_the_template_of_smollm2():
    template = load_tokenizer(smollm2_files()).chat_template
    assert template.render([user()]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )
    own = template.render([{"role": "developer", "content": "x"}, user()], False)
    assert own == "<|im_start|>system\nx<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n"


def test_developer_is_system_unless_the_template_knows_it():
    developer = {"role": "developer", "content": "x"}
    assert prompt(developer).startswith("<|im_start|>system")
    known = "{# developer #}{{ messages[0].role }}"
    assert prompt(developer, source=known) == "developer"


def test_time_in_a_template():
    assert prompt(user(), source="{{ strftime_now('%Y') | int > 2000 }}") == "True"


def test_tool_template():
    template = ChatTemplate("plain", tool_use_source="with tools")
    assert template.render([user()]) == "plain"
    assert template.render([user()], tools=[{}]) == "with tools"


# ---------------------------------------------------------------- forms of messages


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", ""),
        ("hi", "hi"),
        ([], ""),
        ([{"type": "text", "text": "hi"}], "hi"),
        ([{"type": "input_text", "text": "hi"}], "hi"),
        ([{"type": "output_text", "text": "hi"}], "hi"),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "a\nb"),
        ([{"type": "text", "text": ""}], ""),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_forms_of_content_give_the_same_prompt(role, content, text):
    message = {"role": role, "content": content}
    before = copy.deepcopy(message)
    assert prompt(message) == prompt({"role": role, "content": text})
    assert message == before


@pytest.mark.parametrize("extra", [{}, {"tool_calls": [TOOL_CALL]}, {"tool_calls": None}])
def test_an_assistant_message_may_have_no_content(extra):
    forms = [{"content": None}, {"content": ""}, {"content": []}, {}]
    prompts = {prompt(user(), {"role": "assistant", **form, **extra}) for form in forms}
    assert prompts == {prompt(user(), {"role": "assistant", "content": ""})}


def test_our_own_answer_can_be_sent_back():
    answer = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
    }
    assert normalize_messages([answer]) == [{"role": "assistant", "content": "hi"}]


def test_tool_calls_reach_the_template_with_their_arguments_as_an_object():
    call = normalize_messages(CHAT)[2]["tool_calls"][0]
    assert call["function"] == {"name": "f", "arguments": {"city": "Zürich", "n": [1, 2]}}
    assert call["id"] == "c1"
    for arguments in ("", None, {}, "{}"):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
        message["tool_calls"][0]["function"]["arguments"] = arguments
        normal = normalize_messages([message])[0]
        assert normal["tool_calls"][0]["function"]["arguments"] == {}


def parts(*content):
    return [user(), {"role": "user", "content": list(content)}]


def calling(**call):
    return [{"role": "assistant", "tool_calls": [call]}]


IMAGE = {"type": "image_url", "image_url": {"url": "http://x"}}
FUNCTION = "messages[0].tool_calls[0].function"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([None], "messages[0]"),
        ([user(), "hi"], "messages[1]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "root", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "tool", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        (parts("hi"), "messages[1].content[0]"),
        (parts(IMAGE), "messages[1].content[0].type"),
        (parts({"type": "text", "text": "a"}, IMAGE), "messages[1].content[1].type"),
        (parts({"type": ["text"], "text": "a"}), "messages[1].content[0].type"),
        (parts({"text": "a"}), "messages[1].content[0].type"),
        (parts({"type": "text"}), "messages[1].content[0].text"),
        (parts({"type": "text", "text": None}), "messages[1].content[0].text"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "user", "content": "x", "audio": {"id": 1}}], "messages[0].audio"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": {"a": 1}}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": [1]}], "messages[0].tool_calls[0]"),
        (calling(type="custom"), "messages[0].tool_calls[0].type"),
        (calling(), FUNCTION),
        (calling(function={"arguments": "{}"}), f"{FUNCTION}.name"),
        (calling(function={"name": "f", "arguments": "{"}), f"{FUNCTION}.arguments"),
        (calling(function={"name": "f", "arguments": "[1]"}), f"{FUNCTION}.arguments"),
        (calling(function={"name": "f", "arguments": 5}), f"{FUNCTION}.arguments"),
        (calling(function={"name": "f", "arguments": "[" * 99999}), f"{FUNCTION}.arguments"),
    ],
)
def test_what_is_wrong_is_named(messages, param):
    with pytest.raises(RequestError) as caught:
        normalize_messages(messages)
    assert caught.value.param == param
    assert param in caught.value.message
    assert len(caught.value.message) < 300


# ---------------------------------------------------------------- templates that refuse or break


def test_a_template_may_refuse_messages():
    source = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        prompt(user(), source=source)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[7].role }}", "{{ 1 + 'a' }}", "{{ none.x.y }}"])
def test_a_template_that_trips_over_messages_is_a_request_error(source):
    with pytest.raises(RequestError, match="refuses these messages"):
        prompt(user(), source=source)


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ a", "{% include 'x' %}{% nope %}", "{{ 1 | no }}"]
)
def test_a_template_that_is_no_jinja_is_a_model_error(source):
    with pytest.raises(ModelError, match="not valid Jinja"):
        ChatTemplate(source)


HOSTILE = {
    "dunder": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(raise_exception) }}",
    "mutation": "{{ messages.append(1) }}",
    "dict mutation": "{{ messages[0].update({'role': 'x'}) }}",
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "filtered loop": "{% for a in range(99999) if a < 0 %}{% endfor %}" * 50,
    "macro bomb": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "loop bomb": "{% for x in [[1, 2]] recursive %}{% if loop.depth < 60 %}{{ loop([1, 2]) }}"
    "{% endif %}{% endfor %}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "big range": "{{ range(10 ** 9) | list }}",
    "range over the limit": "{{ range(1000000000) | list }}",
    "power": "{{ 9 ** 99999999 }}",
    "product": "{{ 'a' * 9999999999 }}",
    "list product": "{{ [1] * 9999999999 }}",
    "doubling": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling with +": "{% set ns = namespace(x='ab') %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling lists": "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}"
    "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "replace": "{{ ('a' * 9999999).replace('a', 'b' * 9999999) }}",
    "replace filter": "{{ ('a' * 9999999) | replace('a', 'b' * 9999999) }}",
    "join": "{{ ('a' * 9999999).join(['', '', '', '', '']) }}",
    "join filter": "{{ ['', '', '', ''] | join('a' * 9999999) }}",
    "center": "{{ 'a'.center(9999999999) }}",
    "wide format": "{{ '{:9999999999}'.format(1) }}",
    "wide format filter": "{{ '%9999999999d' | format(1) }}",
    "star format filter": "{{ '%*d' | format(9999999999, 1) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "tojson indent": "{{ [1] | tojson(indent=9999999999) }}",
    "indent": "{{ 'a\nb' | indent(9999999999) }}",
    "long output": "{% for i in range(9) %}{{ 'a' * 9999999 }}{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_is_stopped(name):
    """V78: with an error of ours, soon, and without touching what it was given."""
    messages = [user()]
    with pytest.raises(PdserveError):
        ChatTemplate(HOSTILE[name], max_steps=20_000).render(messages)
    assert messages == [user()]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception.__globals__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages[0].__class__ }}",
        "{{ self.__init__ }}",
        "{{ cycler.__init__ }}",
    ],
)
def test_inner_attributes_are_not_seen(source):
    assert prompt(user(), source=source) == ""


@pytest.mark.parametrize(
    "name", ["batch", "center", "pprint", "random", "round", "slice", "urlize", "wordwrap"]
)
def test_filters_that_are_not_there(name):
    with pytest.raises(ModelError, match=name):
        ChatTemplate("{{ 'a' | " + name + "(999999999) }}")


def test_no_other_templates_can_be_loaded():
    with pytest.raises(PdserveError):
        prompt(user(), source="{% include '/etc/passwd' %}")


def test_limits_name_the_template_as_the_culprit():
    with pytest.raises(ModelError, match="chat template was stopped: it takes too many steps"):
        ChatTemplate(HOSTILE["nested ranges"], max_steps=1000).render([user()])
    with pytest.raises(ModelError, match="chat template was stopped: it takes too long"):
        ChatTemplate(HOSTILE["nested ranges"], max_seconds=0.0).render([user()])


def test_a_budget_is_for_one_render():
    template = ChatTemplate("{% for i in range(600) %}{% endfor %}ok", max_steps=1000)
    assert [template.render([user()]) for _ in range(5)] == ["ok"] * 5


def test_a_long_chat_fits_the_default_budget():
    messages = [user("x" * 100), {"role": "assistant", "content": "y"}] * 5000
    assert prompt(*messages).count("<|im_start|>") == 10_001


def test_content_is_never_run_as_a_template():
    text = "{{ 7 * 7 }}{% raw %}"
    assert text in prompt(user(text))


def test_no_torch_and_no_transformers_are_needed():
    """The modules of text handling import neither, in a process of their own."""
    import subprocess

    code = (
        "import sys, router.text.tokenizer, router.text.detokenizer, router.chat.template; "
        "print(sorted({'torch', 'transformers', 'ray'} & set(sys.modules)))"
    )
    path = ":".join(entry for entry in sys.path if entry)
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        env={"PYTHONPATH": path},
        timeout=60,
        check=True,
    ).stdout
    assert output.decode().strip() == "[]"
