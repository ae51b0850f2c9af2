"""A model without weights whose answer depends on nothing but what the paged cache holds.

It stores token ids and positions as "KV" and derives the next token's logits from a hash of all
that it reads back through the block table. A block that is shared wrongly, freed early,
overwritten or copied to the wrong place therefore changes the output.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from core.types import GenerationRequest, SamplingParams
from engine.attention.base import StepBatch
from engine.engine import Engine
from engine.types import SequenceOutput

B = 4  # tokens of a block, where nothing else is said


@dataclass(frozen=True, slots=True)
class MockConfig:
    vocab_size: int = 101
    max_model_len: int = 4096


class MockModel:
    """Implements `engine.types.Model`. `next_error` is raised by the next `forward`, once,
    after the KV is written; `num_rows` has how many tokens' logits
    each call asked for."""

    kv_dtype = torch.int32
    maxima = None

    def __init__(self, vocab_size: int = 101, max_model_len: int = 4096) -> None:
        self.config = MockConfig(vocab_size, max_model_len)
        self.next_error: Exception | None = None
        self.num_rows: list[int] = []

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        return (1, 2, 1, block_size, 1)

    def bind(self, kv_cache: torch.Tensor) -> None:
        self._tokens = kv_cache[:, 0, 0, 0, :, 0]  # [num_blocks, block_size]
        self._positions = kv_cache[:, 0, 1, 0, :, 0]

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        self.num_rows.append(len(logits_rows))
        assert all(length == 1 for length in batch.query_lens[: batch.num_decodes])
        rows: list[tuple[list[int], int]] = []  # of each token: its block table and position
        start = 0
        for query_len, seq_len, table in zip(
            batch.query_lens, batch.seq_lens, batch.block_tables, strict=True
        ):
            expected = list(range(seq_len - query_len, seq_len))
            assert positions[start : start + query_len].tolist() == expected
            blocks, slots = self._slots(table, expected)
            self._tokens[blocks, slots] = input_ids[start : start + query_len].int()
            self._positions[blocks, slots] = positions[start : start + query_len].int()
            rows += [(table, position) for position in expected]
            start += query_len
        assert start == len(input_ids)
        if self.next_error is not None:
            error, self.next_error = self.next_error, None
            raise error
        logits = [self._logits(*rows[row]) for row in logits_rows.tolist()]
        return torch.stack(logits) if logits else torch.empty(0, self.config.vocab_size)

    def _slots(self, table: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        where = torch.tensor(positions)
        block_size = self._tokens.shape[1]
        return torch.tensor(table)[where // block_size], where % block_size

    def _logits(self, table: list[int], position: int) -> torch.Tensor:
        blocks, slots = self._slots(table, list(range(position + 1)))
        read = torch.stack([self._tokens[blocks, slots], self._positions[blocks, slots]])
        digest = hashlib.blake2b(read.numpy().tobytes(), digest_size=6).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
        return torch.randn(self.config.vocab_size, generator=generator) * 2


def make_request(
    request_id: str,
    prompt: Sequence[int],
    *,
    output: Sequence[int] = (),
    cache_salt: str = "",
    max_tokens: int = 8,
    temperature: float = 0.0,
    **sampling: object,
) -> GenerationRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling)  # type: ignore[arg-type]
    return GenerationRequest(
        request_id,
        tuple(prompt),
        params,
        output_token_ids=tuple(output),
        cache_salt=cache_salt,
    )


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}-{length}")
    return [rng.randrange(101) for _ in range(length)]


def mixed_requests(count: int, seed: int, longest: int) -> list[GenerationRequest]:
    """Prompts that share prefixes, with all kinds of sampling."""
    rng = random.Random(seed)
    stems = [prompt_of(longest, stem) for stem in range(4)]
    requests = []
    for index in range(count):
        stem = rng.choice(stems)[: rng.randint(0, longest // 2)]
        tail = [rng.randrange(101) for _ in range(rng.randint(1, longest - len(stem)))]
        requests.append(
            make_request(
                f"r{index}",
                stem + tail,
                max_tokens=rng.randint(1, 24),
                temperature=rng.choice([0.0, 1.0]),
                seed=rng.getrandbits(32),
                top_p=rng.choice([1.0, 0.9]),
                presence_penalty=rng.choice([0.0, 0.5]),
                stop_token_ids=(rng.randrange(101),),
                cache_salt=rng.choice(["", "", "s"]),
            )
        )
    return requests


def generate(engine: Engine, *requests: GenerationRequest) -> dict[str, list[int]]:
    for request in requests:
        engine.add(request)
    return run_to_end(engine)


def run_to_end(engine: Engine, max_steps: int = 10_000) -> dict[str, list[int]]:
    """Steps until there is no work, checking the books after every step; new tokens by request.
    Fails if a step that should bring something forward does not."""
    tokens: dict[str, list[int]] = {}
    for _ in range(max_steps):
        if not engine.has_work():
            return tokens
        outputs = engine.step()
        engine.check_integrity()
        assert engine.made_progress, "a step with work to do changed nothing"
        collect(tokens, outputs)
    raise AssertionError(f"work is left after {max_steps} steps")


def collect(tokens: dict[str, list[int]], outputs: list[SequenceOutput]) -> None:
    for output in outputs:
        assert output.error is None, output.error
        tokens.setdefault(output.request_id, []).extend(output.token_ids)


def is_idle(engine: Engine) -> bool:
    counts = engine.block_counts()
    return not engine.has_work() and counts.free + counts.cached == counts.total


def only(outputs: list[SequenceOutput], request_id: str = "r") -> SequenceOutput:
    (output,) = (o for o in outputs if o.request_id == request_id)
    return output


def block_table_of(engine: Engine, request_id: str) -> list[int]:
    return list(engine._get(request_id).block_table)
