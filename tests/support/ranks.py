"""Ranks of one tensor-parallel model in one process, a thread each: real gloo over loopback."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from core.model_files import ModelFiles
from engine.model.load import load_model
from engine.parallel import RankGroup, TensorParallel, run_follower

HOST = "127.0.0.1"


def make_groups(size: int, pool: ThreadPoolExecutor) -> list[RankGroup]:
    listener = socket.create_server((HOST, 0))
    address = f"{HOST}:{listener.getsockname()[1]}"

    def join(rank: int) -> RankGroup:
        listen_fd = listener.detach() if rank == 0 else None
        return RankGroup(rank, size, address, HOST, listen_fd=listen_fd)

    return list(pool.map(join, range(size)))


@contextmanager
def sharded(
    files: ModelFiles, size: int, num_blocks: int, block_size: int, **options: Any
) -> Iterator[TensorParallel]:
    """The model of rank 0, whose followers run until the end of the body."""
    with ThreadPoolExecutor(size) as pool:
        groups = make_groups(size, pool)

        def load(group: RankGroup) -> Any:
            return load_model(files, ranks=group, **options)

        decoders = list(pool.map(load, groups))
        for decoder in decoders[1:]:
            shape = (num_blocks, *decoder.kv_block_shape(block_size))
            decoder.bind(torch.zeros(shape, dtype=decoder.kv_dtype))
        runs = [
            pool.submit(run_follower, decoder, group)
            for decoder, group in zip(decoders[1:], groups[1:], strict=True)
        ]
        model = TensorParallel(decoders[0], groups[0])
        try:
            yield model
        finally:
            model.close()
            for run in runs:
                run.result(timeout=20)
