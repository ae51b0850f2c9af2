"""A decode worker with a draft model: it reads a handed-over prompt itself, counts in memory."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from core.config import EngineConfig
from core.errors import ModelError
from core.model_files import ModelFiles, resolve_model
from core.types import GenerationRequest, Role
from core.worker_settings import WorkerSettings
from engine.engine import Engine
from engine.model.load import load_model
from support.byte_tokenizer import EOS, VOCAB_SIZE
from support.grammars import save_byte_tokenizer
from support.pair import BLOCK, Pair, prompt, request, running_pair, tiny_config
from worker.engine_setup import block_bytes, build_engine
from worker.status import status_of


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of one vocabulary: the target, and another of half its width."""
    made = {}
    for seed, (name, width) in enumerate((("target", 64), ("other", 32))):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB_SIZE,
            hidden_size=width,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
            eos_token_id=EOS,
        )
        made[name] = tmp_path_factory.mktemp(name)
        LlamaForCausalLM(config).save_pretrained(made[name])
        save_byte_tokenizer(made[name])
    return made


def with_draft(folders: dict[str, Path], draft: str, **engine: Any) -> Any:
    speculative = f"{{method: draft_model, model: {folders[draft]}, num_tokens: 4}}"
    return tiny_config(folders["target"], speculative=speculative, **engine)


@pytest.fixture(params=["target", "other"])
async def pair(
    request: pytest.FixtureRequest, folders: dict[str, Path]
) -> AsyncIterator[tuple[Pair, str]]:
    decode = with_draft(folders, request.param, num_kv_blocks=20)
    async with running_pair(tiny_config(folders["target"]), decode) as pair:
        yield pair, request.param
        await pair.wait_idle()


async def test_outputs_equal_plain_decoding(pair: tuple[Pair, str], folders: Any) -> None:
    """Handed over, and through a pool that is too small for all outputs."""
    workers, draft = pair
    options: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.0, "max_tokens": 60},
        {"temperature": 1.0, "max_tokens": 60},
    ]
    requests = [
        request(prompt(24, seed=i), **{"max_tokens": 40, **option})
        for i, option in enumerate(options)
    ]
    answers = await asyncio.gather(*[workers.generate(r, timeout_s=60) for r in requests])
    status = status_of(workers.decode.runtime)
    assert status.speculative_method == "draft_model"
    assert status_of(workers.prefill.runtime).speculative_method == ""
    stats = await workers.decode.runtime.run_on_engine(lambda e: e.stats())
    assert stats.preemptions_total > 0
    if draft == "target":
        assert stats.tokens_draft_accepted_total == stats.tokens_drafted_total > 50
    else:
        assert stats.tokens_draft_accepted_total < stats.tokens_drafted_total
    await workers.wait_idle()
    assert [(a.tokens, a.finish_reason) for a in answers] == plain(folders["target"], requests)


def plain(folder: Path, requests: list[GenerationRequest]) -> list[Any]:
    """Tokens and finish reasons of one engine that does not guess."""
    model = load_model(ModelFiles("target", folder, "safetensors"), "float32")
    engine = Engine(model, EngineConfig(block_size=BLOCK), 128)
    for each in requests:
        engine.add(each)
    tokens: dict[str, list[int]] = {each.request_id: [] for each in requests}
    reasons = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None
            tokens[output.request_id] += output.token_ids
            reasons[output.request_id] = output.finish_reason
    return [(tokens[r.request_id], reasons[r.request_id]) for r in requests]


def settings_of(config: Any, role: Role, memory: int = 0) -> WorkerSettings:
    return WorkerSettings(worker_id="w", role=role, config=config, kv_memory_bytes=memory)


def test_the_drafts_kv_counts(folders: dict[str, Path]) -> None:
    files = resolve_model(str(folders["target"]))
    config = with_draft(folders, "other", num_kv_blocks="null", max_model_len=320)
    engine, model = build_engine(files, settings_of(config, Role.DECODE, 1 << 20), print)
    proposer: Any = engine._speculation and engine._speculation._proposer
    size = engine.kv_cache[0].nbytes + proposer.kv_cache[0].nbytes
    assert proposer.kv_cache[0].nbytes == 2 * 2 * 2 * BLOCK * 8 * 4
    assert engine.kv_cache.shape[0] == proposer.kv_cache.shape[0] == (1 << 20) // size
    # A worker that only reads prompts has no draft model.
    engine, model = build_engine(files, settings_of(config, Role.PREFILL, 1 << 20), print)
    assert engine._speculation is None
    assert engine.kv_cache.shape[0] == (1 << 20) // block_bytes(model, config.engine)


def test_another_vocabulary_is_refused_by_name(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "stranger"
    folder.mkdir()
    for file in folders["other"].iterdir():
        text = file.read_bytes()
        if file.name == "tokenizer.json":
            text = text.replace(b'"a"', b'"\\u00e4\\u00f6"')
        (folder / file.name).write_bytes(text)
    config = with_draft({**folders, "stranger": folder}, "stranger")
    with pytest.raises(ModelError, match="draft model stranger has another vocabulary than"):
        build_engine(resolve_model(str(folders["target"])), settings_of(config, Role.DECODE), print)
