"""A hand-over of latent KV: one row a token, plain and quantised."""

from pathlib import Path

import pytest

from support.pair import BLOCK, prompt, request, running_pair, tiny_config
from support.tiny_models import make_tiny, save_tiny


@pytest.mark.parametrize(("kind", "row_bytes"), [("auto", 4 * 40), ("fp8_e4m3", 48)])
async def test_equals_one_worker(tmp_path: Path, kind: str, row_bytes: int) -> None:
    files = save_tiny(make_tiny("deepseek-v3", vocab_size=256), tmp_path)
    config = tiny_config(files.path, kv_cache_dtype=kind)
    transfer = config.kv_transfer.model_copy(update={"transport": "grpc"})
    async with running_pair(config.model_copy(update={"kv_transfer": transfer})) as pair:
        assert pair.decode.info.kv_block_bytes == 3 * BLOCK * row_bytes  # of three layers
        for length in (1, BLOCK, 50):
            handed = await pair.generate(request(prompt(length), cache_salt="a"))
            warm = await pair.generate(request(prompt(length), cache_salt="a"))
            alone = await pair.alone(request(prompt(length), cache_salt="b"))
            assert handed.error is None and warm.error is None and alone.error is None
            assert handed.tokens == warm.tokens == alone.tokens
            assert handed.decode_started is not None
            num_blocks = -(-length // BLOCK)
            assert handed.decode_started.kv_bytes == num_blocks * pair.decode.info.kv_block_bytes
        await pair.wait_idle()
