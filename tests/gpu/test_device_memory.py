"""KV blocks in a GPU's memory: how many, and how they leave and enter it."""

import numpy as np
import pytest
import torch

from core.config import EngineConfig
from engine.engine import Engine
from engine.model.load import load_model
from kv_transfer.base import Peer
from kv_transfer.checksum import block_checksums
from kv_transfer.cuda_stage import CudaStage
from support.mock_model import block_table_of, make_request, run_to_end
from support.tiny_models import make_tiny, random_ids, save_tiny
from worker.engine_setup import gpu_kv_memory, run_largest_step

BLOCK = 16


def test_the_stated_share_of_memory_is_not_passed(device, tmp_path):
    model = load_model(save_tiny(make_tiny("llama"), tmp_path), "bfloat16", device=str(device))
    config = EngineConfig(block_size=BLOCK, gpu_memory_utilization=0.5, max_model_len=256)
    budget = gpu_kv_memory(model, config, has_graphs=False)
    free, total = torch.cuda.mem_get_info()
    assert 0 < budget < 0.5 * total
    cache = torch.zeros(budget, dtype=torch.uint8, device=device)
    run_largest_step(model, config, device)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    assert (total - free) / total < 0.51
    del cache
    torch.cuda.empty_cache()


def test_blocks_pass_through_the_stage_as_they_are(device):
    blocks = torch.randint(0, 256, (9, 4096), dtype=torch.uint8)
    cache = blocks.to(device)
    stage = CudaStage(cache)
    assert bytes(stage.read([(5, 100), (4096, 8192)])) == bytes(
        np.concatenate([blocks.view(-1).numpy()[5:100], blocks[1].numpy()])
    )
    assert np.array_equal(stage.read_blocks([3, 0]), blocks[[3, 0]].numpy())
    stage.write(2 * 4096 + 7, np.arange(50, dtype=np.uint8))
    assert cache[2, 7:57].tolist() == list(range(50))
    assert block_checksums(cache, range(9)) == block_checksums(cache.cpu(), range(9))


def test_a_stage_waits_for_no_step(device):
    """A copy comes back while a long queue of work is still running on the engine's stream."""
    blocks = torch.ones(4, 1 << 20, dtype=torch.uint8, device=device)
    stage = CudaStage(blocks)
    stage.read_blocks([0])
    a = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    for _ in range(200):
        a = (a @ a).clamp(-1, 1)
    done = torch.cuda.Event()
    done.record()
    assert stage.read_blocks([1, 2]).all()
    assert not done.query()
    torch.cuda.synchronize()


async def test_nixl_pulls_from_memory_of_one_gpu_into_another_part_of_it(device):
    nixl = pytest.importorskip("kv_transfer.nixl_transport")
    pytest.importorskip("nixl")
    source = torch.randint(0, 256, (32, 65536), dtype=torch.uint8, device=device)
    target = torch.zeros_like(source)
    owner = nixl.NixlTransfer(source, "prefill-0", "p")
    puller = nixl.NixlTransfer(target, "decode-0", "d")
    try:
        peer = Peer("prefill-0", "p", "", owner.offer())
        await puller.pull(peer, "r", [3, 9, 30], [0, 5, 31])
        torch.cuda.synchronize()
        assert torch.equal(target[[0, 5, 31]], source[[3, 9, 30]])
        assert not target[[1, 2, 4, 6, 30]].any()
    finally:
        await puller.close()
        await owner.close()


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
def test_a_hand_over_in_one_process_gives_the_tokens_of_one_engine(
    kv_cache_dtype, device, tmp_path
):
    files = save_tiny(make_tiny("llama"), tmp_path)
    prompt = random_ids(50)

    def engine():
        model = load_model(files, "float32", device=str(device), kv_cache_dtype=kv_cache_dtype)
        return Engine(model, EngineConfig(block_size=BLOCK), 32, str(device))

    alone = engine()
    alone.add(make_request("r", prompt, max_tokens=12))
    expected = run_to_end(alone)["r"]
    prefill, decode = engine(), engine()
    prefill.add_prefill(make_request("r", prompt, max_tokens=12))
    first = [output for output in prefill.step() if output.token_ids]
    decode.add_remote(make_request("r", prompt, max_tokens=12))
    decode.step()
    theirs, ours = block_table_of(prefill, "r"), block_table_of(decode, "r")
    assert len(theirs) == len(ours) == 4
    decode.kv_cache[ours] = prefill.kv_cache[theirs]
    decode.start_decode("r", first[0].token_ids[0])
    prefill.release("r")
    assert [first[0].token_ids[0], *run_to_end(decode)["r"]] == expected
