"""A GGUF file's metadata and dequantised tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from oasiskv.errors import CheckpointError


class GgufFile:
    """Metadata and dequantised tensors. Raises CheckpointError naming the file and the key."""

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        self.path = path
        try:
            self._reader = GGUFReader(str(path))
        except FileNotFoundError:
            raise CheckpointError(f"{path} is missing") from None
        except Exception as error:  # the reader raises whatever its parsing runs into
            raise CheckpointError(f"{path} is not a readable GGUF file: {error}") from None
        self._tensors = {t.name: t for t in self._reader.tensors}

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def need(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise CheckpointError(f"{self.path}: metadata {key} is missing")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; one a layer (a list) is not supported."""
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"{self.path}: metadata {key} = {value!r}: must be a positive integer")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.need(key)
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise CheckpointError(f"{self.path}: metadata {key} must be a list of strings")
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def tensor(self, name: str) -> torch.Tensor:
        from gguf.quants import dequantize

        if name not in self._tensors:
            raise CheckpointError(f"{self.path}: tensor {name} is missing")
        t = self._tensors[name]
        try:
            return torch.from_numpy(np.array(dequantize(t.data, t.tensor_type), dtype=np.float32))
        except (NotImplementedError, ValueError) as error:
            raise CheckpointError(f"{self.path}: tensor {name} ({t.tensor_type.name}) cannot be dequantised: {error}") from None
