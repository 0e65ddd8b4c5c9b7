"""The presets' figures, and random weights for them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from oasiskv.models.presets import PRESETS, dummy_weights
from oasiskv.models.rope import rope_tables


# The models' own parameter counts.
@pytest.mark.parametrize(("name", "count"), [("qwen3-8b", 8_190_735_360), ("qwen3-4b", 4_022_468_096), ("llama-3.1-8b", 8_030_261_248)])
def test_parameter_counts(name: str, count: int) -> None:
    config = PRESETS[name]
    assert sum(math.prod(shape) for shape in config.shapes().values()) == count
    cos, _ = rope_tables(config, 32)
    assert cos.shape == (32, 64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dummy_weights(dtype: str) -> None:
    config = replace(PRESETS["qwen3-4b"], vocab_size=100, hidden_size=64, intermediate_size=96, num_hidden_layers=2)
    weights, again, other = (dummy_weights(config, dtype, seed, "cpu") for seed in (1, 1, 2))
    assert {name: tuple(t.shape) for name, t in weights.items()} == config.shapes()
    for name, tensor in weights.items():
        assert tensor.dtype == getattr(torch, dtype)
        assert torch.equal(tensor, again[name])
        if tensor.dim() == 1:
            assert (tensor == 1).all()
        else:
            assert not torch.equal(tensor, other[name])
            assert 0.018 < tensor.float().std() < 0.022
