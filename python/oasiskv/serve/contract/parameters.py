"""The `parameters` of a model's config.pbtxt. One that is empty, or still a `${placeholder}`, is not set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from oasiskv.errors import ConfigError

_TRUE, _FALSE = ("true", "1", "t", "y", "yes"), ("false", "0", "f", "n", "no")
_LOGITS = {"TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
# NVIDIA's names for what this engine does not have -> values that ask for nothing.
_UNSUPPORTED = {
    "max_beam_width": ("1",),
    "gpt_model_type": ("inflight_batching", "inflight_fused_batching"),
    "encoder_model_path": (),
    "lora_prefetch_dir": (),
    "decoding_mode": ("auto", "top_k", "top_p", "top_k_top_p"),
    "lookahead_window_size": (),
    "lookahead_ngram_size": (),
    "lookahead_verification_set_size": (),
    "medusa_choices": (),
    "eagle_choices": (),
    "normalize_log_probs": _FALSE,
    "speculative_decoding_fast_logits": _FALSE,
    "num_nodes": ("1",),
    "triton_backend": ("python", "tensorrtllm"),
}
# What is the executor's to know: its memory, its model and how it batches.
EXECUTORS = (
    "gpt_model_path", "max_tokens_in_paged_kv_cache", "max_attention_window_size", "sink_token_length", "batch_scheduler_policy",
    "kv_cache_free_gpu_mem_fraction", "cross_kv_cache_fraction", "kv_cache_host_memory_bytes", "kv_cache_onboard_blocks",
    "stats_check_period_ms", "iter_stats_max_iterations", "request_stats_max_iterations", "enable_kv_cache_reuse",
    "enable_chunked_context", "gpu_device_ids", "participant_ids", "lora_cache_optimal_adapter_size", "lora_cache_max_adapter_size",
    "lora_cache_gpu_memory_fraction", "lora_cache_host_memory_bytes", "gpu_weights_percent", "enable_context_fmha_fp32_acc",
    "multi_block_mode", "cuda_graph_mode", "cuda_graph_cache_size", "guided_decoding_backend", "xgrammar_tokenizer_info_path",
)  # fmt: skip
# Ours: what the repository says of its executor, a field of EngineConfig each.
EXPECTED = ("oasis_top_k_blocks", "oasis_fetch_ratio", "oasis_drafter", "oasis_draft_len")


def setting(config: dict[str, Any], name: str) -> str | None:
    """A parameter's text, None if it is not set."""
    value = config.get("parameters", {}).get(name, {}).get("string_value", "")
    return None if not value or value.startswith("${") else value


def forbid(config: dict[str, Any], name: str) -> None:
    """Raise ConfigError if a parameter is set that asks for what is not supported."""
    value = setting(config, name)
    if value is not None:
        raise ConfigError(f"parameter {name} = {value!r}: not supported; leave it out")


def flag(config: dict[str, Any], name: str, default: bool) -> bool:
    """A parameter that is true or false. Raises ConfigError."""
    value = setting(config, name)
    if value is None:
        return default
    if value.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"parameter {name} = {value!r}: use true or false")
    return value.lower() in _TRUE


def whole(config: dict[str, Any], name: str, default: int, low: int, high: int) -> int:
    """A parameter that is an integer in low..high. Raises ConfigError."""
    value = setting(config, name)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or not low <= int(value) <= high:
        raise ConfigError(f"parameter {name} = {value!r}: must be an integer in {low}..{high}")
    return int(value)


@dataclass(frozen=True)
class CoreParameters:
    """What the model `tensorrt_llm` is configured with.

    expected: options that the executor must have, by EngineConfig's names; idle: NVIDIA's parameters that are set here and have no effect.
    """

    socket: str
    authkey_file: str
    decoupled: bool
    exclude_prompt: bool
    cancel_check_s: float
    logits: type[np.floating]
    expected: dict[str, str]
    idle: list[str]

    @classmethod
    def of(cls, config: dict[str, Any]) -> CoreParameters:
        """Raises ConfigError naming the parameter."""
        for name, allowed in _UNSUPPORTED.items():
            value = setting(config, name)
            if value is not None and value.lower() not in allowed:
                use = f", or use {allowed[0]}" if allowed else ""
                raise ConfigError(f"parameter {name} = {value!r}: not supported; leave it out{use}")
        if config.get("max_batch_size", 0) < 1:
            raise ConfigError(f"max_batch_size = {config.get('max_batch_size', 0)}: must be 1 or more (triton_max_batch_size)")
        kinds = {o["name"]: o["data_type"] for o in config["output"]}
        logits = _LOGITS.get(kinds["generation_logits"])
        if logits is None or kinds["context_logits"] != kinds["generation_logits"]:
            raise ConfigError(f"logits_datatype = {kinds['generation_logits']}: use {' or '.join(_LOGITS)}")
        return cls(
            needed(config, "oasis_executor_socket"),
            needed(config, "oasis_executor_authkey_file"),
            bool(config.get("model_transaction_policy", {}).get("decoupled")),
            flag(config, "exclude_input_in_output", default=False),
            whole(config, "cancellation_check_period_ms", 100, 1, 60_000) / 1e3,
            logits,
            {name.removeprefix("oasis_"): value for name in EXPECTED if (value := setting(config, name)) is not None},
            [name for name in EXECUTORS if setting(config, name) is not None],
        )

    def check_executor(self, options: dict[str, Any]) -> None:
        """options: the executor's EngineConfig. Raises ConfigError for one that is not as expected."""
        for name, value in self.expected.items():
            if str(options.get(name)) != value:
                raise ConfigError(
                    f"parameter oasis_{name} = {value!r}, but the executor runs with {options.get(name)!r}: "
                    "start it with the same option, or leave the parameter out"
                )


def needed(config: dict[str, Any], name: str) -> str:
    value = setting(config, name)
    if value is None:
        raise ConfigError(f"parameter {name} is not set: fill it in, with the path that the executor was started with")
    return value
