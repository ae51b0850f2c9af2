"""What a GPU's data sheet allows at most, as the tables of docs/roofline.md.

    python -m planner.roofline            # prints the tables again

Floors, not predictions: every product at the full bf16 rate, every byte at the full bandwidth.
`planner.step_model` has the efficiencies that bring them near to measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from planner.hardware import HARDWARE, MODELS, Hardware, ModelShape, kv_capacity

VOCABULARY = 128_256  # of both Llama 3 models
LINKS_GBIT = (50, 100, 200, 400)
BATCHES = (1, 8, 64, 128)
CONTEXT = 2048
PROMPT = 4096
CHUNKS = (256, 512, 2048)
LOADS = ((512, 1024), (1024, 128), (4096, 256), (16384, 256))  # tokens in, tokens out


@dataclass(frozen=True, slots=True)
class Replica:
    """One model on as many GPUs as hold it with room for KV."""

    shape: ModelShape
    hardware: Hardware
    gpus: int

    @property
    def name(self) -> str:
        model = self.shape.name.removeprefix("llama-3.1-").upper()
        return f"{model}, {self.gpus} x {self.hardware.name.upper()}"

    # ------------------------------------------------------------ prefill

    def prefill_flops(self, length: int) -> float:
        """Of a prompt: two operations a weight and token, logits of its last token alone, and
        scores and values over half of the square (causal)."""
        head = VOCABULARY * self.shape.hidden_size
        linear = 2 * (self.shape.active_parameters - head) * length + 2 * head
        width = self.shape.num_heads * self.shape.head_dim
        return linear + 4 * self.shape.num_layers * width * length * (length + 1) / 2

    def prefill_seconds(self, length: int) -> float:
        return self.prefill_flops(length) / (self.hardware.flops * self.gpus)

    # ------------------------------------------------------------- decode

    def decode_bytes(self, batch: int, context: int) -> float:
        """Of a step: every weight once, and the KV of every sequence."""
        weights = self.shape.active_parameters * self.shape.bytes_per_value
        return weights + batch * context * self.shape.kv_bytes_per_token

    def decode_seconds(self, batch: int, context: int) -> float:
        bytes_s = self.decode_bytes(batch, context) / (self.hardware.memory_bandwidth * self.gpus)
        flops = 2 * self.shape.active_parameters * batch
        return max(bytes_s, flops / (self.hardware.flops * self.gpus))

    @property
    def balanced_batch(self) -> float:
        """Sequences of short context from which a step is limited by arithmetic."""
        per_byte = self.hardware.flops / self.hardware.memory_bandwidth
        return per_byte * self.shape.bytes_per_value / 2

    # ----------------------------------------------------------- transfer

    def transfer_seconds(self, length: int, gigabit: float) -> float:
        """Of a prompt's KV, each GPU over a link of its own."""
        return length * self.shape.kv_bytes_per_token / (gigabit * 1e9 / 8 * self.gpus)

    def hiding_gigabit(self, length: int) -> float:
        """Link of each GPU over which a prompt's KV leaves as fast as it is computed."""
        rate = length * self.shape.kv_bytes_per_token / self.prefill_seconds(length) / self.gpus
        return rate * 8 / 1e9

    # ------------------------------------------------------------ pools

    def prefill_per_decode(self, tokens_in: int, tokens_out: int, max_batch: int) -> float:
        """Prefill replicas that keep one decode replica busy, at `max_batch` sequences or as many
        as its memory holds."""
        context = tokens_in + tokens_out // 2
        batch = min(max_batch, kv_capacity(self.hardware, self.shape, self.gpus) // context)
        decode = tokens_out * self.decode_seconds(batch, context) / batch  # of one sequence
        return self.prefill_seconds(tokens_in) / decode


def replicas() -> list[Replica]:
    small, large = MODELS["llama-3.1-8b"], MODELS["llama-3.1-70b"]
    h100, h200 = HARDWARE["h100"], HARDWARE["h200"]
    return [
        Replica(small, h100, 1),
        Replica(small, h200, 1),
        Replica(large, h100, 4),
        Replica(large, h200, 2),
    ]


# --------------------------------------------------------------------------------- tables


def tables() -> dict[str, str]:
    """Markdown, by name."""
    every = replicas()
    return {
        "prefill": _table(
            [
                "",
                f"TFLOP for {PROMPT} tokens",
                "ms",
                "tokens/s",
                "KV bytes a token",
                "KV of it, MB",
            ],
            [
                [
                    r.name,
                    f"{r.prefill_flops(PROMPT) / 1e12:.1f}",
                    _ms(r.prefill_seconds(PROMPT)),
                    f"{PROMPT / r.prefill_seconds(PROMPT):,.0f}",
                    f"{r.shape.kv_bytes_per_token:,}",
                    f"{PROMPT * r.shape.kv_bytes_per_token / 1e6:.0f}",
                ]
                for r in every
            ],
        ),
        "decode": _table(
            ["", *[f"batch {b}: GB, ms, tokens/s" for b in BATCHES], "arithmetic from batch"],
            [[r.name, *[_decode(r, b) for b in BATCHES], f"{r.balanced_batch:.0f}"] for r in every],
        ),
        "transfer": _table(
            ["", *[f"{g} Gb/s" for g in LINKS_GBIT], "prefill", "hidden from"],
            [
                [
                    r.name,
                    *[_ms(r.transfer_seconds(PROMPT, g)) for g in LINKS_GBIT],
                    _ms(r.prefill_seconds(PROMPT)),
                    f"{r.hiding_gigabit(PROMPT):.0f} Gb/s",
                ]
                for r in every
            ],
        ),
        "interference": _table(
            ["", "decode step", *[f"with {c} prompt tokens" for c in CHUNKS]],
            [
                [
                    r.name,
                    _ms(r.decode_seconds(64, CONTEXT)),
                    *[_ms(r.decode_seconds(64, CONTEXT) + r.prefill_seconds(c)) for c in CHUNKS],
                ]
                for r in every
            ],
        ),
        "pools": _table(
            ["", *[f"{i} in, {o} out" for i, o in LOADS]],
            [[r.name, *[f"{r.prefill_per_decode(i, o, 64):.2f}" for i, o in LOADS]] for r in every],
        ),
    }


def _decode(replica: Replica, batch: int) -> str:
    taken = replica.decode_seconds(batch, CONTEXT)
    moved = replica.decode_bytes(batch, CONTEXT) / 1e9
    return f"{moved:.0f}, {_ms(taken)}, {batch / taken:,.0f}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.1f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    for title, table in tables().items():
        print(f"{title}\n\n{table}")
