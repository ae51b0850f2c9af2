"""Hand-overs between workers whose KV blocks have different shapes, against one worker alone."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from core.config import Config
from core.errors import ConfigError, CorruptBlockError
from support.pair import Pair, disturb, prompt, request, running_pair, tiny_config
from support.tiny_models import VOCAB, make_tiny, save_tiny


def over(transport: str, config: Config) -> Config:
    transfer = config.kv_transfer.model_copy(update={"transport": transport})
    return config.model_copy(update={"kv_transfer": transfer})


async def generate_both(pair: Pair, length: int, **options: Any) -> tuple[list[int], list[int]]:
    tokens = [token % VOCAB for token in prompt(length)]
    handed = await pair.generate(request(tokens, cache_salt="a", **options))
    alone = await pair.alone(request(tokens, cache_salt="b", **options))
    assert handed.error is None and alone.error is None, handed.error
    return handed.tokens, alone.tokens


@pytest.mark.parametrize(
    ("ours", "theirs", "kv", "transport"),
    [
        (8, 16, "auto", "nixl"),
        (16, 8, "int8", "grpc"),
        (4, 32, "fp8_e4m3", "grpc"),
        (32, 4, "int8", "nixl"),
    ],
)
async def test_block_sizes_of_which_one_divides_the_other(
    tiny_model_dir: Path, ours: int, theirs: int, kv: str, transport: str
) -> None:
    """Cold, then with what D has of the prefix: that ends in the middle of a larger block of P."""
    configs = [
        over(transport, tiny_config(tiny_model_dir, block_size=size, kv_cache_dtype=kv))
        for size in (ours, theirs)
    ]
    async with running_pair(*configs) as pair:
        for length in (1, 17, 40, 57, 96):
            for _ in range(2):
                handed, alone = await generate_both(pair, length)
                assert handed == alone
        stats = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
        assert pair.decode.runtime.transfers_ok == 10
        assert stats.tokens_prefilled_total < 2 * (1 + 17 + 40 + 57 + 96)  # of the oracle's
        await pair.wait_idle()


async def test_a_held_prefix_is_not_sent_again(tiny_model_dir: Path) -> None:
    configs = [over("grpc", tiny_config(tiny_model_dir, block_size=size)) for size in (32, 8)]
    async with running_pair(*configs) as pair:
        for held in (0, 40):  # 5 of D's blocks, one of P's and a part of another
            answer = await pair.generate(request(prompt(44)))
            assert answer.decode_started is not None
            token_bytes = int(pair.decode.info.kv_block_bytes) // 8
            sent = 64 - held  # to the end of P's last block
            assert answer.decode_started.num_cached_tokens == held
            assert answer.decode_started.kv_bytes == min(sent, 48 - held) * token_bytes
        await pair.wait_idle()


@pytest.mark.parametrize(("ours", "theirs"), [(8, 16), (16, 8)])
async def test_a_flipped_byte_in_a_piece_is_never_decoded(
    tiny_model_dir: Path, ours: int, theirs: int
) -> None:
    """V24"""
    configs = [over("grpc", tiny_config(tiny_model_dir, block_size=n)) for n in (ours, theirs)]
    async with running_pair(*configs) as pair:
        shim = disturb(pair)

        def flip(kv_cache: Any, local: list[int]) -> None:
            kv_cache[local[0]].view(-1)[3] += 1

        shim.after = flip
        answer = await pair.generate(request(prompt(40)))
        assert any(isinstance(error, CorruptBlockError) for error in answer.errors)
        await pair.wait_idle()
        shim.after = None
        assert (await pair.generate(request(prompt(40)))).error is None


async def test_compressed_on_the_wire(tiny_model_dir: Path) -> None:
    """zstd with checksums, and between blocks of different sizes."""
    configs = []
    for size in (16, 8):
        config = over("grpc", tiny_config(tiny_model_dir, block_size=size))
        transfer = config.kv_transfer.model_copy(update={"compression": "zstd"})
        configs.append(config.model_copy(update={"kv_transfer": transfer}))
    async with running_pair(*configs) as pair:
        handed, alone = await generate_both(pair, 50)
        assert handed == alone
        await pair.wait_idle()


async def test_int8_on_the_wire_needs_bfloat16(tiny_model_dir: Path) -> None:
    config = over("grpc", tiny_config(tiny_model_dir))
    lossy = {"compression": "int8", "checksum": False}
    transfer = config.kv_transfer.model_copy(update=lossy)
    config = config.model_copy(update={"kv_transfer": transfer})
    with pytest.raises(ConfigError, match="int8 is for KV in bfloat16, .* it is in float32"):
        async with running_pair(config):
            pass
    config = over("grpc", tiny_config(tiny_model_dir, kv_cache_dtype="bf16"))
    async with running_pair(config.model_copy(update={"kv_transfer": transfer})) as pair:
        handed, _ = await generate_both(pair, 50)
        assert len(handed) == 12
        await pair.wait_idle()


# ------------------------------------------------------------------ latents, sliding windows


@pytest.mark.parametrize("family", ["deepseek-v2-lite", "gemma3", "mistral"])
@pytest.mark.parametrize(("ours", "theirs"), [(8, 8), (16, 4)])
async def test_families_whose_blocks_are_special(
    tmp_path: Path, family: str, ours: int, theirs: int
) -> None:
    save_tiny(make_tiny(family), tmp_path)
    configs = [over("grpc", tiny_config(tmp_path, block_size=size)) for size in (ours, theirs)]
    async with running_pair(*configs) as pair:
        for length in (3, 16, 50):
            for _ in range(2):
                handed, alone = await generate_both(pair, length)
                assert handed == alone
        await pair.wait_idle()


async def test_a_window_sends_only_what_is_still_seen(tmp_path: Path) -> None:
    """gemma3: two of three layers see 8 tokens back. What is left out is never found by others,
    and a preempted sequence computes it again."""
    save_tiny(make_tiny("gemma3"), tmp_path)
    config, small = (
        over("grpc", tiny_config(tmp_path, block_size=4, num_kv_blocks=count)) for count in (64, 22)
    )
    async with running_pair(config, small) as pair:
        tokens = [token % VOCAB for token in prompt(40)]
        first = await pair.generate(request(tokens, cache_salt="a"))
        assert first.decode_started is not None
        block_bytes = int(pair.decode.info.kv_block_bytes)
        # The next query, at 40, sees 33..40: blocks 8 and 9 whole, of the others one layer.
        assert first.decode_started.kv_bytes == 2 * block_bytes + 8 * block_bytes // 3
        again = await pair.generate(request(tokens, cache_salt="a"))
        assert again.decode_started is not None
        assert again.decode_started.num_cached_tokens == 0  # an incomplete block is no prefix
        # Computed here they are whole, and found.
        alone = await pair.alone(request(tokens, cache_salt="a"))
        warm = await pair.generate(request(tokens, cache_salt="a"))
        assert warm.decode_started is not None and warm.decode_started.num_cached_tokens == 40
        assert first.tokens == again.tokens == warm.tokens == alone.tokens

        requests = [request(tokens, max_tokens=30, cache_salt=f"p{i}") for i in range(3)]
        answers = await asyncio.gather(*[pair.generate(r, timeout_s=60) for r in requests])
        stats = await pair.decode.runtime.run_on_engine(lambda e: e.stats())
        assert stats.preemptions_total > 0
        oracle = await pair.alone(request(tokens, max_tokens=30, cache_salt="o"))
        assert [a.tokens for a in answers] == [oracle.tokens] * 3
        await pair.wait_idle()
