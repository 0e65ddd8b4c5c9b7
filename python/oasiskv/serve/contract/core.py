"""What a request to `tensorrt_llm` asks for: its tensors -> the executor's parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from oasiskv.engine.sampling import GUIDES
from oasiskv.errors import RequestError
from oasiskv.serve.contract.refused import refuse
from oasiskv.serve.contract.tensors import GetTensor, rows, scalar, text, unpack_words

MAX_SEQUENCES = 64  # of one prompt
_PASSED = ("repetition_penalty", "presence_penalty", "frequency_penalty", "min_tokens")


@dataclass(frozen=True)
class CoreRequest:
    """One batch row. `params` are executor/params.py's; sequence i of `sequences` runs with the seed plus i.

    with_prompt: the output begins with the prompt. The `return_` fields name outputs that are only sent where they are asked for.
    """

    prompt: list[int]
    params: dict[str, Any]
    streaming: bool
    sequences: int
    with_prompt: bool
    return_log_probs: bool
    return_context_logits: bool
    return_generation_logits: bool
    return_perf_metrics: bool

    def sequence(self, index: int) -> dict[str, Any]:
        """The parameters of one sequence; what describes the prompt is asked of the first alone."""
        params = {**self.params, "seed": (self.params["seed"] + index) % 2**64}
        if index:
            params.pop("return_context_logits", None)
        return params


def core_requests(inputs: dict[str, np.ndarray], decoupled: bool, exclude_prompt: bool) -> list[CoreRequest]:
    """A request a batch row. exclude_prompt: where a request does not say. Raises RequestError naming the tensor."""
    views = rows(inputs, "input_ids")
    for get in views:
        refuse(inputs.keys(), get)
    requests = [_request(get, exclude_prompt) for get in views]
    if not decoupled:
        for name, is_used in (
            ("input_ids: a batch of several rows", len(requests) > 1),
            ("num_return_sequences above 1", any(r.sequences > 1 for r in requests)),
            ("streaming", any(r.streaming for r in requests)),
        ):
            if is_used:
                raise RequestError(f"{name} needs several responses, and this model is not decoupled: set decoupled_mode to true")
    return requests


def is_stop(inputs: dict[str, np.ndarray]) -> bool:
    """Whether the request asks to stop another one. Raises RequestError."""
    return bool(scalar(inputs.get, "stop"))


def prompt(get: GetTensor) -> list[int]:
    """input_ids cut to input_lengths. Raises RequestError."""
    ids, length = get("input_ids"), scalar(get, "input_lengths")
    if ids is None or length is None:
        raise RequestError("input_ids and input_lengths: both are needed")
    if not 0 <= length <= ids.size:
        raise RequestError(f"input_lengths = {length}: input_ids has {ids.size} elements")
    return ids.reshape(-1)[:length].tolist()


def sampling(get: GetTensor) -> dict[str, Any]:
    """The sampling inputs -> the executor's parameters (executor/params.py). Raises RequestError.

    As in TensorRT-LLM, top_k 0 and top_p 0 are off. Greedy unless one of temperature, top_k and top_p is given, or top_k is 1.
    """
    params: dict[str, Any] = {"max_tokens": scalar(get, "request_output_len")}
    top_k, top_p = scalar(get, "runtime_top_k"), scalar(get, "runtime_top_p")
    temperature, end_id = scalar(get, "temperature"), scalar(get, "end_id")
    params["top_k"] = top_k or 0
    params["top_p"] = top_p or 1.0
    if top_k == 1:
        params["temperature"] = 0.0
    elif temperature is not None:
        params["temperature"] = temperature
    else:
        params["temperature"] = 1.0 if top_k or top_p else 0.0
    params["seed"] = scalar(get, "seed") or 0
    if end_id is not None:
        params["end_id"] = end_id
    params |= {name: value for name in _PASSED if (value := scalar(get, name)) is not None}
    params["stop_word_ids"] = unpack_words(get("stop_words_list"), "stop_words_list")
    if bad := unpack_words(get("bad_words_list"), "bad_words_list"):
        params["bad_word_ids"] = bad
    if bias := _logit_bias(get):
        params["logit_bias"] = bias
    if guide := _guide(get):
        params["guide"] = guide
    return params


def _request(get: GetTensor, exclude_prompt: bool) -> CoreRequest:
    sequences = scalar(get, "num_return_sequences")
    sequences = 1 if sequences is None else sequences
    if not 1 <= sequences <= MAX_SEQUENCES:
        raise RequestError(f"num_return_sequences = {sequences}: must be in 1..{MAX_SEQUENCES}")
    exclude = scalar(get, "exclude_input_in_output")
    streaming = bool(scalar(get, "streaming"))
    log_probs, context, generation, perf = (
        bool(scalar(get, f"return_{name}")) for name in ("log_probs", "context_logits", "generation_logits", "perf_metrics")
    )
    params = sampling(get)
    if log_probs:
        params["logprobs"] = 0
    if context:
        params["return_context_logits"] = True
    if generation:
        params["return_generation_logits"] = True
    # A stream never repeats the prompt, whatever was asked: so in TensorRT-LLM.
    with_prompt = not streaming and not (exclude_prompt if exclude is None else exclude)
    return CoreRequest(prompt(get), params, streaming, sequences, with_prompt, log_probs, context, generation, perf)


def _logit_bias(get: GetTensor) -> list[list[float]]:
    """embedding_bias F32 [vocab or less] -> [[id, bias], ...] of what is not 0."""
    array = get("embedding_bias")
    if array is None:
        return []
    values = array.reshape(-1)
    ids = np.flatnonzero(values)
    bias = [[int(i), float(values[i])] for i in ids]
    for i, value in bias:
        if not math.isfinite(value):
            raise RequestError(f"embedding_bias: {value} at id {i}: must be a finite number")
    return bias


def _guide(get: GetTensor) -> dict[str, str] | None:
    kind, guide = text(get, "guided_decoding_guide_type"), text(get, "guided_decoding_guide")
    if not kind:
        if guide:
            raise RequestError(f"guided_decoding_guide without guided_decoding_guide_type: give one of {', '.join(GUIDES)}")
        return None
    if kind not in GUIDES:
        raise RequestError(f"guided_decoding_guide_type = {kind!r}: use one of {', '.join(GUIDES)}")
    return {"kind": kind, "text": guide or ""}
