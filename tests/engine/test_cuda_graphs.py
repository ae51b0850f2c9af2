"""Padded decode steps on fixed buffers, on a CPU: what would be captured is run as it is. In
float32 the answers must be those of the plain steps, token for token."""

import random

import pytest
import torch

from core.config import EngineConfig
from core.model_files import ModelFiles
from engine.attention import flashinfer_paged
from engine.attention.base import StepBatch
from engine.cuda_graphs import DecodeGraphs, graph_sizes
from engine.engine import Engine
from engine.model.load import load_model
from support import fake_flashinfer
from support.mock_model import block_table_of, make_request, run_to_end

BLOCK, NUM_BLOCKS, MAX_SEQS = 4, 60, 11


@pytest.fixture(autouse=True)
def flashinfer_on_the_cpu(monkeypatch):
    monkeypatch.setattr(flashinfer_paged, "why_not", lambda *a: "")
    monkeypatch.setattr(flashinfer_paged, "load", lambda: fake_flashinfer)


class Recorder:
    """Stands for the capture of a graph; counts replays by the order of capture."""

    def __init__(self):
        self.replays = []

    def __call__(self, run):
        run()
        self.replays.append(0)
        index = len(self.replays) - 1

        def replay():
            self.replays[index] += 1
            run()

        return replay


def make_engine(folder, attention="flashinfer", with_graphs=True, **config):
    model = load_model(ModelFiles("tiny", folder, "safetensors"), "float32", attention=attention)
    capture = Recorder()
    graphs = None
    if with_graphs:
        graphs = DecodeGraphs(
            model, MAX_SEQS, 40, NUM_BLOCKS, torch.device("cpu"), capture
        )  # fmt: skip
    config = EngineConfig(
        block_size=BLOCK, max_num_seqs=MAX_SEQS, max_num_batched_tokens=24, **config
    )
    return Engine(model, config, NUM_BLOCKS, graphs=graphs), capture


def requests(count, seed=0):
    rng = random.Random(seed)
    return [
        make_request(
            f"r{i}",
            [rng.randrange(256) for _ in range(rng.randint(1, 20))],
            max_tokens=rng.randint(1, 14),
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=i,
            logprobs=rng.choice([None, 2]),
        )
        for i in range(count)
    ]


def test_sizes_are_dense_where_padding_costs_most():
    assert graph_sizes(1) == [1]
    assert graph_sizes(6) == [1, 2, 4, 6]
    assert graph_sizes(11) == [1, 2, 4, 8, 11]
    assert graph_sizes(64) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64]
    assert graph_sizes(130) == [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128, 130]


@pytest.mark.parametrize("seed", range(2))
def test_tokens_are_those_of_plain_steps(tiny_model_dir, seed):
    tokens = []
    for attention, with_graphs in (("torch", False), ("flashinfer", False), ("flashinfer", True)):
        engine, capture = make_engine(tiny_model_dir, attention, with_graphs)
        for request in requests(9, seed):
            engine.add(request)
        tokens.append(run_to_end(engine))
        if with_graphs:
            assert sum(capture.replays) > 5
            assert sum(count > 0 for count in capture.replays) >= 2  # several sizes had a turn
    assert tokens[0] == tokens[1] == tokens[2]


def test_dummies_write_their_own_block_alone(tiny_model_dir):
    engine, capture = make_engine(tiny_model_dir)
    cache = engine.model._bound()._cache
    assert cache.shape[0] == NUM_BLOCKS + 1
    assert engine.kv_cache.shape[0] == engine.block_counts().total == NUM_BLOCKS
    assert engine.kv_cache.data_ptr() == cache.data_ptr()
    assert engine.kv_cache.is_contiguous()
    assert not engine.kv_cache.any()  # capturing wrote into the dummy block
    assert cache[NUM_BLOCKS].any()
    for i in range(3):
        engine.add(make_request(f"r{i}", [i + 1] * 4, max_tokens=4))
    engine.step()
    before = engine.kv_cache.clone()
    engine.step()  # 3 sequences, padded to 4
    assert capture.replays == [0, 0, 1, 0, 0]  # 11, 8, 4, 2, 1
    changed = (engine.kv_cache != before).flatten(1).any(1).nonzero().flatten().tolist()
    owned = {block_table_of(engine, f"r{i}")[1] for i in range(3)}
    assert set(changed) == owned


def test_a_full_pool_never_hands_out_the_dummy_block(tiny_model_dir):
    engine, _ = make_engine(tiny_model_dir)
    for i in range(11):
        engine.add(make_request(f"r{i}", [i + 1] * 17, max_tokens=60))
    seen = set()
    for _ in range(40):
        engine.step()
        for seq in engine.scheduler.running:
            seen |= set(seq.block_table)
    assert len(seen) > 50 and max(seen) < NUM_BLOCKS


def test_only_plain_decode_steps_fit(tiny_model_dir):
    engine, _ = make_engine(tiny_model_dir)
    fits = engine._graphs.fits
    tables = [[0], [1], [2]]
    assert fits(StepBatch([1, 1, 1], [2, 3, 4], tables, 3))
    assert not fits(StepBatch([1, 1, 3], [2, 3, 4], tables, 2))  # guesses, or a prompt
    assert not fits(StepBatch([1, 1, 1], [2, 3, 1], tables, 2))  # a prompt of one token
    assert not fits(StepBatch([1] * 12, [2] * 12, [[0]] * 12, 12))


def test_guesses_run_beside_graphs(tiny_model_dir):
    speculative = {"method": "ngram", "num_tokens": 3}
    prompt = [5, 6, 7, 8] * 4
    tokens = []
    for with_graphs in (False, True):
        engine, _ = make_engine(tiny_model_dir, with_graphs=with_graphs, speculative=speculative)
        for i in range(3):
            engine.add(make_request(f"r{i}", prompt[i:], max_tokens=20))
        tokens.append(run_to_end(engine))
        assert engine.stats().tokens_drafted_total > 0
    assert tokens[0] == tokens[1]


def test_a_model_that_cannot_be_captured_runs_as_it_is(tiny_model_dir):
    engine, capture = make_engine(tiny_model_dir, attention="torch")
    engine.add(make_request("r", [1, 2, 3], max_tokens=5))
    assert len(run_to_end(engine)["r"]) == 5
    assert capture.replays == []
