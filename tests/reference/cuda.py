"""What the tests of the CUDA kernels share.

With OASISKV_SMALL_SHAPES=1 the shapes are small enough for compute-sanitizer's racecheck.
"""

from __future__ import annotations

import math
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


def attention_reference(q, pool, pages, rows, visible, heads, group):
    """[rows, Hq, D] float64; pool [page, H, 2, 16, D]."""
    kv = pool[pages.long()].double()  # [n, H, 2, 16, D]
    keys = kv[:, :, 0].transpose(0, 1).flatten(1, 2)  # [H, n * 16, D]
    values = kv[:, :, 1].transpose(0, 1).flatten(1, 2)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for r in range(rows):
        n = visible + r
        for h in range(heads):
            x = q[r, h * group : (h + 1) * group].double() @ keys[h, :n].T / math.sqrt(q.shape[-1])
            out[r, h * group : (h + 1) * group] = x.softmax(dim=-1) @ values[h, :n]
    return out


def score_reference(q: torch.Tensor, summary: torch.Tensor, kind: str) -> torch.Tensor:
    """q [lanes, D], summary [blocks, 2, D] -> [lanes, blocks] float64."""
    q, a, b = q.double(), summary[:, 0].double(), summary[:, 1].double()
    if kind == "mean_std":
        return q @ a.T + q.abs() @ b.T
    if kind == "minmax":
        return q.clamp(min=0) @ a.T + q.clamp(max=0) @ b.T
    return torch.maximum(q @ a.T, q @ b.T)
