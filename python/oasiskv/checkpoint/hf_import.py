"""Hugging Face folders (llama, qwen2, qwen3) -> our checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from oasiskv.checkpoint.model_config import ModelConfig
from oasiskv.checkpoint.store import load_tensors, read_json, read_text
from oasiskv.errors import CheckpointError

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def import_hf(folder: Path, dtype: str) -> tuple[ModelConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """Config, weights and tokenizer files. Raises CheckpointError naming what is not supported."""
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} holds a LoRA adapter, which is not supported: merge it into the base model first")
    raw = read_json(folder / "config.json")
    try:
        config = _config(raw, dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / 'config.json'}: {error}") from None
    weights = _rename(config, _all_tensors(folder), str(folder))
    return config, weights, _tokenizer_files(folder, raw)


def _config(raw: dict[str, Any], dtype: str) -> ModelConfig:
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in _FAMILIES:
        raise CheckpointError(f"model_type {family!r} is not supported: use one of {', '.join(_FAMILIES)}")
    _refuse(raw, family)
    heads = _need(raw, "num_attention_heads")
    parameters = _object(raw, "rope_parameters")
    return ModelConfig(
        architecture=_FAMILIES[family],
        dtype=dtype,
        vocab_size=_need(raw, "vocab_size"),
        hidden_size=_need(raw, "hidden_size"),
        num_hidden_layers=_need(raw, "num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or (128 if family == "qwen3" else _need(raw, "hidden_size") // heads),
        intermediate_size=_need(raw, "intermediate_size"),
        norm_epsilon=raw.get("rms_norm_eps", 1e-6),
        rotary_base=raw.get("rope_theta") or parameters.get("rope_theta") or 10000.0,
        max_position_embeddings=_need(raw, "max_position_embeddings"),
        rotary_scaling=_scaling(_object(raw, "rope_scaling") or parameters),
        share_embedding_table=bool(raw.get("tie_word_embeddings", False)),
        attn_bias=family == "qwen2",
        qk_layernorm=family == "qwen3",
    )


def _need(raw: dict[str, Any], field: str) -> Any:
    if raw.get(field) is None:
        raise CheckpointError(f"missing field {field}")
    if isinstance(raw[field], bool) or not isinstance(raw[field], int) or raw[field] < 1:
        raise CheckpointError(f"{field} = {raw[field]!r}: must be a positive integer")
    return raw[field]


def _object(raw: dict[str, Any], field: str) -> dict[str, Any]:
    value = raw.get(field) or {}
    if not isinstance(value, dict):
        raise CheckpointError(f"{field} = {value!r}: must be an object")
    return value


def _refuse(raw: dict[str, Any], family: str) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"]
        raise CheckpointError(f"quantization_config = {method}: quantised weights are not supported, use the unquantised model")
    if raw.get("num_experts") or raw.get("num_local_experts"):
        raise CheckpointError("num_experts: mixture-of-experts models are not supported")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", family == "llama"):
        raise CheckpointError(f"sliding_window = {window} is not supported: attention here is over the full context")
    layer_types = raw.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise CheckpointError(f"layer_types = {layer_types!r}: must be a list")
    if "sliding_attention" in layer_types:
        raise CheckpointError("layer_types has sliding_attention, which is not supported")
    if raw.get("mlp_bias"):
        raise CheckpointError("mlp_bias is not supported")
    if family != "qwen2" and raw.get("attention_bias"):
        raise CheckpointError(f"attention_bias of a {family} (bias on the output projection too) is not supported")
    architectures = raw.get("architectures") or [_FAMILIES[family]]
    if architectures != [_FAMILIES[family]]:
        raise CheckpointError(f"architectures {architectures} is not supported: use a {_FAMILIES[family]}")
    partial = _object(raw, "rope_parameters").get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
    if partial != 1:
        raise CheckpointError(f"partial_rotary_factor = {partial} is not supported: RoPE must cover the whole head")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"hidden_act = {raw['hidden_act']!r} is not supported: only silu")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise CheckpointError(f"pretraining_tp = {raw['pretraining_tp']} is not supported: only 1")


def _scaling(raw: dict[str, Any]) -> dict[str, Any] | None:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    return {"type": kind} | {k: v for k, v in raw.items() if k not in ("type", "rope_type", "rope_theta")}


def _all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CheckpointError(f"{index}: weight_map = {shards!r}: must map tensor names to files")
        bad = [f for f in shards.values() if not isinstance(f, str) or Path(f).name != f]
        if bad:
            raise CheckpointError(f"{index}: shard name {bad[0]!r} leaves the folder")
        files = sorted(set(shards.values()))
    elif (folder / "model.safetensors").exists():
        files = ["model.safetensors"]
    else:
        raise CheckpointError(f"{folder} has no model.safetensors and no index of shards; pickled .bin weights are not read")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        tensors |= load_tensors(folder / file)
    return tensors


def _rename(config: ModelConfig, theirs: dict[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    def take(name: str) -> torch.Tensor:
        if name not in theirs:
            raise CheckpointError(f"{where}: tensor {name} is missing")
        return theirs[name]

    ours = {"transformer.vocab_embedding.weight": take("model.embed_tokens.weight"), "transformer.ln_f.weight": take("model.norm.weight")}
    if not config.share_embedding_table:
        ours["lm_head.weight"] = take("lm_head.weight")
    for i in range(config.num_hidden_layers):
        a, b = f"transformer.layers.{i}.", f"model.layers.{i}."
        ours[a + "attention.qkv.weight"] = torch.cat([take(f"{b}self_attn.{p}_proj.weight") for p in "qkv"])
        if config.attn_bias:
            ours[a + "attention.qkv.bias"] = torch.cat([take(f"{b}self_attn.{p}_proj.bias") for p in "qkv"])
        if config.qk_layernorm:
            ours[a + "attention.q_layernorm.weight"] = take(b + "self_attn.q_norm.weight")
            ours[a + "attention.k_layernorm.weight"] = take(b + "self_attn.k_norm.weight")
        ours[a + "attention.dense.weight"] = take(b + "self_attn.o_proj.weight")
        ours[a + "mlp.fc.weight"] = take(b + "mlp.gate_proj.weight")
        ours[a + "mlp.gate.weight"] = take(b + "mlp.up_proj.weight")
        ours[a + "mlp.proj.weight"] = take(b + "mlp.down_proj.weight")
        ours[a + "input_layernorm.weight"] = take(b + "input_layernorm.weight")
        ours[a + "post_layernorm.weight"] = take(b + "post_attention_layernorm.weight")
    return ours


def _tokenizer_files(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    if not (folder / "tokenizer.json").exists():
        raise CheckpointError(f"{folder / 'tokenizer.json'} is missing: save the fast tokenizer with the model")
    files = {n: read_text(folder / n) for n in _TOKENIZER_FILES if (folder / n).exists()}
    if "generation_config.json" not in files:
        files["generation_config.json"] = {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}
    return files
