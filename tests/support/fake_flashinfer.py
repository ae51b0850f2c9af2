"""The two wrappers of flashinfer that the engine uses, with the library's names, arguments and
demands, in plain torch on a CPU. As on a GPU, `run` sees nothing but what `plan` was given, and
with CUDA graphs nothing but the buffers that the wrapper was made with."""

import torch


class _Wrapper:
    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "HND"
        self.num_plans = 0

    def _set(self, num_qo_heads, num_kv_heads, head_dim, page_size, options) -> None:
        assert num_qo_heads % num_kv_heads == 0
        self._shape = (num_kv_heads, page_size, head_dim)
        self._num_qo_heads = num_qo_heads
        self._window_left = options.pop("window_left")
        self._softcap = options.pop("logits_soft_cap")
        self._scale = options.pop("sm_scale")
        self._dtypes = (options.pop("q_data_type"), options.pop("kv_data_type"))
        self._has_scales = options.pop("use_token_head_sf", False)
        assert self._has_scales == (self._dtypes[1] == torch.float8_e4m3fn)
        assert not options, options
        self.num_plans += 1

    def _check(
        self, q: torch.Tensor, paged_kv_cache, kv_cache_sf
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys and values, scaled."""
        keys, values = paged_kv_cache
        assert (q.dtype, keys.dtype, values.dtype) == (self._dtypes[0], *self._dtypes[1:] * 2)
        assert keys.shape[1:] == values.shape[1:] == torch.Size(self._shape)
        # What the kernels demand of strides: alike, and a row in one piece.
        assert keys.stride() == values.stride() and keys.stride(-1) == q.stride(-1) == 1
        assert (kv_cache_sf is not None) == self._has_scales
        if kv_cache_sf is None:
            return keys, values
        # Rows are loaded 16 bytes at once; scales may lie anywhere.
        assert all(stride % 16 == 0 for stride in keys.stride()[:-1])
        assert keys.storage_offset() % 16 == values.storage_offset() % 16 == 0
        for scales in kv_cache_sf:
            assert scales.dtype == torch.float32 and scales.shape == keys.shape[:-1]
        return tuple(
            x.float() * scales.unsqueeze(-1)
            for x, scales in zip(paged_kv_cache, kv_cache_sf, strict=True)
        )

    def _attend(
        self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, pages: torch.Tensor,
        last_page_len: int, is_causal: bool,
    ) -> torch.Tensor:  # fmt: skip
        """q `[queries, heads, dim]`, the last ones of a sequence."""
        num_kv_heads, page_size, head_dim = self._shape
        assert 1 <= last_page_len <= page_size
        length = (len(pages) - 1) * page_size + last_page_len
        chosen = [  # [heads, length, dim]
            x[pages.long()].transpose(1, 2).reshape(-1, num_kv_heads, head_dim)[:length].float()
            for x in (keys, values)
        ]
        group = self._num_qo_heads // num_kv_heads
        k, v = (x.repeat_interleave(group, dim=1) for x in chosen)
        scores = torch.einsum("qhd,khd->hqk", q.float(), k) * self._scale
        if self._softcap > 0:
            scores = self._softcap * torch.tanh(scores / self._softcap)
        at = torch.arange(length - len(q), length).unsqueeze(1)
        key_at = torch.arange(length)
        hidden = (key_at > at) if is_causal else torch.zeros(len(q), length, dtype=torch.bool)
        if self._window_left >= 0:
            hidden |= key_at < at - self._window_left
        scores = scores.masked_fill(hidden, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    made: list["BatchDecodeWithPagedKVCacheWrapper"] = []

    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
        use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, backend="auto",
    ) -> None:  # fmt: skip
        super().__init__(float_workspace_buffer, kv_layout)
        self.graph_size = len(paged_kv_last_page_len_buffer) if use_cuda_graph else 0
        if use_cuda_graph:
            assert len(paged_kv_indptr_buffer) == self.graph_size + 1
        self._buffers = (
            paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        )  # fmt: skip
        self.made.append(self)

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        **options,
    ) -> None:  # fmt: skip
        parts = (indptr, indices, last_page_len)
        assert all(part.dtype == torch.int32 for part in parts)
        assert len(indptr) == len(last_page_len) + 1 and len(indices) == indptr[-1]
        if self.graph_size:
            assert len(last_page_len) == self.graph_size, "the batch size is fixed"
            for buffer, part in zip(self._buffers, parts, strict=True):
                buffer[: len(part)].copy_(part)  # raises if it does not fit
        else:
            self._buffers = tuple(part.clone() for part in parts)
        self._set(num_qo_heads, num_kv_heads, head_dim, page_size, options)

    def run(self, q, paged_kv_cache, out=None, kv_cache_sf=None):
        keys, values = self._check(q, paged_kv_cache, kv_cache_sf)
        indptr, indices, last = self._buffers
        assert len(q) == len(last)
        rows = [
            self._attend(q[i : i + 1], keys, values, indices[indptr[i] : indptr[i + 1]],
                         int(last[i]), False)
            for i in range(len(q))
        ]  # fmt: skip
        return torch.cat(rows) if out is None else out.copy_(torch.cat(rows))


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, causal=False, **options,
    ) -> None:  # fmt: skip
        parts = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(part.dtype == torch.int32 for part in parts)
        assert len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        self._parts = tuple(part.clone() for part in parts)
        self._causal = causal
        self._set(num_qo_heads, num_kv_heads, head_dim_qk, page_size, options)

    def run(self, q, paged_kv_cache, out=None, kv_cache_sf=None):
        keys, values = self._check(q, paged_kv_cache, kv_cache_sf)
        queries, indptr, indices, last = self._parts
        assert len(q) == queries[-1]
        rows = [
            self._attend(q[queries[i] : queries[i + 1]], keys, values,
                         indices[indptr[i] : indptr[i + 1]], int(last[i]), self._causal)
            for i in range(len(last))
        ]  # fmt: skip
        return torch.cat(rows) if out is None else out.copy_(torch.cat(rows))
