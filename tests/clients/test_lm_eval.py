"""lm-eval's local-completions (loglikelihood by echo and logprobs) against a live deployment.

Its tokenizer is the server's own, by /tokenizer_info and /tokenize: nothing is fetched."""

from typing import Any

import pytest

from support.live import Live

pytestmark = pytest.mark.slow
MODEL = "smollm2-135m"
PAIRS = [
    ("The capital of France is", " Paris."),
    ("The capital of France is", " a banana."),
    ("Water is made of hydrogen and", " oxygen"),
    ("北京是中国的", "首都，人口超过两千万。"),
    ("", "Once upon a time there was a little girl."),
]


def language_model(server: Live, **fields: Any) -> Any:
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    return LocalCompletionsAPI(
        base_url=f"{server.url}/v1/completions", model=MODEL, max_retries=1, seed=1, **fields
    )


def instances(kind: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [
        Instance(request_type=kind, doc={}, arguments=pair, idx=index)
        for index, pair in enumerate(arguments)
    ]


@pytest.mark.parametrize("batch_size", [1, 3])
def test_loglikelihood_is_that_of_transformers(server: Live, batch_size: int) -> None:
    from support.reference import logprobs

    model = language_model(server, batch_size=batch_size)
    assert model.tokenizer_backend == "remote"
    scores = model.loglikelihood(instances("loglikelihood", PAIRS), disable_tqdm=True)
    for (context, continuation), (score, is_greedy) in zip(PAIRS, scores, strict=True):
        before, after = (
            model._encode_pair(context, continuation)
            if context
            else ([model.prefix_token_id], model.tok_encode(continuation))
        )
        rows = logprobs([*before, *after])[len(before) - 1 : -1]
        wanted = sum(float(row[token]) for row, token in zip(rows, after, strict=True))
        assert score == pytest.approx(wanted, abs=1e-3)
        best = [int(row.argmax()) for row in rows]
        assert is_greedy == (best == after)
    assert scores[0][0] > scores[1][0]


def test_requests_as_text(server: Live) -> None:
    """Without a tokenizer of its own it can still generate."""
    model = language_model(server, tokenizer_backend="None", tokenized_requests=False)
    arguments = ("The capital of France is", {"until": ["."], "max_gen_toks": 8})
    answers = model.generate_until(instances("generate_until", [arguments]), disable_tqdm=True)
    assert "Paris" in answers[0] and "." not in answers[0]


def test_rolling_loglikelihood(server: Live) -> None:
    model = language_model(server, max_length=32)
    text = "Once upon a time, in a small village, there lived a baker. " * 3
    scores = model.loglikelihood_rolling(
        instances("loglikelihood_rolling", [(text,)]), disable_tqdm=True
    )
    assert len(scores) == 1 and float(scores[0]) < 0
