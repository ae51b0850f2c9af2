"""One engine over a model whose output depends on what the paged cache holds."""

import pytest
import torch

from core.errors import RequestError
from core.types import FinishReason, KVBlockCounts
from support.mock_model import (
    B,
    MockModel,
    generate,
    is_idle,
    make_request,
    only,
    prompt_of,
    run_to_end,
)


def test_a_request_from_admission_to_its_end(make_engine):
    engine = make_engine()
    engine.add(make_request("r", prompt_of(6), max_tokens=3))
    assert engine.has_work()
    first = only(engine.step())
    assert first.admitted
    assert first.block_table is None
    assert (len(first.token_ids), first.num_computed_tokens) == (1, 6)
    second = only(engine.step())
    assert (second.admitted, second.finish_reason) == (False, None)
    third = only(engine.step())
    assert third.finish_reason is FinishReason.LENGTH
    assert is_idle(engine)
    assert engine.step() == []
    assert not engine.made_progress
    stats = engine.stats()
    assert (stats.tokens_prefilled_total, stats.tokens_decoded_total) == (6, 2)
    assert (stats.requests_running, stats.requests_waiting) == (0, 0)


@pytest.mark.parametrize("chunk", [1, 7, B, B + 1, 64])
@pytest.mark.parametrize("length", [1, B - 1, B, B + 1, 3 * B, 29])
def test_chunk_size_changes_nothing(make_engine, chunk, length):
    """V67: same tokens and logprobs, exactly one first token."""
    request = make_request("r", prompt_of(length), temperature=1.0, seed=3, logprobs=2)
    whole, chunked = make_engine(), make_engine(max_num_batched_tokens=chunk)
    results = []
    for engine in (whole, chunked):
        engine.add(request)
        outputs = [o for _ in range(60) for o in engine.step()]
        assert sum(o.admitted for o in outputs) == 1
        tokens = [token for o in outputs for token in o.token_ids]
        logprobs = [entry for o in outputs for entry in o.logprobs or ()]
        assert len(tokens) == len(logprobs) == 8
        results.append((tokens, logprobs))
    assert results[0] == results[1]


@pytest.mark.parametrize("length", [B - 1, B, B + 1, 2 * B, 2 * B + 1, 20])
def test_warm_equals_cold(make_engine, length):
    """V65: a prompt that is in the prefix cache, wholly or not, gives the same text."""
    engine = make_engine()
    cold = generate(engine, make_request("r", prompt_of(length)))
    prefilled = engine.stats().tokens_prefilled_total
    engine.add(make_request("r", prompt_of(length)))
    output = only(engine.step())
    expected_hit = (length - 1) // B * B
    assert output.num_cached_tokens == expected_hit
    assert engine.stats().tokens_prefilled_total - prefilled == length - expected_hit
    assert engine.stats().prefix_hit_tokens_total == expected_hit
    warm = run_to_end(engine)
    assert output.token_ids + warm["r"] == cold["r"]


def test_logits_are_made_only_where_a_token_is_sampled(make_engine):
    model = MockModel()
    engine = make_engine(model=model, max_num_batched_tokens=4)
    generate(engine, make_request("r", prompt_of(10), max_tokens=2))
    assert model.num_rows == [0, 0, 1, 1]


def test_outputs_are_cached_too(make_engine):
    engine = make_engine()
    prompt = prompt_of(6)
    answer = generate(engine, make_request("r", prompt, max_tokens=7))["r"]
    turn = [*prompt, *answer, 5, 6, 7]
    engine.add(make_request("r", turn))
    assert only(engine.step()).num_cached_tokens == 12  # the 13th token's KV was never made
    run_to_end(engine)


def test_salts_share_nothing(make_engine):
    engine = make_engine()
    prompt = prompt_of(13)
    hits = []
    for salt in ("", "a", "b", "a", ""):
        engine.add(make_request("r", prompt, cache_salt=salt))
        hits.append(only(engine.step()).num_cached_tokens)
        run_to_end(engine)
    assert hits == [0, 0, 0, 12, 12]


def test_without_prefix_caching_there_are_no_hits(make_engine):
    engine = make_engine(enable_prefix_caching=False)
    first = generate(engine, make_request("r", prompt_of(13)))
    assert generate(engine, make_request("r", prompt_of(13))) == first
    assert engine.stats().prefix_hit_tokens_total == 0
    assert engine.block_counts() == KVBlockCounts(total=64, free=64)


def test_stop_token_max_tokens_and_context_end_a_sequence(make_engine):
    """V17, V41: also when the token that ends it is the first."""
    engine = make_engine(max_model_len=16)
    tokens = generate(engine, make_request("r", prompt_of(5)))["r"]

    def run(prompt_length: int = 5, **sampling) -> tuple[list[int], FinishReason | None]:
        engine.add(make_request("r", prompt_of(prompt_length), **sampling))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        return [t for o in outputs for t in o.token_ids], outputs[-1].finish_reason

    assert run(max_tokens=1) == (tokens[:1], FinishReason.LENGTH)
    assert run(max_tokens=2) == (tokens[:2], FinishReason.LENGTH)
    assert run(stop_token_ids=(tokens[0],)) == (tokens[:1], FinishReason.STOP)
    assert run(stop_token_ids=(100, tokens[2])) == (tokens[:3], FinishReason.STOP)
    assert run(max_tokens=1, stop_token_ids=(tokens[0],)) == (tokens[:1], FinishReason.STOP)
    assert run(logit_bias={9: 100.0}, stop_token_ids=(9,)) == ([9], FinishReason.STOP)
    cut, reason = run(max_tokens=1000)
    assert (cut[:8], len(cut), reason) == (tokens, 11, FinishReason.LENGTH)
    assert len(run(prompt_length=15, max_tokens=1000)[0]) == 1
    banned, _ = run(min_tokens=2, stop_token_ids=(tokens[0],))
    assert tokens[0] not in banned[:2]


def test_the_context_is_the_smallest_of_three_limits(make_engine):
    model = MockModel(max_model_len=50)
    assert make_engine(64, model).max_model_len == 50
    assert make_engine(64, model, max_model_len=20).max_model_len == 20
    assert make_engine(64, model, max_model_len=80).max_model_len == 50
    assert make_engine(5, model).max_model_len == 20


def test_a_sequence_may_fill_the_whole_pool(make_engine):
    engine = make_engine(5, max_model_len=500)
    tokens = generate(engine, make_request("r", prompt_of(18), max_tokens=99))["r"]
    assert len(tokens) == 2


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        (make_request("r", prompt_of(32)), "prompt"),
        (make_request("r", prompt_of(20), output=prompt_of(12), max_tokens=99), "prompt"),
        (make_request("r", []), "prompt"),
        (make_request("r", [5, 101]), "prompt"),
        (make_request("r", [-1]), "prompt"),
        (make_request("r", [5], logit_bias={101: 1.0}), "logit_bias"),
        (make_request("r", [5], logit_bias={-1: 1.0}), "logit_bias"),
        (make_request("r", [5], logit_bias={1: float("nan")}), "logit_bias"),
        (make_request("r", [5], temperature=float("nan")), "temperature"),
        (make_request("r", [5], temperature=-1.0), "temperature"),
        (make_request("r", [5], temperature=float("inf")), "temperature"),
        (make_request("r", [5], repetition_penalty=0.0), "repetition_penalty"),
        (make_request("r", [5], presence_penalty=float("nan")), "presence_penalty"),
        (make_request("r", [5], frequency_penalty=float("inf")), "frequency_penalty"),
        (make_request("r", [5], logprobs=-1), "logprobs"),
        (make_request("r", [5], max_tokens=0), "max_tokens"),
        (make_request("r", [5], output=[1, 2], max_tokens=2), "max_tokens"),
        (make_request("busy", [5]), "request_id"),
    ],
)
def test_what_cannot_be_computed_is_refused(make_engine, request_, param):
    """V34, V41: and the engine goes on."""
    engine = make_engine(max_model_len=32)
    engine.add(make_request("busy", prompt_of(31)))
    for add in (engine.add, engine.add_prefill, engine.add_remote):
        with pytest.raises(RequestError) as caught:
            add(request_)
        assert caught.value.param == param
    assert len(run_to_end(engine)["busy"]) == 1


def test_a_resumed_request_goes_on_as_if_it_had_not_stopped(make_engine):
    sampling = {
        "temperature": 1.0,
        "seed": 7,
        "presence_penalty": 0.5,
        "repetition_penalty": 1.2,
        "max_tokens": 10,
    }
    whole = generate(make_engine(), make_request("r", prompt_of(9), **sampling))["r"]
    for count in (1, 4, 9):
        request = make_request("r", prompt_of(9), output=whole[:count], **sampling)
        assert generate(make_engine(), request)["r"] == whole[count:]


def test_the_kv_cache_is_one_piece_that_never_moves(make_engine):
    engine = make_engine()
    address = engine.kv_cache.data_ptr()
    assert engine.kv_cache.is_contiguous()
    assert engine.kv_cache.shape == (64, 1, 2, 1, B, 1)
    generate(engine, make_request("r", prompt_of(9)))
    assert engine.kv_cache.data_ptr() == address
    assert isinstance(engine.kv_cache, torch.Tensor)
    assert not engine.kv_cache.is_inference()  # transports may write into it
