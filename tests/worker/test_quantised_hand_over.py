"""A hand-over of quantised blocks: the scales travel inside them."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from core.config import Config
from core.errors import IncompatiblePeerError
from support.pair import BLOCK, Pair, request, running_pair, tiny_config


def prompt(length: int) -> list[int]:
    rng = random.Random(length)
    return [rng.randrange(256) for _ in range(length)]


def over_grpc(config: Config) -> Config:
    transfer = config.kv_transfer.model_copy(update={"transport": "grpc"})
    return config.model_copy(update={"kv_transfer": transfer})


@pytest.fixture(params=[("int8", "none"), ("fp8_e4m3", "int8"), ("bf16", "int4")])
async def pair(request: pytest.FixtureRequest, tiny_model_dir: Path) -> AsyncIterator[Pair]:
    kv, weights = request.param
    config = tiny_config(tiny_model_dir, kv_cache_dtype=kv, quantization=weights)
    async with running_pair(over_grpc(config)) as pair:
        yield pair
        await pair.wait_idle()


async def test_equals_one_worker(pair: Pair) -> None:
    for length in (1, BLOCK, 50):
        handed = await pair.generate(request(prompt(length), cache_salt="a"))
        alone = await pair.alone(request(prompt(length), cache_salt="b"))
        assert handed.error is None and alone.error is None
        assert handed.tokens == alone.tokens
        assert handed.decode_started is not None
        blocks = -(-length // BLOCK)
        assert handed.decode_started.kv_bytes == blocks * pair.decode.info.kv_block_bytes


async def test_int8_blocks_are_smaller(tiny_model_dir: Path) -> None:
    config = over_grpc(tiny_config(tiny_model_dir, kv_cache_dtype="int8"))
    async with running_pair(config) as pair:
        # 2 layers, keys and values, 2 heads of 16 numbers and a scale
        assert pair.decode.info.kv_block_bytes == 2 * 2 * 2 * BLOCK * (16 + 4)


@pytest.mark.parametrize(
    ("key", "ours", "theirs", "named"),
    [
        ("kv_cache_dtype", "int8", "fp8_e4m3", "kv_format"),
        ("quantization", "none", "int8", "quantization"),
    ],
)
async def test_other_quantisation_is_refused(
    tiny_model_dir: Path, key: str, ours: str, theirs: str, named: str
) -> None:
    configs = [over_grpc(tiny_config(tiny_model_dir, **{key: value})) for value in (theirs, ours)]
    async with running_pair(*configs) as pair:
        answer = await pair.generate(request(prompt(20)))
        assert isinstance(answer.error, IncompatiblePeerError)
        assert named in str(answer.error)
        await pair.wait_idle()
