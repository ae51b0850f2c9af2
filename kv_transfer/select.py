"""Which transports a worker offers, and which one a pair of workers uses."""

import logging
from collections.abc import Iterable, Mapping
from typing import Literal

import torch

from core.errors import ConfigError, IncompatiblePeerError
from kv_transfer.base import KVTransfer
from kv_transfer.encoding import Compression, Encoding
from kv_transfer.grpc_transport import GrpcTransfer
from kv_transfer.nixl_transport import NixlTransfer

logger = logging.getLogger(__name__)

Transport = Literal["auto", "nixl", "grpc"]
_PREFERENCE = ("nixl", "grpc")  # fastest first


def make_transports(
    transport: Transport,
    kv_cache: torch.Tensor,
    worker_id: str,
    incarnation: str,
    compression: Compression = "none",
    row_bytes: int = 1,
) -> dict[str, KVTransfer]:
    """The transports of a worker by name, ready for use; the caller closes them. `auto` makes
    all that work here and warns about NIXL if it does not. `compression` is gRPC's, `row_bytes`
    those of one token of one head. Raises ConfigError if what was asked for does not work."""
    if compression == "int8" and kv_cache.dtype != torch.bfloat16:
        raise ConfigError(
            f"kv_transfer.compression: int8 is for KV in bfloat16, on {worker_id} it is in "
            f"{str(kv_cache.dtype).removeprefix('torch.')}"
        )
    made: dict[str, KVTransfer] = {}
    if transport in ("auto", "nixl"):
        try:
            made["nixl"] = NixlTransfer(kv_cache, worker_id, incarnation)
        except Exception as error:
            if transport == "nixl":
                raise ConfigError(
                    f"kv_transfer.transport: nixl cannot be used on {worker_id}: {_why(error)}"
                ) from error
            logger.warning("KV goes over gRPC, NIXL cannot be used here: %s", _why(error))
    if transport in ("auto", "grpc"):
        encoding = Encoding(compression, kv_cache.itemsize, row_bytes)
        made["grpc"] = GrpcTransfer(kv_cache, encoding=encoding)
    return made


def choose(ours: Mapping[str, KVTransfer], offered: Iterable[str], peer_id: str) -> KVTransfer:
    """The fastest transport that both sides have. Raises IncompatiblePeerError without one."""
    offered = set(offered)
    for name in (*_PREFERENCE, *ours):
        if name in ours and name in offered:
            return ours[name]
    raise IncompatiblePeerError(
        f"no common KV transport: {peer_id} offers {', '.join(sorted(offered)) or 'none'}, "
        f"here are {', '.join(ours) or 'none'}"
    )


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
