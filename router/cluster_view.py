"""`/cluster`: the whole deployment as one JSON object, as `pdserve status --json` prints it."""

from typing import Any

from core.types import WorkerState
from router.placement.registry import Registry
from rpc import codec, worker_pb2
from rpc.cluster_pb2 import WorkerEntry

_COUNTERS = (
    "requests_running",
    "requests_waiting",
    "waiting_prefill_tokens",
    "tokens_prefilled_total",
    "tokens_decoded_total",
    "prefix_hit_tokens_total",
    "transfers_ok_total",
    "transfers_failed_total",
    "preemptions_total",
    "aborts_total",
)
_SPEEDS = ("prefill_tokens_per_second", "decode_step_seconds", "decode_sequence_seconds")
_BLOCKS = ("total", "free", "cached", "running", "held", "awaiting")


def cluster_view(registry: Registry, mode: str, model: str) -> dict[str, Any]:
    entries = sorted(registry.entries.values(), key=lambda entry: (entry.role, entry.id))
    return {
        "mode": mode,
        "model": model,
        "ready": registry.can_serve(),
        "controller": registry.controller,
        "controller_reachable": registry.hears_controller,
        "workers": [_worker(registry, entry) for entry in entries],
    }


def _worker(registry: Registry, entry: WorkerEntry) -> dict[str, Any]:
    worker = registry.workers.get(entry.id)
    status = (worker and worker.status) or worker_pb2.WorkerStatus()
    view: dict[str, Any] = {
        "id": entry.id,
        "role": codec.role_from_pb(entry.role).value,
        "host": entry.host,
        "pid": entry.pid,
        "address": entry.address,
        "state": _state(entry, status).value,
        "reachable": worker is not None and worker.reachable,
        "incarnation": entry.incarnation,
        "transport": status.transport,
        "kv_blocks": {name: getattr(status.kv_blocks, name) for name in _BLOCKS},
        **{name: getattr(status, name) for name in (*_COUNTERS, *_SPEEDS)},
        "attempts_in_flight": worker.num_passengers if worker is not None else 0,
        "detail": entry.detail,
    }
    if entry.role == worker_pb2.ROLE_PREFILL:
        view["kv_bytes_sent_total"] = status.kv_bytes_sent_total
    if entry.role == worker_pb2.ROLE_DECODE:
        view["kv_bytes_received_total"] = status.kv_bytes_received_total
    if worker is not None and worker.info is not None:
        view["max_model_len"] = worker.info.max_model_len
        view["block_size"] = worker.info.block_size
        # Of its prefix cache, by its events: what this router counts on.
        view["kv_blocks_known"] = len(worker.holdings) if worker.holdings is not None else 0
        view["kv_block_bytes"] = worker.info.kv_block_bytes
        view["max_num_seqs"] = worker.info.max_num_seqs
        view["compatibility"] = dict(worker.info.compatibility)  # what KV may pass between
    return view


def _state(entry: WorkerEntry, status: worker_pb2.WorkerStatus) -> WorkerState:
    """The controller knows of death; of the rest the worker itself knows more."""
    if entry.state == worker_pb2.WORKER_STATE_READY and status.state:
        return codec.state_from_pb(status.state)
    return codec.state_from_pb(entry.state or worker_pb2.WORKER_STATE_STARTING)
