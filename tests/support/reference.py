"""The oracle: transformers' own generate, in float32, on the weights that the deployment serves."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from core.model_files import resolve_model


@cache
def reference_model() -> Any:
    from transformers import AutoModelForCausalLM

    files = resolve_model("smollm2-135m")
    model = AutoModelForCausalLM.from_pretrained(
        str(files.path.parent), gguf_file=files.path.name, dtype=torch.float32
    )
    return model.eval()


def greedy(prompt_token_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The next `num_tokens` tokens, EOS not stopping them."""
    return list(_greedy(tuple(prompt_token_ids), num_tokens))


@cache
def _greedy(prompt_token_ids: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    model = reference_model()
    ids = torch.tensor([prompt_token_ids])
    with torch.inference_mode():
        output = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(output[0, len(prompt_token_ids) :].tolist())


def logprobs(token_ids: Sequence[int]) -> torch.Tensor:
    """Log probabilities after every position, [len(token_ids), vocab]."""
    with torch.inference_mode():
        logits = reference_model()(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits.float(), dim=-1)
