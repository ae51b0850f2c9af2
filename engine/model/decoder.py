"""One decoder-only transformer for every family: what differs stands in its config."""

import hashlib
import math
from functools import partial

import torch
import torch.nn.functional as F

from engine.attention.base import AttentionBackend, AttentionLayer, StepBatch
from engine.attention.kv_format import KVFormat, LatentFormat
from engine.attention.select import AttentionChoice, make_backend
from engine.model import native_layers
from engine.model.config import ModelConfig
from engine.model.layers import Layer, Weights
from engine.model.rope import Rope, inverse_frequencies
from engine.model.sharding import Shard
from engine.parallel import RankGroup
from engine.types import Maxima


class Decoder:
    """A loaded model. Owns its weights; the KV cache is bound once and belongs to the engine.

    `forward` may be called by one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        dtype: torch.dtype,
        device: torch.device,
        fingerprint: str,
        quantization: str,
        kv_format: KVFormat,
        attention: AttentionChoice = "auto",
        ranks: RankGroup | None = None,
    ) -> None:
        """`ranks`: those among which the weights are cut, of which this process has one part."""
        self.config = config
        self.dtype = dtype
        self.kv_dtype = kv_format.storage_dtype
        self._kv_format = kv_format
        self._row_format: KVFormat | LatentFormat = kv_format
        if config.latent is not None:
            self._row_format = LatentFormat(kv_format, config.latent.kv_lora_rank)
        self._attention_choice = attention
        self._quantization = quantization
        self._weights = weights
        self._ranks = ranks
        self._shard = Shard() if ranks is None else Shard(ranks.rank, ranks.size)
        self._fingerprint = fingerprint
        self._ropes = [Rope(config.rope, config.max_model_len, dtype, device)]
        if config.local_rope is not None:
            self._ropes.append(Rope(config.local_rope, config.max_model_len, dtype, device))
        self._attention_layers = [
            AttentionLayer(i, config.attention_scale, c.sliding_window, config.attention_softcap)
            for i, c in enumerate(config.layers)
        ]
        self._backend: AttentionBackend | None = None
        self._native: native_layers.NativeLayers | None = None
        self._embedding_scale = (
            torch.tensor(math.sqrt(config.hidden_size), dtype=dtype, device=device)
            if config.family.scaled_embeddings
            else None
        )

    def kv_block_shape(self, block_size: int) -> tuple[int, ...]:
        """Of one block: (layers, key and value, heads, tokens, elements of a token's row). Latent
        attention has one row for both, and for all heads."""
        config = self.config
        row = self._row_format.row_size(config.head_dim)
        num_parts = 2 if config.latent is None else 1
        num_kv_heads = self._shard.num_own_heads(config.num_kv_heads)
        return (config.num_layers, num_parts, num_kv_heads, block_size, row)

    def bind(self, kv_cache: torch.Tensor) -> None:
        """kv_cache: `[num_blocks, *kv_block_shape]`, contiguous, zeros or finite numbers. Raises
        ModelError where the attention that was asked for cannot read it."""
        self._backend = make_backend(
            kv_cache,
            self._shard.num_own_heads(self.config.num_heads),
            self._attention_layers,
            self._row_format,
            self._attention_choice,
        )
        if self._ranks is None and native_layers.serves(self.config, self._weights, kv_cache):
            self._native = native_layers.NativeLayers(
                self.config, self._weights, self._ropes, kv_cache
            )

    def unbind(self) -> None:
        """Forgets the KV cache; another may be bound."""
        self._backend = self._native = None

    @property
    def has_native_layers(self) -> bool:
        """Whether a step is one native call; known after `bind`."""
        return self._native is not None

    @property
    def maxima(self) -> Maxima | None:
        return self._native.maxima if self._native is not None else None

    def compatibility(self) -> dict[str, str]:
        """What two workers must share so that one can read the other's KV blocks."""
        config = self.config
        digest = hashlib.sha256()
        for rope in (config.rope, config.local_rope):
            if rope is not None:
                frequencies, factor = inverse_frequencies(rope, config.max_model_len)
                digest.update(frequencies.numpy().tobytes() + repr(factor).encode())
        latent = config.latent
        return {
            "model": self._fingerprint,
            "dtype": str(self.dtype).removeprefix("torch."),
            "quantization": self._quantization,
            "kv_dtype": str(self.kv_dtype).removeprefix("torch."),
            "kv_format": self._kv_format.name,
            "kv_row": "key and value" if latent is None else f"latent {latent.kv_lora_rank}",
            "num_layers": str(config.num_layers),
            "num_kv_heads": str(config.num_kv_heads),
            "head_dim": str(config.head_dim),
            "rope": digest.hexdigest()[:16],
        }

    @torch.inference_mode()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        logits_rows: torch.Tensor,
    ) -> torch.Tensor:
        """input_ids and positions: `[T]` as `batch` lays them out. Writes the KV of all of them
        and returns float32 logits `[R, vocab_size]` of the rows `logits_rows` `[R]`; on a rank
        other than 0 only its own part of the vocabulary."""
        if self._native is not None:
            return self._native.forward(input_ids, positions, batch, logits_rows)
        self.plan(batch)
        return self.compute(input_ids, positions, logits_rows)

    @property
    def can_capture(self) -> bool:
        """Whether `compute` may be captured in a CUDA graph. Experts may not: how many tokens
        each of them gets is known on the GPU alone. Nor several ranks, which would have to
        replay together."""
        backend, is_plain = self._backend, self.config.moe is None and self._ranks is None
        return is_plain and backend is not None and backend.can_capture

    def reserve_for_graphs(self, max_sequences: int, max_blocks: int) -> None:
        self._bound().reserve_for_graphs(max_sequences, max_blocks)

    def plan(self, batch: StepBatch) -> None:
        """With `compute` after it: `forward`. All that depends on lengths and block tables."""
        self._bound().plan(batch)

    @torch.inference_mode()
    def compute(
        self, input_ids: torch.Tensor, positions: torch.Tensor, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """After `plan`: all the rest, without another look at the batch."""
        return self.logits(self._layers(input_ids, positions, logits_rows))

    @torch.inference_mode()
    def hidden_states(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        batch: StepBatch,
        rows: torch.Tensor,
    ) -> torch.Tensor:
        """As `forward`, but the final hidden states `[R, hidden_size]`, normed, of `rows`."""
        self.plan(batch)
        return self._layers(input_ids, positions, rows)

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of final hidden states: float32 `[R, vocab_size]`."""
        logits = self._gather(self._weights.head(hidden)).float()
        if self.config.final_softcap is not None:
            cap = self.config.final_softcap
            logits = logits.div_(cap).tanh_().mul_(cap)
        return logits

    def _layers(
        self, input_ids: torch.Tensor, positions: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """From tokens to the final hidden states of `rows`."""
        backend = self._bound()
        hidden, cos_sins = self._enter(input_ids, positions)
        rotates = [
            partial(rope.apply, cos_sin=cos_sin)
            for rope, cos_sin in zip(self._ropes, cos_sins, strict=True)
        ]
        last = self.config.num_layers - 1
        for i, layer in enumerate(self._weights.layers):
            attend = partial(backend.forward, self._attention_layers[i])
            rotate = rotates[int(self.config.layers[i].has_local_rope)]
            attended = layer.attention(layer.input_norm(hidden), rotate, attend)
            if i == last:  # KV is written; from here only some rows matter
                hidden, attended = hidden[rows], attended[rows]
            hidden = self._feed_forward(layer, hidden, attended)
        return self._weights.norm(hidden)

    def _enter(
        self, input_ids: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, list[tuple[torch.Tensor, torch.Tensor]]]:
        """What goes into the first layer, and cos and sin of each kind of rope."""
        cos_sins = [rope.cos_sin(positions) for rope in self._ropes]
        hidden = self._embed(input_ids)
        if self._embedding_scale is not None:
            hidden = hidden * self._embedding_scale
        return hidden, cos_sins

    def _bound(self) -> AttentionBackend:
        if self._backend is None:
            raise RuntimeError("bind a KV cache first")
        return self._backend

    def _feed_forward(
        self, layer: Layer, hidden: torch.Tensor, attended: torch.Tensor
    ) -> torch.Tensor:
        attended = self._sum(layer.attention.o(attended))
        if layer.attention_post_norm is not None:
            attended = layer.attention_post_norm(attended)
        hidden = hidden + attended
        out = self._sum(layer.mlp(layer.mlp_norm(hidden)))
        if layer.mlp_post_norm is not None:
            out = layer.mlp_post_norm(out)
        return hidden + out

    # ------------------------------------------------------------ among ranks

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedding = self._weights.embedding
        if self._ranks is None:
            return F.embedding(input_ids, embedding)
        own = input_ids - self._shard.rank * embedding.shape[0]
        is_others = (own < 0) | (own >= embedding.shape[0])
        rows = F.embedding(own.masked_fill_(is_others, 0), embedding)
        return self._ranks.all_reduce(rows.masked_fill_(is_others.unsqueeze(1), 0))

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._ranks is None else self._ranks.all_reduce(x)

    def _gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Without the rows that pad the vocabulary."""
        if self._ranks is None:
            return logits
        gathered = self._ranks.gather(logits)
        return logits if gathered is None else gathered[:, : self.config.vocab_size]
