"""The fields of a checkpoint's config.json that this engine reads, and what it refuses."""

from __future__ import annotations

import sys
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any

from oasiskv.config import DTYPES
from oasiskv.errors import CheckpointError

ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
# What a config may ask for before anything is allocated by it; far above any model.
_SIZES = {
    "vocab_size": 1 << 24, "hidden_size": 1 << 20, "num_hidden_layers": 1 << 12, "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14, "head_size": 1 << 12, "intermediate_size": 1 << 24, "max_position_embeddings": 1 << 24,
}  # fmt: skip
# What a scaling of each type must say, and what it may, beside its type.
_ROPE_FIELDS: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}
_ROPE_OPTIONAL = ("original_max_position_embeddings", "attention_factor", "mscale", "mscale_all_dim", "beta_fast", "beta_slow")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= sys.float_info.max


def _check_rope(scaling: Any) -> None:
    if not isinstance(scaling, dict):
        raise CheckpointError(f"rotary_scaling = {scaling!r}: must be null or an object with a type")
    kind = scaling.get("type")
    if not isinstance(kind, str) or kind not in _ROPE_FIELDS:
        raise CheckpointError(f"rotary_scaling type {kind!r} is not supported: use none, {', '.join(_ROPE_FIELDS)}")
    for name in _ROPE_FIELDS[kind]:
        if not _positive(scaling.get(name)):
            raise CheckpointError(f"rotary_scaling.{name} = {scaling.get(name)!r}: {kind} needs a positive number")
    for name in _ROPE_OPTIONAL:
        if scaling.get(name) is not None and not _positive(scaling[name]):
            raise CheckpointError(f"rotary_scaling.{name} = {scaling[name]!r}: must be a positive number")
    if kind == "llama3" and scaling["high_freq_factor"] <= scaling["low_freq_factor"]:
        raise CheckpointError(f"rotary_scaling.high_freq_factor = {scaling['high_freq_factor']}: must be above low_freq_factor")


@dataclass(frozen=True)
class ModelConfig:
    """Names are TensorRT-LLM's. rotary_scaling: None or {"type": linear|llama3|yarn, ...} with Hugging Face's parameter names."""

    architecture: str
    dtype: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int
    intermediate_size: int
    norm_epsilon: float
    rotary_base: float
    max_position_embeddings: int
    rotary_scaling: dict[str, Any] | None = None
    share_embedding_table: bool = False  # the head is the embedding
    attn_bias: bool = False  # bias on q, k and v
    qk_layernorm: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise CheckpointError(f"architecture {self.architecture!r} is not supported: use one of {', '.join(ARCHITECTURES)}")
        if self.dtype not in DTYPES:
            raise CheckpointError(f"dtype {self.dtype!r} is not supported: use one of {', '.join(DTYPES)}")
        for field, limit in _SIZES.items():
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
                raise CheckpointError(f"config field {field} = {value!r}: must be an integer in 1..{limit}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise CheckpointError(
                f"num_attention_heads = {self.num_attention_heads} is not a multiple of num_key_value_heads = {self.num_key_value_heads}"
            )
        for field in ("norm_epsilon", "rotary_base"):
            value = getattr(self, field)
            if not _positive(value):
                raise CheckpointError(f"config field {field} = {value!r}: must be a positive number")
        for field in ("share_embedding_table", "attn_bias", "qk_layernorm"):
            if not isinstance(getattr(self, field), bool):
                raise CheckpointError(f"config field {field} = {getattr(self, field)!r}: must be true or false")
        if self.head_size % 2:
            raise CheckpointError(f"head_size = {self.head_size}: RoPE needs an even number")
        if self.rotary_scaling is not None:
            _check_rope(self.rotary_scaling)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint and its shape [out, in]."""
        q, kv = self.num_attention_heads * self.head_size, self.num_key_value_heads * self.head_size
        hidden, inter = self.hidden_size, self.intermediate_size
        shapes: dict[str, tuple[int, ...]] = {
            "transformer.vocab_embedding.weight": (self.vocab_size, hidden),
            "transformer.ln_f.weight": (hidden,),
        }
        if not self.share_embedding_table:
            shapes["lm_head.weight"] = (self.vocab_size, hidden)
        for i in range(self.num_hidden_layers):
            layer: dict[str, tuple[int, ...]] = {
                "input_layernorm.weight": (hidden,),
                "post_layernorm.weight": (hidden,),
                "attention.qkv.weight": (q + 2 * kv, hidden),
                "attention.dense.weight": (hidden, q),
                "mlp.fc.weight": (inter, hidden),
                "mlp.gate.weight": (inter, hidden),
                "mlp.proj.weight": (hidden, inter),
            }
            if self.attn_bias:
                layer["attention.qkv.bias"] = (q + 2 * kv,)
            if self.qk_layernorm:
                layer["attention.q_layernorm.weight"] = layer["attention.k_layernorm.weight"] = (self.head_size,)
            shapes |= {f"transformer.layers.{i}.{name}": shape for name, shape in layer.items()}
        return shapes

    def to_json(self) -> dict[str, Any]:
        mapping = {"world_size": 1, "tp_size": 1, "pp_size": 1}
        return asdict(self) | {"hidden_act": "silu", "position_embedding_type": "rope_gpt_neox", "mapping": mapping, "quantization": {}}

    @classmethod
    def from_json(cls, raw: dict[str, Any], where: str) -> ModelConfig:
        """Raises CheckpointError naming the field."""
        for field in ("mapping", "quantization"):
            if not isinstance(raw.get(field) or {}, dict):
                raise CheckpointError(f"{where}: {field} = {raw[field]!r}: must be an object")
        mapping = raw.get("mapping") or {}
        for field in ("world_size", "tp_size", "pp_size"):
            if mapping.get(field, 1) != 1:
                raise CheckpointError(f"{where}: mapping.{field} = {mapping[field]}: only 1 is supported; convert without it")
        algorithms = {k: v for k, v in (raw.get("quantization") or {}).items() if k in ("quant_algo", "kv_cache_quant_algo") and v}
        if algorithms:
            raise CheckpointError(f"{where}: quantization {algorithms} is not supported: use an unquantised checkpoint")
        if raw.get("hidden_act", "silu") not in ("silu", "swiglu"):
            raise CheckpointError(f"{where}: hidden_act = {raw['hidden_act']!r} is not supported: only silu")
        if "lora_target_modules" in raw or raw.get("moe"):
            raise CheckpointError(f"{where}: LoRA and MoE checkpoints are not supported")
        for field in fields(cls):
            if field.default is MISSING and field.name not in raw:
                raise CheckpointError(f"{where}: missing field {field.name}")
        rope = raw.get("position_embedding_type", "rope_gpt_neox")
        if rope != "rope_gpt_neox":
            raise CheckpointError(f"{where}: position_embedding_type = {rope!r} is not supported: only rope_gpt_neox")
        for field in ("rotary_pct", "partial_rotary_factor"):
            if raw.get(field, 1) not in (None, 1):
                raise CheckpointError(f"{where}: {field} = {raw[field]!r} is not supported: RoPE must cover the whole head")
        for field in ("sliding_window", "sliding_window_causal_mask", "attention_chunk_size"):
            if raw.get(field):
                raise CheckpointError(f"{where}: {field} = {raw[field]!r} is not supported: attention here is over the full context")
        known = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        # What TensorRT-LLM leaves to the architecture.
        known.setdefault("attn_bias", known["architecture"] == "Qwen2ForCausalLM")
        known.setdefault("qk_layernorm", known["architecture"] == "Qwen3ForCausalLM")
        if isinstance(scaling := known.get("rotary_scaling"), dict) and "type" not in scaling:
            rest = {k: v for k, v in scaling.items() if k != "rope_type"}
            known["rotary_scaling"] = None if scaling.get("rope_type") == "default" else {"type": scaling.get("rope_type"), **rest}
        try:
            return cls(**known)
        except CheckpointError as error:
            raise CheckpointError(f"{where}: {error}") from None
