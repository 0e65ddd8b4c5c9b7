"""GGUF files (llama, qwen2, qwen3) -> our checkpoint, tokenizer and chat template included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from oasiskv.checkpoint.gguf_file import GgufFile
from oasiskv.checkpoint.gguf_tokenizer import tokenizer_files
from oasiskv.checkpoint.model_config import ModelConfig
from oasiskv.errors import CheckpointError

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def import_gguf(path: Path, dtype: str) -> tuple[ModelConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """Config, weights and tokenizer files. Raises CheckpointError naming what is not supported."""
    file = GgufFile(path)
    config = _config(file, dtype)
    return config, _weights(file, config), tokenizer_files(file)


def _config(file: GgufFile, dtype: str) -> ModelConfig:
    family = file.need("general.architecture")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise CheckpointError(f"{file.path}: architecture {family!r} is not supported: use one of {', '.join(_FAMILIES)}")
    if file.get(f"{family}.expert_count"):
        raise CheckpointError(f"{file.path}: mixture-of-experts models are not supported")
    if file.get(f"{family}.attention.sliding_window"):
        raise CheckpointError(f"{file.path}: sliding-window attention is not supported")
    scaling = file.get(f"{family}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in file:
        raise CheckpointError(f"{file.path}: RoPE scaling in GGUF ({scaling}) is not supported: convert from the Hugging Face folder")
    if file.get(f"{family}.rope.scale_linear", 1) != 1:
        raise CheckpointError(f"{file.path}: rope.scale_linear is not supported: convert from the Hugging Face folder")
    heads = file.count(f"{family}.attention.head_count")
    hidden = file.count(f"{family}.embedding_length")
    try:
        config = ModelConfig(
            architecture=_FAMILIES[family],
            dtype=dtype,
            vocab_size=len(file.texts("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            num_hidden_layers=file.count(f"{family}.block_count"),
            num_attention_heads=heads,
            num_key_value_heads=file.count(f"{family}.attention.head_count_kv", heads),
            head_size=file.count(f"{family}.attention.key_length", max(1, hidden // heads)),
            intermediate_size=file.count(f"{family}.feed_forward_length"),
            norm_epsilon=file.need(f"{family}.attention.layer_norm_rms_epsilon"),
            rotary_base=file.get(f"{family}.rope.freq_base", 10000.0),
            max_position_embeddings=file.count(f"{family}.context_length"),
            share_embedding_table="output.weight" not in file,
            attn_bias="blk.0.attn_q.bias" in file,
            qk_layernorm="blk.0.attn_q_norm.weight" in file,
        )
    except CheckpointError as error:
        raise CheckpointError(f"{file.path}: {error}") from None
    rotated = file.get(f"{family}.rope.dimension_count", config.head_size)
    if rotated != config.head_size:
        raise CheckpointError(f"{file.path}: rope.dimension_count = {rotated} is not supported: RoPE must cover the whole head")
    return config


def _unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """llama's GGUF interleaves the two halves of each head's rotary dimensions; put them back side by side."""
    return weight.view(heads, weight.shape[0] // heads // 2, 2, -1).transpose(1, 2).reshape(weight.shape)


def _weights(file: GgufFile, config: ModelConfig) -> dict[str, torch.Tensor]:
    permuted = config.architecture == "LlamaForCausalLM"

    def qk(name: str, heads: int) -> torch.Tensor:
        return _unpermute(file.tensor(name), heads) if permuted else file.tensor(name)

    ours = {
        "transformer.vocab_embedding.weight": file.tensor("token_embd.weight"),
        "transformer.ln_f.weight": file.tensor("output_norm.weight"),
    }
    if not config.share_embedding_table:
        ours["lm_head.weight"] = file.tensor("output.weight")
    for i in range(config.num_hidden_layers):
        a, b = f"transformer.layers.{i}.", f"blk.{i}."
        for kind in ("weight", "bias") if config.attn_bias else ("weight",):
            ours[f"{a}attention.qkv.{kind}"] = torch.cat(
                [
                    qk(f"{b}attn_q.{kind}", config.num_attention_heads),
                    qk(f"{b}attn_k.{kind}", config.num_key_value_heads),
                    file.tensor(f"{b}attn_v.{kind}"),
                ]
            )
        if config.qk_layernorm:
            ours[a + "attention.q_layernorm.weight"] = file.tensor(b + "attn_q_norm.weight")
            ours[a + "attention.k_layernorm.weight"] = file.tensor(b + "attn_k_norm.weight")
        ours[a + "attention.dense.weight"] = file.tensor(b + "attn_output.weight")
        ours[a + "mlp.fc.weight"] = file.tensor(b + "ffn_gate.weight")
        ours[a + "mlp.gate.weight"] = file.tensor(b + "ffn_up.weight")
        ours[a + "mlp.proj.weight"] = file.tensor(b + "ffn_down.weight")
        ours[a + "input_layernorm.weight"] = file.tensor(b + "attn_norm.weight")
        ours[a + "post_layernorm.weight"] = file.tensor(b + "ffn_norm.weight")
    return ours
