"""Says what carries the KV of each peer, and complains when it is not what was asked for."""

import logging
import os
import re

logger = logging.getLogger(__name__)

# UCX's names of transports over InfiniBand and RoCE: rc, rc_mlx5, ud_verbs, dc, ib, ...
_RDMA = re.compile(r"(rc|ud|dc|ib|gga)(_|$)")


class CarrierWatch:
    """Remembers one carrier for each peer; a change of it is logged, once.

    `num_fallbacks` counts how often a peer turned out to be reached over TCP although the
    environment asks for RDMA. Asking means: `UCX_TLS` names an RDMA transport. Without such a
    wish TCP is no fault, and this class does not guess whether the host would have had better."""

    def __init__(self, ucx_tls: str | None = None) -> None:
        self._ucx_tls = os.environ.get("UCX_TLS", "") if ucx_tls is None else ucx_tls
        self._known: dict[str, str] = {}
        self.num_fallbacks = 0

    def note(self, worker_id: str, transport: str, carrier: str) -> str:
        """After a pull. Returns how to call it: "nixl (cma)"; just "nixl" as long as the carrier
        is not known, which is not logged."""
        if not carrier:
            return transport
        described = f"{transport} ({carrier})"
        if self._known.get(worker_id) == described:
            return described
        self._known[worker_id] = described
        logger.info("KV from %s over %s", worker_id, described)
        if asks_for_rdma(self._ucx_tls) and "tcp" in carrier.split("+"):
            self.num_fallbacks += 1
            logger.warning(
                "UCX_TLS=%s asks for RDMA, but KV from %s comes over %s",
                self._ucx_tls, worker_id, described,
            )  # fmt: skip
        return described


def asks_for_rdma(ucx_tls: str) -> bool:
    """Whether a value of UCX_TLS names an RDMA transport. A list with ^ names those to avoid."""
    if ucx_tls.startswith("^"):
        return False
    names = (name.strip().split(":")[0] for name in ucx_tls.split(","))
    return any(_RDMA.match(name.lstrip("\\")) for name in names)
