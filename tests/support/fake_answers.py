"""What fake workers answer.

Token i of an answer is a lower-case letter that depends on the prompt, i and, when the
temperature is not 0, on the seed: so a retried or resumed answer can be told from a wrong one.
"""

import struct
from collections.abc import Callable

from rpc import worker_pb2

BLOCK_SIZE = 16


def answer_token(prompt: list[int], index: int, seed: int = 0) -> int:
    return ord("a") + (sum(prompt) + 7 * index + seed) % 26


def answer_text(prompt: str, num_tokens: int, seed: int = 0) -> str:
    ids = list(prompt.encode())
    return "".join(chr(answer_token(ids, index, seed)) for index in range(num_tokens))


def prompt_scores(
    request: worker_pb2.GenerationRequest,
) -> list[worker_pb2.PromptLogprobs]:
    """If asked for, in two messages: prompt token i has -i/8, and so have its followers."""
    if not request.sampling.HasField("prompt_logprobs"):
        return []
    tokens = []
    for index, token_id in enumerate(request.prompt_token_ids[1:], start=1):
        token = worker_pb2.Token(id=token_id, logprob=-index / 8)
        for rank in range(request.sampling.prompt_logprobs):
            token.top.append(
                worker_pb2.TokenLogprob(id=(token_id + rank) % 256, logprob=-(index + rank) / 8)
            )
        tokens.append(token)
    return [
        worker_pb2.PromptLogprobs(first_index=1, tokens=tokens[:2]),
        worker_pb2.PromptLogprobs(first_index=len(tokens[:2]) + 1, tokens=tokens[2:]),
    ]


def embedding_of(request: worker_pb2.GenerationRequest) -> bytes:
    """If asked for: how many tokens, their sum, and which kind of pooling."""
    if not request.sampling.pooling:
        return b""
    ids = request.prompt_token_ids
    return struct.pack("<3f", len(ids), sum(ids), request.sampling.pooling)


def says(text: str, eos: int = 256) -> Callable[[list[int], int], int]:
    """A script for `FakeWorker.script`: this text in bytes, then EOS."""
    data = text.encode()
    return lambda prompt, index: data[index] if index < len(data) else eos
