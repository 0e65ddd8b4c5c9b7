"""What `tensorrt_llm` answers: a sequence's tokens and figures -> NVIDIA's output tensors."""

from __future__ import annotations

import json
from collections.abc import Container
from typing import Any

import numpy as np

from oasiskv.executor.protocol import Output
from oasiskv.serve.contract.core import CoreRequest

Tensors = dict[str, np.ndarray]
# Name -> (dtype, key in a request's statistics).
_PERF = {
    "kv_cache_alloc_new_blocks": (np.int32, "kv_blocks_new"),
    "kv_cache_reused_blocks": (np.int32, "kv_blocks_reused"),
    "kv_cache_alloc_total_blocks": (np.int32, "kv_blocks_total"),
    "arrival_time_ns": (np.int64, "arrival_ns"),
    "first_scheduled_time_ns": (np.int64, "first_scheduled_ns"),
    "first_token_time_ns": (np.int64, "first_token_ns"),
    "last_token_time_ns": (np.int64, "last_token_ns"),
    "total_accepted_draft_tokens": (np.int32, "draft_accepted"),
    "total_draft_tokens": (np.int32, "draft_tokens"),
}


class SequenceOutput:
    """Collects one sequence's outputs between two responses.

    batch_index, sequence_index: None where the request has one row or one sequence, and then not sent.
    """

    def __init__(self, request: CoreRequest, batch_index: int | None, sequence_index: int | None) -> None:
        self._request = request
        self._index = {"batch_index": batch_index, "sequence_index": sequence_index}
        self._tokens: list[int] = list(request.prompt) if request.with_prompt else []
        self._text: list[str] = []
        self._log_probs: list[float] = []
        self._cum_log_prob = 0.0
        self._generation_logits: list[np.ndarray] = []
        self._context_logits: list[np.ndarray] = []

    def add(self, output: Output) -> None:
        self._tokens += output.token_ids
        self._text.append(output.text)
        if self._request.return_log_probs:
            new = [logprob for logprob, _ in output.logprobs]
            self._log_probs += new
            self._cum_log_prob += sum(new)
        if output.generation_logits is not None:
            self._generation_logits.append(output.generation_logits)
        if output.context_logits is not None:
            self._context_logits.append(output.context_logits)

    def take(self, wanted: Container[str], logits: type[np.floating], stats: dict[str, Any] | None) -> Tensors:
        """The response's tensors among `wanted`, each with a batch dimension of 1; what was collected is forgotten.

        logits: the type that logits are sent in; stats: a request's statistics, on its last response.
        """
        request = self._request
        tensors: Tensors = {
            "output_ids": np.array(self._tokens, dtype=np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(self._tokens)]], dtype=np.int32),
        }
        if "oasis_text" in wanted:
            tensors["oasis_text"] = np.array([["".join(self._text).encode()]], dtype=np.object_)
        if stats is not None and "oasis_stats" in wanted:
            tensors["oasis_stats"] = np.array([[json.dumps(stats).encode()]], dtype=np.object_)
        if request.with_prompt:
            tensors["oasis_prompt_length"] = np.array([[len(request.prompt)]], dtype=np.int32)
        tensors |= {name: np.array([[value]], dtype=np.int32) for name, value in self._index.items() if value is not None}
        if request.return_log_probs:
            tensors["output_log_probs"] = np.array(self._log_probs, dtype=np.float32).reshape(1, 1, -1)
            tensors["cum_log_probs"] = np.array([[self._cum_log_prob]], dtype=np.float32)
        if self._context_logits:
            tensors["context_logits"] = np.concatenate(self._context_logits)[np.newaxis].astype(logits, copy=False)
        if self._generation_logits:
            tensors["generation_logits"] = np.concatenate(self._generation_logits)[np.newaxis, np.newaxis].astype(logits, copy=False)
        if request.return_perf_metrics and stats is not None:
            tensors |= perf_metrics(stats)
        self._tokens, self._text, self._log_probs, self._generation_logits, self._context_logits = [], [], [], [], []
        return {name: array for name, array in tensors.items() if name in wanted}


def perf_metrics(stats: dict[str, Any]) -> Tensors:
    """A request's statistics as return_perf_metrics' outputs, [1, 1] each; times in nanoseconds of the monotonic clock."""
    tensors = {name: np.array([[stats[key]]], dtype=dtype) for name, (dtype, key) in _PERF.items()}
    rate = stats["draft_accepted"] / stats["draft_tokens"] if stats["draft_tokens"] else 0.0
    return tensors | {"acceptance_rate": np.array([[rate]], dtype=np.float32)}
