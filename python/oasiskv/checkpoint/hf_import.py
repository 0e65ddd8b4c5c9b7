"""Hugging Face folders (llama, qwen2, qwen3) -> our checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from oasiskv.checkpoint.model_config import ModelConfig
from oasiskv.checkpoint.store import load_tensors, read_json
from oasiskv.errors import CheckpointError

_FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


def import_hf(folder: Path, dtype: str) -> tuple[ModelConfig, dict[str, torch.Tensor], dict[str, Any]]:
    """Config, weights and tokenizer files. Raises CheckpointError naming what is not supported."""
    raw = read_json(folder / "config.json")
    config = _config(raw, dtype, str(folder / "config.json"))
    if (folder / "adapter_config.json").exists():
        raise CheckpointError(f"{folder} holds a LoRA adapter, which is not supported: merge it into the base model first")
    weights = _rename(config, _all_tensors(folder), str(folder))
    return config, weights, _tokenizer_files(folder, raw)


def _config(raw: dict[str, Any], dtype: str, where: str) -> ModelConfig:
    family = raw.get("model_type")
    if family not in _FAMILIES:
        raise CheckpointError(f"{where}: model_type {family!r} is not supported: use one of {', '.join(_FAMILIES)}")
    _refuse(raw, family, where)
    heads = _need(raw, "num_attention_heads", where)
    parameters = raw.get("rope_parameters") or {}
    return ModelConfig(
        architecture=_FAMILIES[family],
        dtype=dtype,
        vocab_size=_need(raw, "vocab_size", where),
        hidden_size=_need(raw, "hidden_size", where),
        num_hidden_layers=_need(raw, "num_hidden_layers", where),
        num_attention_heads=heads,
        num_key_value_heads=raw.get("num_key_value_heads") or heads,
        head_size=raw.get("head_dim") or _need(raw, "hidden_size", where) // heads,
        intermediate_size=_need(raw, "intermediate_size", where),
        norm_epsilon=_need(raw, "rms_norm_eps", where),
        rotary_base=float(raw.get("rope_theta") or parameters.get("rope_theta") or 10000.0),
        max_position_embeddings=_need(raw, "max_position_embeddings", where),
        rotary_scaling=_scaling(raw.get("rope_scaling") or parameters, where),
        share_embedding_table=bool(raw.get("tie_word_embeddings", False)),
        attn_bias=family == "qwen2" or bool(raw.get("attention_bias")),
        qk_layernorm=family == "qwen3",
    )


def _need(raw: dict[str, Any], field: str, where: str) -> Any:
    if raw.get(field) is None:
        raise CheckpointError(f"{where}: missing field {field}")
    return raw[field]


def _refuse(raw: dict[str, Any], family: str, where: str) -> None:
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise CheckpointError(f"{where}: quantised weights ({method}) are not supported: use the unquantised model")
    if raw.get("num_experts") or raw.get("num_local_experts"):
        raise CheckpointError(f"{where}: mixture-of-experts models are not supported")
    window = raw.get("sliding_window")
    if window and raw.get("use_sliding_window", family == "llama"):
        raise CheckpointError(f"{where}: sliding_window = {window} is not supported: attention here is over the full context")
    if "sliding_attention" in (raw.get("layer_types") or []):
        raise CheckpointError(f"{where}: layer_types has sliding_attention, which is not supported")
    if raw.get("mlp_bias"):
        raise CheckpointError(f"{where}: mlp_bias is not supported")
    if family == "llama" and raw.get("attention_bias"):
        raise CheckpointError(f"{where}: attention_bias of a llama (bias on the output projection too) is not supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise CheckpointError(f"{where}: hidden_act = {raw['hidden_act']!r} is not supported: only silu")
    if raw.get("pretraining_tp", 1) not in (None, 1):
        raise CheckpointError(f"{where}: pretraining_tp = {raw['pretraining_tp']} is not supported: only 1")


def _scaling(raw: dict[str, Any], where: str) -> dict[str, Any] | None:
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind == "default":
        return None
    if kind not in ("linear", "llama3", "yarn"):
        raise CheckpointError(f"{where}: rope type {kind!r} is not supported: use default, linear, llama3 or yarn")
    return {"type": kind} | {k: v for k, v in raw.items() if k not in ("type", "rope_type", "rope_theta")}


def _all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted(set(read_json(index).get("weight_map", {}).values()))
        bad = [f for f in files if Path(f).name != f]
        if bad:
            raise CheckpointError(f"{index}: shard name {bad[0]!r} leaves the folder")
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
    files = {n: (folder / n).read_text(encoding="utf-8") for n in _TOKENIZER_FILES if (folder / n).exists()}
    if "generation_config.json" not in files:
        files["generation_config.json"] = {k: config[k] for k in ("bos_token_id", "eos_token_id") if config.get(k) is not None}
    return files
