"""What a plan chooses between."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pool:
    replicas: int
    tensor_parallel: int = 1

    @property
    def gpus(self) -> int:
        return self.replicas * self.tensor_parallel

    def __str__(self) -> str:
        return f"{self.replicas} x TP{self.tensor_parallel}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Either `prefill` and `decode`, or `colocated`. `max_num_batched_tokens` is the budget of a
    step, in the colocated case the size of a chunk."""

    prefill: Pool | None = None
    decode: Pool | None = None
    colocated: Pool | None = None
    max_num_batched_tokens: int = 2048

    @property
    def is_disaggregated(self) -> bool:
        return self.colocated is None

    @property
    def pools(self) -> dict[str, Pool]:
        named = {"prefill": self.prefill, "decode": self.decode, "colocated": self.colocated}
        return {name: pool for name, pool in named.items() if pool is not None}

    @property
    def gpus(self) -> int:
        return sum(pool.gpus for pool in self.pools.values())

    def __str__(self) -> str:
        if self.is_disaggregated:
            return f"prefill {self.prefill}, decode {self.decode}"
        return f"colocated {self.colocated}, chunks of {self.max_num_batched_tokens}"
