"""Where weights come from, and the safetensors kind of it.

A source knows the names, shapes and bytes of a checkpoint under Hugging Face names and yields its
tensors one at a time; the loader copies each straight into the parameter that it is part of, so
that no second copy of the model exists.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from core.errors import ModelError
from engine.model.host_memory import release_pages


class WeightSource(Protocol):
    """One checkpoint."""

    config: dict[str, Any]  # as config.json has it
    shapes: dict[str, tuple[int, ...]]  # of every tensor
    norms_include_offset: bool  # a family's 1 + weight is stored as the sum
    is_mapped: bool  # tensors are parts of a mapped file

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor once, in the order of the file; valid until the next is asked for. What
        has to be computed comes in `dtype`, all else as it is stored."""
        ...

    def sample(self, name: str) -> bytes:
        """A few of a tensor's own bytes and its stored type, for a fingerprint."""
        ...


class SafetensorsSource:
    """A folder of `*.safetensors` files, memory mapped."""

    norms_include_offset = False
    is_mapped = True

    def __init__(self, path: Path, config: dict[str, Any]) -> None:
        self.config = config
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")):
            with _opened(file) as handle:
                for name in handle.keys():  # noqa: SIM118 - a handle is no mapping
                    if name in self._files:
                        raise ModelError(
                            f"{name} is in both {self._files[name].name} and {file.name}"
                        )
                    self._files[name] = file
                    self.shapes[name] = tuple(handle.get_slice(name).get_shape())
        if not self._files:
            raise ModelError(f"{path}: no *.safetensors file")

    def read(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for file in sorted(set(self._files.values())):
            with _opened(file) as handle:
                for name in handle.offset_keys():
                    tensor = handle.get_tensor(name)
                    yield name, tensor
                    release_pages(tensor.data_ptr(), tensor.nbytes)
                    del tensor

    def sample(self, name: str) -> bytes:
        shape = self.shapes[name]
        with _opened(self._files[name]) as handle:
            view = handle.get_slice(name)
            described = f"{view.get_dtype()}".encode()
            if not shape or 0 in shape:
                return described
            rows = {0, shape[0] // 2, shape[0] - 1}
            pieces = (view[row : row + 1].flatten()[:64].contiguous() for row in sorted(rows))
            return described + b"".join(p.view(torch.uint8).numpy().tobytes() for p in pieces)


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ModelError(f"cannot read {file}: {error}") from error
