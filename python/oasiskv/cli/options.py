"""Options that several commands share."""

from __future__ import annotations

import argparse
from typing import Any


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Flags of EngineConfig; absent ones keep its defaults."""
    none: Any = argparse.SUPPRESS
    add = parser.add_argument
    add("--model", default=none, help="smollm2-135m (embedded), a checkpoint or Hugging Face folder, or a GGUF file")
    add("--dtype", default=none, help="of the imported checkpoint: float32, float16 or bfloat16")
    add("--dense", action="store_true", default=none, help="never turn sparse")
    add("--top-k-blocks", type=int, default=none, metavar="K", help="blocks of 16 tokens a KV head keeps (128)")
    add("--fetch-ratio", default=none, metavar="R", help="of K that a head may fetch a step, or 'all' (0.05)")
    add("--sparse-from", type=int, default=none, metavar="N", help="context tokens from which a request is sparse ((K + 1) * 16)")
    add("--summary", default=none, help="mean_std (default), minmax or halves")
    add("--group-combine", default=none, help="softmax_sum (default), max or sum")
    add("--drafter", default=none, help="ngram (default), previous or model:<path>")
    add("--draft-len", type=int, default=none, metavar="m", help="draft rows a step (1)")
    add("--accept-drafts", action="store_true", default=none, help="keep right drafts (needs --draft-len 2 or more)")
    add("--max-batch-size", type=int, default=none)
    add("--max-num-tokens", type=int, default=none, help="rows a step (512)")
    add("--max-seq-len", type=int, default=none)
    add("--device-kv-gib", type=float, default=none)
    add("--host-kv-gib", type=float, default=none)
    add("--num-threads", type=int, default=none)


ENGINE_FIELDS = (
    "model", "dtype", "dense", "top_k_blocks", "fetch_ratio", "sparse_from", "summary", "group_combine", "drafter", "draft_len",
    "accept_drafts", "max_batch_size", "max_num_tokens", "max_seq_len", "device_kv_gib", "host_kv_gib", "num_threads",
)


def engine_config(args: argparse.Namespace) -> Any:
    """Raises ConfigError."""
    from oasiskv.config import EngineConfig

    return EngineConfig(**{f: getattr(args, f) for f in ENGINE_FIELDS if hasattr(args, f)})
