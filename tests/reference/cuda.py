"""What the tests of the CUDA kernels share.

With OASISKV_SMALL_SHAPES=1 the shapes are small enough for compute-sanitizer's racecheck.
"""

from __future__ import annotations

import os

import pytest
import torch

from oasiskv import _core

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not hasattr(_core, "cuda"), reason="needs a GPU and a core built with CUDA"),
]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
NAN = float("nan")
SMALL = os.environ.get("OASISKV_SMALL_SHAPES") == "1"


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.double() - expected).norm() / expected.norm())
