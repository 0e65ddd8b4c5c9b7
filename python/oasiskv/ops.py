"""The core's per-row operations on torch tensors: float32, contiguous, on the CPU. Results do not depend on the batch."""

from __future__ import annotations

import torch

from oasiskv import _core


def _check(x: torch.Tensor, columns: int, what: str) -> None:
    if x.dtype != torch.float32 or x.device.type != "cpu" or x.dim() != 2 or x.shape[1] != columns or not x.is_contiguous():
        raise ValueError(f"{what}: need contiguous float32 [rows, {columns}], got {x.dtype} {list(x.shape)}")


class PackedLinear:
    """weight [n, k] (any float dtype, copied) and bias [n] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        if weight.dim() != 2:
            raise ValueError(f"PackedLinear: need weight [n, k], got {list(weight.shape)}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ValueError(f"PackedLinear: need bias [{weight.shape[0]}], got {list(bias.shape)}")
        weight = weight.float().contiguous()
        self.out_features, self.in_features = weight.shape
        self._packed = _core.PackedWeight(weight.data_ptr(), self.out_features, self.in_features)
        self._bias = None if bias is None else bias.float().contiguous()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, k] -> [rows, n]"""
        _check(x, self.in_features, "linear")
        out = torch.empty(x.shape[0], self.out_features)
        bias = 0 if self._bias is None else self._bias.data_ptr()
        _core.linear(x.data_ptr(), x.shape[0], self._packed, bias, out.data_ptr())
        return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [rows, dim], weight [dim] -> x / rms(x) * weight"""
    _check(x, weight.shape[0], "rms_norm")
    if weight.dtype != torch.float32 or weight.dim() != 1 or not weight.is_contiguous():
        raise ValueError(f"rms_norm: need contiguous float32 weight [{x.shape[1]}], got {weight.dtype} {list(weight.shape)}")
    out = torch.empty_like(x)
    _core.rms_norm(x.data_ptr(), x.shape[0], x.shape[1], weight.data_ptr(), eps, out.data_ptr())
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """gate_up [rows, 2 * inter], gate first -> silu(gate) * up [rows, inter]"""
    if gate_up.shape[-1] % 2:
        raise ValueError(f"silu_mul: need an even number of columns, got {list(gate_up.shape)}")
    _check(gate_up, gate_up.shape[-1], "silu_mul")
    out = torch.empty(gate_up.shape[0], gate_up.shape[1] // 2)
    _core.silu_mul(gate_up.data_ptr(), gate_up.shape[0], out.shape[1], out.data_ptr())
    return out
