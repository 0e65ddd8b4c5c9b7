"""Inputs of TensorRT-LLM that this engine cannot honour: refused by name unless their value changes nothing."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from oasiskv.errors import RequestError
from oasiskv.serve.contract.tensors import GetTensor

# Name -> values that change nothing. An empty tensor never does.
NEUTRAL: dict[str, tuple[float, ...]] = {
    "beam_width": (1,),
    "len_penalty": (0.0, 1.0),
    "early_stopping": (False,),
    "beam_search_diversity_rate": (0.0,),
    "runtime_top_p_min": (0.0, float(np.float32(1e-6))),
    "runtime_top_p_decay": (1.0,),
    "runtime_top_p_reset_ids": (-1,),
    "draft_acceptance_threshold": (0.0,),
    "prompt_vocab_size": (0,),
    "prompt_table_extra_ids": (0,),
    "lora_task_id": (0,),
    "lookahead_window_size": (0,),
    "lookahead_ngram_size": (0,),
    "lookahead_verification_set_size": (0,),
    "skip_cross_attn_blocks": (False,),
    "encoder_output_lengths": (0,),
}
_ALWAYS = (
    "draft_input_ids", "draft_logits", "encoder_input_features", "prompt_embedding_table", "cross_attention_mask", "mrope_rotary_cos_sin",
    "mrope_position_deltas", "lora_weights", "lora_config", "context_phase_params", "retention_token_range_starts",
    "retention_token_range_ends", "retention_token_range_priorities", "retention_token_range_durations_ms", "retention_decode_priority",
    "retention_decode_duration_ms",
)  # fmt: skip
REFUSED = frozenset(NEUTRAL) | frozenset(_ALWAYS)
# Preprocessing gives a decoder-only model one pad token here, as NVIDIA's does.
_AT_MOST_ONE = ("decoder_input_ids", "decoder_input_lengths")


def refuse(names: Iterable[str], get: GetTensor) -> None:
    """Raise RequestError for the first of the inputs `names` that asks for what is not supported."""
    for name in names:
        if name in _AT_MOST_ONE:
            _single(name, get(name))
        elif name in REFUSED:
            _neutral(name, get(name))


def _neutral(name: str, array: np.ndarray | None) -> None:
    if array is None or array.size == 0:
        return
    allowed = NEUTRAL.get(name, ())
    if not np.isin(array, allowed).all():
        value = f" = {array.reshape(-1)[0]}" if array.size == 1 else f" of shape {list(array.shape)}"
        either = f", or use {' or '.join(f'{v:g}' for v in allowed)}" if allowed else ""
        raise RequestError(f"{name}{value}: not supported; leave it out{either}")


def _single(name: str, array: np.ndarray | None) -> None:
    if array is None:
        return
    if array.size > 1 or (name == "decoder_input_lengths" and array.size and int(array.reshape(-1)[0]) > 1):
        raise RequestError(f"{name}: this is a decoder-only model; leave it out, or give one token")
