"""Fixtures that every part of the suite may use."""

import os
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

os.environ["PDSERVE_DEBUG"] = "1"  # engines check their books whenever they are idle


# All that starts deployments or looks at the whole machine (processes, shared memory) runs in one
# process of pytest-xdist (`make test`), one after another.
ONE_AT_A_TIME = ("tests/cli/", "tests/cluster/", "tests/e2e/", "tests/k8s/")


class Scheduling(LoadScopeScheduling):
    """A file's tests run in one process, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "deployments" if file.startswith(ONE_AT_A_TIME) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Scheduling:
    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest, the deployments, begin at once."""
    items.sort(key=lambda item: not item.nodeid.startswith(ONE_AT_A_TIME))


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
