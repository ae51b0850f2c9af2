"""From batches of tokens to response bodies: however the tokens were grouped on their way, a stream
and a response in one piece say the same, and nothing that was held back is lost."""

import asyncio
import json
import random
from collections.abc import AsyncIterator
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from core.errors import UnavailableError
from core.types import FinishReason, SamplingParams, TokenLogprobs
from router.chat.output import ReadingPlan
from router.chat.tool_formats import FORMATS
from router.openai.format import CHAT, COMPLETION, Formatter, make_formatter
from router.openai.protocol import parse_chat, parse_completion
from router.request.attempt import TokenBatch
from router.request.generation import Delta, Generation, TextRequest, Usage
from router.request.timeline import AttemptTimeline, Timeline, Timelines
from support.byte_tokenizer import EOS, byte_tokenizer
from support.fake_answers import says
from support.fake_workers import Fault
from support.router import running
from support.sse import events, is_done

TOKENIZER = byte_tokenizer()
# Few letters, so that stop strings meet themselves and each other, parts of an emoji and of CJK,
# a byte that is none of any text, and what tells reasoning and calls apart.
PIECES = st.sampled_from(
    [b"a", b"b", b"c", b"\n", b"\xf0", b"\x9f", b"\x98", b"\x80", "你".encode(), b"\xff", b" ",
     b"<think>", b"</think>", b"<tool_call>", b"</tool_call>", b'{"name": "f", "arguments": {']
)  # fmt: skip
TEXTS = st.lists(PIECES, max_size=24).map(b"".join)
CUTS = st.lists(st.integers(0, 400), max_size=8)
STOPS = st.lists(st.text(st.sampled_from("abc\n 你😀\ufffd<"), min_size=1, max_size=4), max_size=4)
PLANS = st.sampled_from(
    [None, ReadingPlan(FORMATS["hermes"], frozenset({"f"}), reasoning="marked"),
     ReadingPlan(reasoning="open"), ReadingPlan(FORMATS["pythonic"], frozenset({"f"}))]
)  # fmt: skip


class Batches:
    """A pipeline whose workers have answered: `data`, then EOS or the limit, cut at `cuts`."""

    def __init__(self, data: bytes, ends: bool, cuts: list[int]) -> None:
        ids = [*data, *([EOS] if ends else [])]
        reason = FinishReason.STOP if ends else FinishReason.LENGTH
        edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
        self.batches = []
        for start, end in zip(edges, edges[1:], strict=False):
            scores = [TokenLogprobs(-float(i), ((ids[i], -float(i)),)) for i in range(start, end)]
            self.batches.append(TokenBatch(ids[start:end], scores, None))
        last = self.batches[-1]
        self.batches[-1] = TokenBatch(last.token_ids, last.logprobs, reason)

    async def generate(
        self, sequence: Any, stats: Any, direct: Any = None
    ) -> AsyncIterator[TokenBatch]:
        stats.timeline.attempts.append(AttemptTimeline(None, "a", None, "d", 0.0, 0.0, 0))
        for batch in self.batches:
            yield batch


class Unmeasured:
    """Stands for metrics."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self


def said(request: TextRequest, pipeline: Batches) -> tuple[list[Delta], Usage]:
    generation = Generation(
        request, TOKENIZER, pipeline, Unmeasured(), 16, Timelines(), Timeline("", "test")  # type: ignore[arg-type]
    )  # fmt: skip

    async def collect() -> list[Delta]:
        return [delta async for delta in generation.deltas()]

    return asyncio.run(collect()), generation.usage


def formatter(request: TextRequest, is_chat: bool) -> Formatter:
    if is_chat:
        messages = [{"role": "user", "content": "x"}]
        body = parse_chat({"messages": messages, "logprobs": True, "top_logprobs": 1})
        return make_formatter(CHAT, body, request, "fake", TOKENIZER)
    completion = parse_completion({"prompt": "x", "logprobs": 1, "return_token_ids": True})
    return make_formatter(COMPLETION, completion, request, "fake", TOKENIZER)


def text_request(stop: list[str], plan: ReadingPlan | None = None) -> TextRequest:
    sampling = SamplingParams(max_tokens=10_000, logprobs=1, stop_token_ids=(EOS,))
    return TextRequest(prompts=((1,),), sampling=sampling, stop=tuple(stop), reading=plan)


def streamed(writer: Formatter, deltas: list[Delta], usage: Usage) -> list[dict]:
    raw = b"".join([*map(writer.chunk, deltas), writer.last_chunk(usage, None)]).decode()
    assert is_done(raw)
    choices = [event["choices"][0] for event in events(raw) if event["choices"]]
    reasons = [choice["finish_reason"] for choice in choices]
    assert all(reason is None for reason in reasons[:-1]) and reasons[-1] is not None
    return choices


def cut_text(data: bytes, stop: list[str]) -> str:
    """The definition: the whole text up to the stop string that begins first."""
    text = data.decode("utf-8", "replace")
    found = [(text.find(s), len(s)) for s in stop if s in text]
    return text[: min(found)[0]] if found else text


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.booleans(), CUTS, CUTS, STOPS)
@example(b"xabcab", True, [3], [4], ["abcd", "ca"])
@example(b"a\xf0\x9f", False, [1, 2], [], ["\ufffd"])
def test_a_completion(data, ends, cuts, other_cuts, stop):
    """V27, V28: text, finish reason, usage, token ids and logprobs."""
    request = text_request(stop)
    deltas, usage = said(request, Batches(data, ends, cuts))
    whole = formatter(request, False).whole([deltas], usage)
    choice = whole["choices"][0]
    text = cut_text(data, stop)
    assert choice["text"] == text
    is_cut = text != data.decode("utf-8", "replace")
    assert choice["finish_reason"] == ("stop" if ends or is_cut else "length")
    num_tokens = usage.completion_tokens
    assert len(choice["token_ids"]) == num_tokens == len(choice["logprobs"]["tokens"])
    assert choice["logprobs"]["token_logprobs"] == [-float(i) for i in range(num_tokens)]
    if not is_cut:
        assert num_tokens == len(data) + ends
    other, other_usage = said(request, Batches(data, ends, other_cuts))
    assert other_usage == usage
    pieces = streamed(formatter(request, False), other, usage)
    assert "".join(piece["text"] for piece in pieces) == text
    assert pieces[-1]["finish_reason"] == choice["finish_reason"]
    assert sum((piece["token_ids"] for piece in pieces), []) == choice["token_ids"]
    for key, values in choice["logprobs"].items():
        assert sum(((p["logprobs"] or {}).get(key, []) for p in pieces), []) == values, key


@settings(max_examples=150, deadline=None)
@given(TEXTS, st.booleans(), CUTS, CUTS, STOPS, PLANS)
def test_a_chat(data, ends, cuts, other_cuts, stop, plan):
    """V28, V36: content, reasoning and calls, whatever the model wrote."""
    request = text_request(stop, plan)
    deltas, usage = said(request, Batches(data, ends, cuts))
    whole = formatter(request, True).whole([deltas], usage)["choices"][0]
    other, _ = said(request, Batches(data, ends, other_cuts))
    pieces = streamed(formatter(request, True), other, usage)
    joined: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": []}
    for piece in pieces:
        delta = piece["delta"]
        for key in ("content", "reasoning_content"):
            joined[key] += delta.get(key) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                joined["calls"].append([call["function"]["name"], ""])
            joined["calls"][call["index"]][1] += call["function"]["arguments"]
    message = whole["message"]
    assert joined["content"] == (message["content"] or "")
    assert joined["reasoning_content"] == message.get("reasoning_content", "")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    assert joined["calls"] == [[call["name"], call["arguments"]] for call in calls]
    assert pieces[-1]["finish_reason"] == whole["finish_reason"]
    entries = [e for p in pieces if p["logprobs"] for e in p["logprobs"]["content"]]
    assert entries == whole["logprobs"]["content"]
    if plan is None:
        assert joined["content"] == cut_text(data, stop)
    shown = joined["content"] + joined["reasoning_content"] + json.dumps(joined["calls"])
    letters = [sum(text.count(letter) for letter in "bc") for text in (cut_text(data, stop), shown)]
    if "<" not in cut_text(data, stop):  # no marker and no call: nothing may vanish
        assert letters[0] <= letters[1]


async def test_what_is_held_back_survives_the_loss_of_a_worker():
    """V28: the stream is resumed in the middle of a character, or of what may be a stop string."""
    dice = random.Random(7)
    text = "ab😀bc你a\nabc" * 2
    size = len(text.encode())
    async with running(decodes=2) as router:
        for worker in router.cluster.everyone:
            worker.script = says(text)
        for _ in range(16):
            start = dice.randrange(len(text))
            stop = dice.choice([[], ["zz"], [text[start : start + 3] + "?"], [text[start:][:3]]])
            faults = iter([Fault("error", dice.randrange(size), UnavailableError("lost"))])
            for worker in router.cluster.workers.values():
                if worker.role == "decode":
                    worker.next_fault = lambda faults=faults: next(faults, None)
            fields = {"prompt": "x", "max_tokens": size + 1, "stop": stop, "temperature": 0}
            response = await router.post(**fields, stream=True)
            choices = [event["choices"][0] for event in events(response.text)]
            assert is_done(response.text)
            assert "".join(choice["text"] for choice in choices) == cut_text(text.encode(), stop)
            assert choices[-1]["finish_reason"] == "stop"
        await router.idle()
