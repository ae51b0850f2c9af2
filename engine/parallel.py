"""Tensor parallelism: the processes of one worker, and what passes between them in a step.

Rank 0 is the worker: it has the scheduler, the sampler and the block pool. The others follow. They
hold their part of the weights and of every KV block, under the same block ids, and do nothing but
run the forward that rank 0 announces:

    rank 0      TensorParallel.forward: encode the step -> broadcast -> Decoder.forward
    the others  run_follower:           receive -> decode the step   -> Decoder.forward

and inside Decoder.forward all of them meet: a sum after the embedding, after each attention and
after each MLP, and a gathering of the logits at rank 0 (`engine.model.sharding` has the cuts).

A step is one int64 tensor on the CPU, over gloo also where the model is on GPUs; what is summed
goes over NCCL there. Process groups are objects with an owner, never torch's global ones.
"""

import datetime
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Protocol

import torch
import torch.distributed as dist

from core.errors import RankLostError
from engine.attention.base import StepBatch
from engine.types import Model, ModelLimits, PooledModel

logger = logging.getLogger(__name__)

_JOIN_S = 300.0  # processes start, import torch and meet
_STEP_S = 120.0  # the longest wait of a rank for another inside a step
# Between steps a follower waits as long as it takes: what ends the wait is a closed socket.
_NO_DEADLINE = datetime.timedelta(days=3650)
# Numbers in the first message of a step, and all of it in most; a longer one has a second message.
_FIRST_MESSAGE = 1024


class StepKind(IntEnum):
    """What followers are to do."""

    STOP = 0
    FORWARD = 1
    HIDDEN_STATES = 2  # the same step, up to the final hidden states
    LOGITS = 3  # of the first so many of those


class RankGroup:
    """This process's membership in the ranks of one worker. Its methods are collective: every
    rank calls the same one in the same order, on one thread. All raise RankLostError when another
    rank is gone; the ranks that are left can then do nothing but end."""

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        host: str,
        device: str = "cpu",
        listen_fd: int | None = None,
    ) -> None:
        """Waits for all ranks. `address` is where rank 0 listens already, with the socket
        `listen_fd`, which it gives away; `host` is this process's own name or address, by which
        other ranks can reach it."""
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self._wait = datetime.timedelta(seconds=_STEP_S)
        joining = datetime.timedelta(seconds=_JOIN_S)
        name, _, port = address.rpartition(":")
        with self._translated("cannot meet the other ranks"):
            self._store: Any = dist.TCPStore(
                name, int(port), None, rank == 0, joining,
                wait_for_workers=False, master_listen_fd=listen_fd,
            )  # fmt: skip
            self._control: Any = self._gloo("control", host, _NO_DEADLINE)
            self._compute: Any = self._control
            if self.device.type == "cuda":
                self._compute = self._nccl("compute")
            else:
                self._compute = self._gloo("compute", host, self._wait)
        self._first = torch.zeros(_FIRST_MESSAGE, dtype=torch.int64)

    def _gloo(self, name: str, host: str, timeout: datetime.timedelta) -> Any:
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = timeout
        store = dist.PrefixStore(name, self._store)
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def _nccl(self, name: str) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._wait
        store = dist.PrefixStore(name, self._store)
        return dist.ProcessGroupNCCL(store, self.rank, self.size, options)

    # ------------------------------------------------------------ the model's

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, in place and the same to the last bit on each."""
        if not x.numel():
            return x
        with self._translated("in a step"):
            self._compute.allreduce([x]).wait()
        return x

    def gather(self, x: torch.Tensor) -> torch.Tensor | None:
        """At rank 0 the ranks' tensors side by side along the last axis, None at the others. The
        end of a step: at rank 0 it returns when every rank has got here, and so has written its
        KV, which others may read then. Of tensors without elements too."""
        options = dist.GatherOptions()
        options.rootRank = 0
        parts = [torch.empty_like(x) for _ in range(self.size)] if self.rank == 0 else []
        if not x.numel():
            self.end_step()
        else:
            with self._translated("in a step"):
                self._compute.gather([parts] if parts else [], [x.contiguous()], options).wait()
        return torch.cat(parts, dim=-1) if parts else None

    def end_step(self) -> None:
        """Of one that gathers nothing: as `gather` says."""
        self.all_reduce(torch.zeros(1, device=self.device))

    # ------------------------------------------------------------ control

    def least(self, number: int) -> int:
        """The least of the ranks' numbers. Waits for the slowest without a deadline."""
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MIN)
        value = torch.tensor([number])
        with self._translated("while starting"):
            self._control.allreduce([value], options).wait()
        return int(value)

    def barrier(self) -> None:
        """Returns when every rank has got here."""
        self.least(0)

    def send(self, message: list[int]) -> None:
        """Rank 0: to all others' `receive`."""
        total = 1 + len(message)
        first = self._first
        head = message[: _FIRST_MESSAGE - 1]
        first[: 1 + len(head)] = torch.tensor([total, *head])
        with self._translated("between two steps"):
            self._broadcast(first)
            if total > _FIRST_MESSAGE:
                self._broadcast(torch.tensor(message[_FIRST_MESSAGE - 1 :]))

    def receive(self) -> list[int]:
        """What rank 0 sends next; waits for it without a deadline and without a processor."""
        with self._translated("between two steps"):
            self._broadcast(self._first)
            total = int(self._first[0])
            message = self._first[1:total].tolist()
            if total > _FIRST_MESSAGE:
                rest = torch.empty(total - _FIRST_MESSAGE, dtype=torch.int64)
                self._broadcast(rest)
                message += rest.tolist()
        return message

    def close(self) -> None:
        """Leaves: to the other ranks it is as the end of this process. Nothing may be called
        afterwards. Groups that live on when Python ends may abort its process."""
        self._compute = self._control = self._store = None

    def publish(self, name: str, text: str) -> None:
        """For the other ranks' `lookup`; not a collective call."""
        with self._translated("while starting"):
            self._store.set(name, text)

    def lookup(self, name: str) -> str:
        """What any rank has published under this name, or publishes within five minutes; not a
        collective call."""
        with self._translated(f"waiting for its {name}"):
            return self._store.get(name).decode()

    def _broadcast(self, message: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = _NO_DEADLINE
        self._control.broadcast([message], options).wait()

    def _translated(self, when: str) -> "_Translated":
        return _Translated(f"rank {self.rank} of {self.size} has lost another one {when}")


@dataclass(frozen=True, slots=True)
class _Translated:
    """Torch's errors of a process group as ours; cheaper than a generator on each layer's sums."""

    message: str

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, RuntimeError):
            # Gloo's own words begin with a line of its source and end with advice.
            reason = re.sub(r"^\[\S+\] |\. .*", "", str(error).strip(), flags=re.DOTALL)
            raise RankLostError(f"{self.message}: {reason}") from error


# ---------------------------------------------------------------- steps


def encode_step(
    kind: StepKind, batch: StepBatch, input_ids: list[int], rows: list[int]
) -> list[int]:
    """Positions are left out: `batch` implies them."""
    message = [kind, batch.num_decodes, len(batch.query_lens), len(rows)]
    message += batch.query_lens
    message += batch.seq_lens
    message += map(len, batch.block_tables)
    for table in batch.block_tables:
        message += table
    return message + rows + input_ids


def decode_step(message: list[int]) -> tuple[StepBatch, list[int], list[int]]:
    """The batch, the input ids and the rows of `encode_step`."""
    _, num_decodes, num_sequences, num_rows = message[:4]
    at = 4

    def take(count: int) -> list[int]:
        nonlocal at
        at += count
        return message[at - count : at]

    query_lens, seq_lens, sizes = (take(num_sequences) for _ in range(3))
    tables = [take(size) for size in sizes]
    rows = take(num_rows)
    return StepBatch(query_lens, seq_lens, tables, num_decodes), message[at:], rows


class ShardedModel(Model, PooledModel, Protocol):
    """A rank's own part of a model."""

    def compatibility(self) -> dict[str, str]: ...


class TensorParallel:
    """The whole model, seen from rank 0: a `Model` whose forward runs on all ranks at once.

    An error after a step was announced is final (RankLostError): ranks that have stopped at
    different places of a forward cannot be brought together again."""

    maxima = None

    def __init__(self, model: ShardedModel, ranks: RankGroup) -> None:
        self._model = model
        self._ranks = ranks
        self._is_open = True

    @property
    def config(self) -> ModelLimits:
        return self._model.config

    @property
    def kv_dtype(self) -> torch.dtype:
        return self._model.kv_dtype

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        """Of this rank's part of a block."""
        return self._model.kv_block_shape(block_size)

    def bind(self, kv_cache: torch.Tensor) -> None:
        self._model.bind(kv_cache)

    def compatibility(self) -> dict[str, str]:
        return self._model.compatibility()

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        ids, rows = input_ids.tolist(), logits_rows.tolist()
        self._announce(encode_step(StepKind.FORWARD, batch, ids, rows))
        with _final_errors():
            return self._model.forward(input_ids, positions, batch, logits_rows)

    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        ids, wanted = input_ids.tolist(), rows.tolist()
        self._announce(encode_step(StepKind.HIDDEN_STATES, batch, ids, wanted))
        with _final_errors():
            hidden = self._model.hidden_states(input_ids, positions, batch, rows)
            self._ranks.end_step()
            return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of the first rows that the last `hidden_states` returned: every rank has them."""
        self._announce([StepKind.LOGITS, len(hidden)])
        with _final_errors():
            return self._model.logits(hidden)

    def _announce(self, step: list[int]) -> None:
        if not self._is_open:
            raise RankLostError("the ranks of this worker have been told to stop")
        self._ranks.send(step)

    def close(self) -> None:
        """Ends the followers' loops and leaves the group. On the thread that calls forward, or when
        that has ended."""
        if self._is_open:
            self._is_open = False
            try:
                self._ranks.send([StepKind.STOP])
            except RankLostError as error:
                logger.info("nobody to stop: %s", error)
            finally:
                self._ranks.close()


@contextmanager
def _final_errors() -> Iterator[None]:
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        raise RankLostError(f"rank 0 failed inside a step: {error}") from error


def run_follower(model: ShardedModel, ranks: RankGroup) -> None:
    """The life of a rank other than 0, from the first step until rank 0 says stop. `model` has its
    KV cache bound. Raises RankLostError when rank 0 is gone, and whatever the model raises."""
    hidden = torch.empty(0)
    while True:
        message = ranks.receive()
        if message[0] == StepKind.STOP:
            ranks.close()
            return
        if message[0] == StepKind.LOGITS:
            model.logits(hidden[: message[1]])
            continue
        batch, input_ids, rows = decode_step(message)
        positions = [
            position
            for query_len, seq_len in zip(batch.query_lens, batch.seq_lens, strict=True)
            for position in range(seq_len - query_len, seq_len)
        ]
        tensors = (
            torch.tensor(values, dtype=torch.int64).to(ranks.device)
            for values in (input_ids, positions, rows)
        )
        ids, at, logits_rows = tensors
        if message[0] == StepKind.FORWARD:
            model.forward(ids, at, batch, logits_rows)
        else:
            hidden = model.hidden_states(ids, at, batch, logits_rows)
            ranks.end_step()
