"""Rotary tables: default, linear, llama3 and YaRN scaling (the formulas of the models' own configurations)."""

from __future__ import annotations

import math
from typing import Any

import torch

from oasiskv.checkpoint import ModelConfig


def rope_tables(config: ModelConfig, max_seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos, sin: float32 [max_seq_len, head_size / 2], for half-split rotation; YaRN's attention factor is multiplied in."""
    frequencies, factor = inverse_frequencies(config)
    angles = torch.arange(max_seq_len, dtype=torch.float32)[:, None] * frequencies[None, :]
    return (angles.cos() * factor).contiguous(), (angles.sin() * factor).contiguous()


def inverse_frequencies(config: ModelConfig) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [head_size / 2] and the factor on cos and sin. ModelConfig has checked the scaling."""
    dim, base = config.head_size, config.rotary_base
    plain = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.int64).float() / dim)
    scaling = config.rotary_scaling
    if not scaling:
        return plain, 1.0
    kind = scaling["type"]
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "llama3":
        return _llama3(plain, scaling), 1.0
    return _yarn(plain, base, dim, scaling, config.max_position_embeddings)


def _llama3(plain: torch.Tensor, s: dict[str, Any]) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    old = s["original_max_position_embeddings"]
    wavelength = 2 * math.pi / plain
    smooth = (old / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    between = (1 - smooth) * plain / s["factor"] + smooth * plain
    scaled = torch.where(wavelength > old / s["low_freq_factor"], plain / s["factor"], plain)
    medium = (wavelength >= old / s["high_freq_factor"]) & (wavelength <= old / s["low_freq_factor"])
    return torch.where(medium, between, scaled)


def _yarn(plain: torch.Tensor, base: float, dim: int, s: dict[str, Any], max_position: int) -> tuple[torch.Tensor, float]:
    """NTK-by-parts interpolation (arXiv 2309.00071, section 3.2) and its attention temperature."""
    factor = s["factor"]
    old = s.get("original_max_position_embeddings") or max_position

    def dimension_of(rotations: float) -> float:
        return dim * math.log(old / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension_of(s.get("beta_fast") or 32), dimension_of(s.get("beta_slow") or 1)
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = ((torch.arange(dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    kept = 1 - ramp
    periods = base ** (torch.arange(0, dim, 2).float() / dim)
    # In transformers' order of operations: positions multiply a difference in the last bit.
    frequencies = 1.0 / (factor * periods) * (1 - kept) + plain * kept
    return frequencies, _yarn_attention(factor, s)


def _yarn_attention(factor: float, s: dict[str, Any]) -> float:
    def mscale(coefficient: float) -> float:
        return 0.1 * coefficient * math.log(factor) + 1.0 if factor > 1 else 1.0

    if s.get("attention_factor") is not None:
        return float(s["attention_factor"])
    if s.get("mscale") and s.get("mscale_all_dim"):
        return mscale(s["mscale"]) / mscale(s["mscale_all_dim"])
    return mscale(1.0)
