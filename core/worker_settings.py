"""What a worker process is told when it starts."""

from dataclasses import dataclass, field

from core.config import Config, EngineConfig
from core.host import available_cpus
from core.types import Role


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """`config` is the whole deployment; the worker reads its own pool's part of it."""

    worker_id: str  # stable in its pool: "prefill-0"
    role: Role  # that it has, or begins with
    config: Config
    host: str = "127.0.0.1"  # bound and advertised
    port: int = 0  # 0: any free one
    num_threads: int = 0  # for torch; 0: all cores
    kv_memory_bytes: int = 0  # for KV blocks when num_kv_blocks is not set; 0: a share of free RAM
    roles: tuple[Role, ...] = ()  # that it may have; none: `role` alone
    cluster_token: str = field(default="", repr=False)  # of internal calls; "": none is checked
    # Of a worker that is several processes: which this one is, and where they meet. Rank 0 has
    # the socket that listens there as a descriptor of its own process.
    rank: int = 0
    rendezvous: str = ""
    rendezvous_fd: int | None = None

    @property
    def engine(self) -> EngineConfig:
        """With the limits of its role."""
        return self.config.engine_for(self.role.value)

    @property
    def widest_engine(self) -> EngineConfig:
        """With the largest limits of its roles: what memory must do for."""
        engines = [self.config.engine_for(role.value) for role in self.roles or (self.role,)]
        return engines[0].model_copy(
            update={
                "max_num_seqs": max(e.max_num_seqs for e in engines),
                "max_num_batched_tokens": max(e.max_num_batched_tokens for e in engines),
            }
        )

    @property
    def may_decode(self) -> bool:
        return any(role is not Role.PREFILL for role in self.roles or (self.role,))

    @property
    def num_ranks(self) -> int:
        return self.config.pools.named(self.role.value).tensor_parallel_size

    @property
    def threads(self) -> int:
        configured = self.engine.threads
        if configured != "auto":
            return configured
        return self.num_threads or available_cpus()

    @property
    def idle_threads(self) -> int:
        """Beside those; where they fill the host, more would only take turns with them."""
        configured = self.engine.idle_threads
        if configured != "auto":
            return configured
        return max(0, min(self.threads, available_cpus() - self.threads))
