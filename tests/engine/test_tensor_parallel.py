"""Models cut among ranks against the whole ones, in float32, on tiny random weights."""

from pathlib import Path

import pytest
import torch

from support.ranks import sharded
from support.tiny_models import (
    FAMILY_CONFIGS,
    PagedRunner,
    make_tiny,
    random_ids,
    reference_logits,
    save_tiny,
)


@pytest.mark.parametrize("family", FAMILY_CONFIGS)
@pytest.mark.parametrize("size", [2, 4])
def test_logits_equal_transformers(family: str, size: int, tmp_path: Path) -> None:
    reference = make_tiny(family)
    files = save_tiny(reference, tmp_path)
    ids = random_ids(30)
    with sharded(files, size, 96, 4, dtype="float32") as (model, _):
        logits = PagedRunner(model).chunks(ids, [1, 7, 4, 5, 8])
    torch.testing.assert_close(logits, reference_logits(reference, ids), atol=2e-4, rtol=1e-4)
