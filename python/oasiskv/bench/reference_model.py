"""The same weights in transformers: the baseline to be compared with."""

from __future__ import annotations

from typing import Any

import torch

from oasiskv.checkpoint import load_checkpoint, resolve_model
from oasiskv.errors import ConfigError


def transformers_llama(model: str) -> Any:
    """A float32 `LlamaForCausalLM` (SDPA, eval mode) with the checkpoint's weights. Needs the extra `dev`.

    Raises CheckpointError, and ConfigError for a model that is not a plain tied llama.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    config, weights = load_checkpoint(resolve_model(model, "float32"))
    if config.architecture != "LlamaForCausalLM" or config.rotary_scaling or config.attn_bias or not config.share_embedding_table:
        raise ConfigError(f"--model {model}: the comparison knows tied llamas without RoPE scaling only; give --skip-transformers")
    hf_config = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_size,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.norm_epsilon,
        rope_theta=config.rotary_base,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    with torch.device("meta"):
        hf = LlamaForCausalLM(hf_config)
    hf = hf.to_empty(device="cpu").float()
    hf.load_state_dict(_state(config, weights), strict=False)
    hf.tie_weights()
    hf.model.rotary_emb.__init__(hf_config)  # its buffers are computed, not stored
    return hf.eval()


def _state(config: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    q = config.num_attention_heads * config.head_size
    kv = config.num_key_value_heads * config.head_size
    state = {
        "model.embed_tokens.weight": weights["transformer.vocab_embedding.weight"],
        "model.norm.weight": weights["transformer.ln_f.weight"],
    }
    for i in range(config.num_hidden_layers):
        ours, theirs = f"transformer.layers.{i}.", f"model.layers.{i}."
        q_w, k_w, v_w = weights[ours + "attention.qkv.weight"].split([q, kv, kv])
        state |= {
            theirs + "self_attn.q_proj.weight": q_w,
            theirs + "self_attn.k_proj.weight": k_w,
            theirs + "self_attn.v_proj.weight": v_w,
            theirs + "self_attn.o_proj.weight": weights[ours + "attention.dense.weight"],
            theirs + "mlp.gate_proj.weight": weights[ours + "mlp.fc.weight"],
            theirs + "mlp.up_proj.weight": weights[ours + "mlp.gate.weight"],
            theirs + "mlp.down_proj.weight": weights[ours + "mlp.proj.weight"],
            theirs + "input_layernorm.weight": weights[ours + "input_layernorm.weight"],
            theirs + "post_attention_layernorm.weight": weights[ours + "post_layernorm.weight"],
        }
    return {k: v.float() for k, v in state.items()}
