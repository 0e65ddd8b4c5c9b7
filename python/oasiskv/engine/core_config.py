"""An EngineConfig and a model -> what the core is made from."""

from __future__ import annotations

import logging

from oasiskv import _core
from oasiskv.checkpoint import ModelConfig
from oasiskv.config import EngineConfig
from oasiskv.engine.machine import usable_cpus
from oasiskv.errors import ConfigError

_GIB = 1024**3
_log = logging.getLogger(__name__)


def _log_pinned(done: int, total: int) -> None:
    _log.info("host KV pool: %.0f of %.0f GiB pinned", done / _GIB, total / _GIB)


def core_config(config: EngineConfig, model: ModelConfig) -> _core.CoreConfig:
    """Sizes of the pools and rules of selection for this model. Raises ConfigError."""
    c = _core.CoreConfig()
    c.backend, c.dtype = config.backend, config.dtype if config.backend == "cuda" else "float32"
    c.num_layers, c.head_dim = model.num_hidden_layers, model.head_size
    c.num_q_heads, c.num_kv_heads = model.num_attention_heads, model.num_key_value_heads
    c.sparse_enabled = not config.dense
    c.top_k_blocks, c.fetch_cap_blocks = config.top_k_blocks, config.fetch_cap_blocks
    c.sink_blocks = config.sink_blocks
    c.sparse_from_tokens = config.sparse_from_tokens
    drafts_used = config.accept_drafts or not config.dense
    c.max_draft_len = config.draft_len if drafts_used and config.drafter != "previous" else 0
    c.accept_drafts = config.accept_drafts
    c.summary, c.group_combine = config.summary, config.group_combine
    c.max_batch_size, c.max_num_tokens = config.max_batch_size, config.max_num_tokens
    c.host_blocks = int(config.host_kv_gib * _GIB / c.page_bytes)
    device_bytes = int(config.device_kv_gib * _GIB)
    if config.backend == "cuda":  # device_kv_gib is a share of the GPU's memory: the summaries are in it
        device_bytes -= c.summary_bytes
        if not config.cuda_graphs:
            c.captured_sizes = 0
        c.host_assume_bytes = int((config.host_memory_gib or 0) * _GIB)
        c.host_progress = _log_pinned
    c.device_pages = max(0, device_bytes // (c.page_bytes * c.num_layers))
    limit = model.max_position_embeddings
    if config.max_seq_len is not None and config.max_seq_len > limit:
        raise ConfigError(f"max_seq_len = {config.max_seq_len}: the model was trained for {limit}; use at most that")
    c.max_seq_len = config.max_seq_len or limit
    c.num_threads = config.num_threads or usable_cpus()
    c.trace, c.transfer_delay_us = config.trace, config.transfer_delay_us
    return c
