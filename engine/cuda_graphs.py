"""Decode steps as CUDA graphs: a step of one token a sequence is hundreds of small kernels, which
a CPU launches slower than a GPU runs them. A graph launches all of them at once.

    sequences of the step    5, padded to the next size that was captured, 8
    input_ids, positions     their own and 3 dummies': token 0 at position 0
    block tables             their own and 3 x [dummy block]
    logits                   rows 0 ... 4 of 8
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from engine.attention.base import StepBatch
from engine.staging import Staging
from engine.step import StepInputs
from engine.types import Model

logger = logging.getLogger(__name__)

Replay = Callable[[], None]
# Runs something twice or more, and returns what does the same again on the same memory.
Capture = Callable[[Callable[[], None]], Replay]

_SMALL, _MEDIUM = 8, 64
# Of each size: the index buffers of the attention's wrappers, and what the graph itself takes.
BYTES_PER_SIZE = 24 << 20


class CapturableModel(Model, Protocol):
    """`plan` and then `compute` are `forward`. With batches `for_graph`, `compute` is the same
    work on the same memory after every plan of one size."""

    @property
    def can_capture(self) -> bool: ...

    def reserve_for_graphs(self, max_sequences: int, max_blocks: int) -> None: ...

    def plan(self, batch: StepBatch) -> None: ...

    def compute(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor
    ) -> torch.Tensor: ...


def graph_sizes(max_num_seqs: int) -> list[int]:
    """Batch sizes worth a graph: dense where a dummy costs a large share of a step."""
    sizes = {size for size in (1, 2, 4, _SMALL) if size < max_num_seqs}
    sizes |= set(range(_SMALL, min(_MEDIUM, max_num_seqs), 8))
    sizes |= set(range(_MEDIUM, max_num_seqs, 32))
    return sorted({*sizes, max_num_seqs})


class DecodeGraphs:
    """Owns the graphs, and the memory that they read and write.

    - `dummy_block` belongs to nobody: it is in the KV cache that the model is bound to, and not
      in the block pool. Dummies write and read it alone.
    - Only steps in which every sequence decodes one token fit. Prompts, guesses and whatever
      else has another shape run as they are.
    """

    def __init__(
        self,
        model: CapturableModel,
        max_num_seqs: int,
        max_blocks_per_sequence: int,
        dummy_block: int,
        device: torch.device,
        capture: Capture | None = None,
    ) -> None:
        self._model, self._dummy_block, self._device = model, dummy_block, device
        self._max_num_seqs = max_num_seqs
        self._max_blocks = max_num_seqs * max_blocks_per_sequence
        self._capture = capture or CudaCapture()
        self._staging = Staging(device, torch.int64, 2 * max_num_seqs)
        self._inputs = torch.zeros(2 * max_num_seqs, dtype=torch.int64, device=device)
        self._rows = torch.arange(max_num_seqs, device=device)
        self._logits = torch.empty(0)
        self._sizes: list[int] = []
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def capture_all(self) -> None:
        """Once, after the model was bound. Does nothing for a model that cannot be captured."""
        if not self._model.can_capture:
            logger.info("decode steps run without CUDA graphs: this model cannot be captured")
            return
        started = time.monotonic()
        vocab_size = self._model.config.vocab_size
        self._logits = torch.zeros(self._max_num_seqs, vocab_size, device=self._device)
        self._model.reserve_for_graphs(self._max_num_seqs, self._max_blocks)
        sizes = graph_sizes(self._max_num_seqs)
        for size in reversed(sizes):  # the largest first: the others fit into its memory
            self._model.plan(self._padded(StepBatch([], [], [], 0), size))
            self._replays[size] = self._capture(partial(self._compute, size))
        self._sizes = sizes
        logger.info(
            "CUDA graphs for %d batch sizes up to %d, made in %.1f s",
            len(sizes), sizes[-1], time.monotonic() - started,
        )  # fmt: skip

    def fits(self, batch: StepBatch) -> bool:
        count = len(batch.query_lens)
        return bool(self._sizes) and count == batch.num_decodes and count <= self._sizes[-1]

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Logits `[sequences, vocab_size]` of a batch that fits, one row a sequence in order;
        valid until the next call."""
        count = len(inputs.input_ids)
        size = next(size for size in self._sizes if size >= count)
        dummies = [0] * (size - count)
        self._model.plan(self._padded(inputs.batch, size))
        self._staging.write(self._inputs, inputs.input_ids + dummies, inputs.positions + dummies)
        self._replays[size]()
        return self._logits[:count]

    def _compute(self, size: int) -> None:
        input_ids, positions = self._inputs[:size], self._inputs[size : 2 * size]
        logits = self._model.compute(input_ids, positions, self._rows[:size])
        self._logits[:size].copy_(logits)

    def _padded(self, batch: StepBatch, size: int) -> StepBatch:
        missing = size - len(batch.query_lens)
        tables: Sequence[list[int]] = [[self._dummy_block]] * missing
        return StepBatch(
            query_lens=[1] * size,
            seq_lens=batch.seq_lens + [1] * missing,
            block_tables=[*batch.block_tables, *tables],
            num_decodes=size,
            for_graph=True,
        )


class CudaCapture:
    """Captures graphs that share their memory: only one of them runs at a time."""

    _WARM_UPS = 2  # compile kernels, make workspaces: not while a graph is recorded

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Callable[[], None]) -> Replay:
        here, aside = torch.cuda.current_stream(), torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):
            for _ in range(self._WARM_UPS):
                run()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        # Other threads may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph.replay
