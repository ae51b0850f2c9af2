"""Fixtures that every part of the suite may use."""

import os
from pathlib import Path

import pytest

os.environ["PDSERVE_DEBUG"] = "1"  # engines check their books whenever they are idle


# With pytest-xdist (`make test`), a file's tests run in one process, in their order; all that
# starts deployments or looks at the whole machine (processes, shared memory) in one and the same.
ONE_AT_A_TIME = ("e2e", "cluster", "cli", "k8s")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tells pytest-xdist which tests belong to one process."""
    for item in items:
        name, _, rest = item.nodeid.removeprefix("tests/").partition("/")
        alone = name in ONE_AT_A_TIME
        group = "deployments" if alone else item.nodeid.partition("::")[0]
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: item.get_closest_marker("xdist_group").args[0] != "deployments")


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with random weights, small enough that a step takes a millisecond."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        initializer_range=0.2,  # wide, so that greedy choices are far from ties
    )
    folder = tmp_path_factory.mktemp("tiny-llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
