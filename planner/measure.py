"""What a live deployment of one prefill and one decode worker takes for each thing it does.

Some dozens of short requests, a minute on a small CPU: prompts alone, batches of answers alone,
and both at once. Workers say how long their steps took (`/debug/requests/ID`); what a client sees
beyond that is the way through the router. `planner.profile` makes a profile of it.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean, median
from typing import Any

import httpx

from core.errors import ConfigError, UnavailableError
from loadgen.benchmark import Prepared
from loadgen.record import RequestRecord, Segment

LONE_PROMPTS = (32, 128, 384, 768, 1536)
LONE_ANSWER = 8
# (sequences, prompt of each, answer): long enough for the last prompt to join the first.
BATCHES = ((1, 32, 40), (2, 32, 40), (4, 32, 40), (8, 32, 60), (1, 1536, 40), (3, 400, 120))
BESIDE_STREAMS = (1, 4)
BESIDE_PROMPT = 768
BESIDE_ANSWER = 320
BESIDE_DELAY_S = 1.0  # until all streams decode
ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Lone:
    """One request in an idle system. Seconds."""

    num_prompt: int
    ttft: float
    prefill: float  # all its steps, as the worker measured them
    hand_over: float  # from the first token to the second, less a decode step
    kv_bytes: int
    pull_s: float


@dataclass(frozen=True, slots=True)
class Batch:
    """Decode steps of `num_seqs` sequences with about `context` tokens each."""

    num_seqs: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Beside:
    """Both workers busy: sequences decode while a prompt is computed. Seconds of a decode step
    before and meanwhile, and of the prompt's steps."""

    decode_alone: float
    decode: float
    num_prompt: int
    prefill: float


@dataclass(slots=True)
class Samples:
    """Everything that was measured. `kv_tokens`: what one worker has room for."""

    model: str
    kv_tokens: int
    kv_bytes_per_token: float
    max_num_seqs: int
    lone: list[Lone] = field(default_factory=list)
    batches: list[Batch] = field(default_factory=list)
    beside: list[Beside] = field(default_factory=list)


class Measurer:
    """Asks one deployment. Every prompt is new: nothing is found in a prefix cache."""

    def __init__(self, prepared: Prepared, say: Callable[[str], None] = lambda _: None) -> None:
        self._client, self._prompts = prepared.client, prepared.prompts
        self._say = say
        self._seed = f"measure {prepared.client.now()}"
        self._num_sent = 0

    async def measure(self) -> Samples:
        """Raises ConfigError for a deployment of another shape, UnavailableError when a request
        fails."""
        found = self._samples(await self._get("/cluster"))
        for number in range(1, ROUNDS + 1):
            self._say(f"measuring, round {number} of {ROUNDS}")
            for num_prompt in LONE_PROMPTS:
                found.lone.append(await self._lone(num_prompt))
            for num_seqs, num_prompt, num_output in BATCHES:
                found.batches += await self._batch(num_seqs, num_prompt, num_output)
            for num_seqs in BESIDE_STREAMS:
                found.beside += await self._beside(num_seqs)
        return found

    def _samples(self, cluster: dict[str, Any]) -> Samples:
        workers = {worker["role"]: worker for worker in cluster["workers"]}
        if len(cluster["workers"]) != 2 or set(workers) != {"prefill", "decode"}:
            raise ConfigError(
                "a measurement needs a deployment of one prefill and one decode worker that does "
                "nothing else, for example configs/local.yaml"
            )
        sizes = [w["kv_blocks"]["total"] * w["block_size"] for w in workers.values()]
        decode = workers["decode"]
        return Samples(
            self._client.target.model,
            min(sizes),
            decode["kv_block_bytes"] / decode["block_size"],
            decode["max_num_seqs"],
        )

    async def _get(self, path: str, **params: int) -> Any:
        target = self._client.target
        try:
            async with httpx.AsyncClient(
                trust_env=False, timeout=10.0, headers=target.headers
            ) as http:
                answer = await http.get(f"{target.url}{path}", params=params)
                return answer.raise_for_status().json()
        except (httpx.HTTPError, ValueError) as error:
            raise UnavailableError(f"{target.url}{path}: {error}") from error

    async def _send(self, num_prompt: int, num_output: int) -> RequestRecord:
        client = self._client
        self._num_sent += 1
        prompt = self._prompts.make([Segment(f"{self._seed}/{self._num_sent}", num_prompt)])
        record = RequestRecord(self._num_sent, client.now())
        await client.send(client.target.body(prompt, num_output), record)
        if record.error is not None or len(record.token_times_s) < min(num_output, 3):
            what = f"{record.error}: {record.detail}" if record.error else "its answer was cut"
            raise UnavailableError(f"{client.target.url}: a request failed: {what}")
        return record

    async def _attempts(self, count: int) -> list[dict[str, Any]]:
        """The last attempt of each of the last `count` requests, the latest first."""
        listed = await self._get("/debug/requests", limit=count)
        found = []
        for one in listed["requests"]:
            timeline = await self._get(f"/debug/requests/{one['id']}")
            attempt = timeline["sequences"][0]["attempts"][-1]
            found.append({**attempt, "num_prompt": one["num_prompt_tokens"]})
        return found

    async def _lone(self, num_prompt: int) -> Lone:
        record = await self._send(num_prompt, LONE_ANSWER)
        (attempt,) = await self._attempts(1)
        decode = attempt["decode"]
        if attempt["decision"] != "disaggregated" or not decode or not decode["kv_bytes"]:
            raise ConfigError("no KV came from the prefill worker: a measurement needs "
                              "router.max_local_prefill_tokens: 0")  # fmt: skip
        gaps = record.gaps_s
        return Lone(
            num_prompt,
            record.ttft_s,
            _steps(attempt),
            max(0.0, gaps[0] - median(gaps[1:])),
            decode["kv_bytes"],
            decode["kv_transfer_seconds"],
        )

    async def _batch(self, num_seqs: int, num_prompt: int, num_output: int) -> list[Batch]:
        """None where they did not decode together."""
        records = await asyncio.gather(
            *(self._send(num_prompt, num_output) for _ in range(num_seqs))
        )
        start = max(record.token_times_s[1] for record in records)
        gaps = _gaps(records, start, min(r.token_times_s[-1] for r in records))
        return [Batch(num_seqs, num_prompt + num_output // 2, median(gaps))] if gaps else []

    async def _beside(self, num_seqs: int) -> list[Beside]:
        """Two prompts, one after the other, beside streams that have begun before them."""
        streams = [asyncio.create_task(self._send(32, BESIDE_ANSWER)) for _ in range(num_seqs)]
        try:
            await asyncio.sleep(BESIDE_DELAY_S)
            prompts = [await self._send(BESIDE_PROMPT, 1) for _ in range(2)]
            records = await asyncio.gather(*streams)
        finally:
            for stream in streams:
                stream.cancel()
        attempts = await self._attempts(num_seqs + len(prompts))
        prefills = [_steps(a) for a in reversed(attempts) if a["num_prompt"] == BESIDE_PROMPT]
        first = max(record.token_times_s[1] for record in records)
        end = min(record.token_times_s[-1] for record in records)
        alone = _gaps(records, first, prompts[0].sent_s)
        alone += _gaps(records, prompts[-1].ended_s, end)
        found = []
        for prompt, prefill in zip(prompts, prefills, strict=True):
            gaps = _gaps(records, prompt.sent_s, prompt.token_times_s[0])
            # A prompt that the streams did not outlast was alone for a part of its time.
            if gaps and alone and prompt.token_times_s[0] < end:
                found.append(Beside(median(alone), mean(gaps), BESIDE_PROMPT, prefill))
        return found


def _steps(attempt: dict[str, Any]) -> float:
    return float(sum(chunk["seconds"] for chunk in attempt["prefill"]["chunks"]))


def _gaps(records: Sequence[RequestRecord], start: float, end: float) -> list[float]:
    """Between tokens of any of them that lie in a window of time."""
    return [
        after - before
        for record in records
        for before, after in zip(record.token_times_s, record.token_times_s[1:], strict=False)
        if start <= before and after <= end
    ]
