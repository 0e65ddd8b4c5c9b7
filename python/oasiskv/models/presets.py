"""Shapes of public models (their configurations' figures) and random weights, for benchmarks without checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from oasiskv.checkpoint import ModelConfig

PRESETS = {
    "qwen3-8b": ModelConfig(
        architecture="Qwen3ForCausalLM", dtype="bfloat16", vocab_size=151_936, hidden_size=4096, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_size=128, intermediate_size=12_288, norm_epsilon=1e-6, rotary_base=1e6,
        max_position_embeddings=40_960, qk_layernorm=True,
    ),
    "qwen3-4b": ModelConfig(
        architecture="Qwen3ForCausalLM", dtype="bfloat16", vocab_size=151_936, hidden_size=2560, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_size=128, intermediate_size=9728, norm_epsilon=1e-6, rotary_base=1e6,
        max_position_embeddings=40_960, share_embedding_table=True, qk_layernorm=True,
    ),
    "llama-3.1-8b": ModelConfig(
        architecture="LlamaForCausalLM", dtype="bfloat16", vocab_size=128_256, hidden_size=4096, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_size=128, intermediate_size=14_336, norm_epsilon=1e-5, rotary_base=5e5,
        max_position_embeddings=131_072,
        rotary_scaling={
            "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip


def dummy_weights(config: ModelConfig, dtype: str, seed: int, device: str = "cuda") -> dict[str, Tensor]:
    """Random weights in `dtype`, made on the device: every tensor of config.shapes(). Norms are 1, the rest has a standard deviation
    of 0.02, with which activations stay finite.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = {}
    for name, shape in config.shapes().items():
        tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        is_norm = "layernorm" in name or "ln_f" in name
        weights[name] = tensor.fill_(1) if is_norm else tensor.normal_(0, 0.02, generator=generator)
    return weights
