"""Embeddings come from whoever computes the prompt, cost no block, and can be cancelled."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from core.types import Pooling
from support.pair import request, running_pair, tiny_config


async def embedding(call: Any) -> np.ndarray:
    found = []
    async for event in call:
        kind = event.WhichOneof("event")
        if kind in ("first_token", "tokens"):
            part = getattr(event, kind)
            assert not part.HasField("token") if kind == "first_token" else not part.tokens
            found.append(np.frombuffer(part.embedding, "<f4"))
    assert len(found) == 1
    return found[0]


@pytest.mark.parametrize("pooling", list(Pooling))
async def test_both_kinds_of_workers_embed_alike(tiny_model_dir, pooling):
    prompt = [(7 * i) % 250 for i in range(90)]
    model = transformers.AutoModel.from_pretrained(str(tiny_model_dir), dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
    wanted = (states.mean(0) if pooling is Pooling.MEAN else states[-1]).numpy()
    async with running_pair(tiny_config(tiny_model_dir, num_kv_blocks=32)) as pair:
        asked = request(prompt, max_tokens=0, pooling=pooling)
        there = await embedding(pair.prefill_call(asked, hand_over=False))
        np.testing.assert_allclose(there, wanted, atol=1e-4, rtol=1e-3)
        here = await embedding(pair.decode_call(asked, None))
        np.testing.assert_allclose(here, there, atol=1e-5, rtol=1e-4)
        await pair.wait_idle()


async def test_cancelled_ones_leave_nothing(tiny_model_dir):
    prompt = [(7 * i) % 250 for i in range(200)]
    async with running_pair(tiny_config(tiny_model_dir, num_kv_blocks=32)) as pair:
        calls = [
            pair.prefill_call(request(prompt, max_tokens=0, pooling=Pooling.MEAN), hand_over=False)
            for _ in range(4)
        ]
        await calls[0].read()  # the first is admitted
        for call in calls:
            call.cancel()
        await asyncio.gather(*(call.code() for call in calls))
        await pair.wait_idle()
        counts = await pair.counts(pair.prefill)
        assert counts.running == counts.held == 0
