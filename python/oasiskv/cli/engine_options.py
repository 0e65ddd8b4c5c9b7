"""The flags that `generate` and `serve` share: an EngineConfig's fields."""

from __future__ import annotations

import argparse
from dataclasses import fields

from oasiskv.config import BACKENDS, DTYPES, GROUP_COMBINES, SUMMARIES, EngineConfig


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    d = EngineConfig()
    group = parser.add_argument_group("engine")
    group.add_argument("--model", default=d.model, help="embedded model's name, checkpoint or Hugging Face folder, or GGUF file")
    group.add_argument("--backend", choices=BACKENDS, default=d.backend, help="cuda needs `build.py setup --cuda` and a Hopper GPU")
    group.add_argument(
        "--dtype",
        choices=DTYPES,
        default=d.dtype,
        help="of an imported model's weights as stored (a checkpoint folder keeps its own), and of CUDA's computations",
    )
    group.add_argument("--dense", action="store_true", help="never turn sparse")
    group.add_argument("--top-k-blocks", type=int, default=d.top_k_blocks, help="K: blocks of 16 tokens a KV head keeps")
    group.add_argument("--fetch-ratio", default=str(d.fetch_ratio), help="of K, the most a head may fetch a step; or 'all'")
    group.add_argument(
        "--sparse-from", type=int, default=d.sparse_from, help="context tokens from which decoding is sparse; None: (K + 1) * 16"
    )
    group.add_argument("--sink-blocks", type=int, default=d.sink_blocks, help="first blocks that every head keeps; 0: the paper's mode")
    group.add_argument("--summary", choices=SUMMARIES, default=d.summary, help="of a block's keys")
    group.add_argument("--group-combine", choices=GROUP_COMBINES, default=d.group_combine, help="scores of a KV head's query heads -> one")
    group.add_argument("--drafter", default=d.drafter, help="ngram, previous or model:<path>")
    group.add_argument("--draft-len", type=int, default=d.draft_len, help="draft rows a request and step")
    group.add_argument("--accept-drafts", action="store_true", help="keep drafted tokens that prove right (needs --draft-len 2 or more)")
    group.add_argument("--max-batch-size", type=int, default=d.max_batch_size, help="requests that run at the same time")
    group.add_argument("--max-num-tokens", type=int, default=d.max_num_tokens, help="rows a step")
    group.add_argument(
        "--max-queue-size", type=int, default=d.max_queue_size, help="requests that may wait to be scheduled; more are refused"
    )
    group.add_argument("--max-seq-len", type=int, default=d.max_seq_len, help="prompt and output tokens; None: the model's")
    group.add_argument("--device-kv-gib", type=float, default=d.device_kv_gib, help="fast tier of the KV cache")
    group.add_argument("--host-kv-gib", type=float, default=d.host_kv_gib, help="slow tier of the KV cache")
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=d.enable_prefix_caching,
        help="keep complete blocks in the slow tier, for requests that begin with the same tokens",
    )  # fmt: skip
    group.add_argument(
        "--host-memory-gib", type=float, default=d.host_memory_gib,
        help="memory of the machine, where it grows with use; None: what a control group or the system says",
    )  # fmt: skip
    group.add_argument(
        "--batch-invariant", action="store_true", help="CUDA in float32: no result depends on the batch, as on the CPU; slower"
    )
    group.add_argument(
        "--cuda-graphs", action=argparse.BooleanOptionalAction, default=d.cuda_graphs, help="CUDA: decode steps run as captured graphs"
    )
    group.add_argument(
        "--gather-ctas", type=int, default=d.gather_ctas, help="CUDA: SMs that fetch over the link; None: by the GPU's table"
    )
    group.add_argument(
        "--foreground-sms", type=int, default=d.foreground_sms, help="CUDA: SMs that matrix products use, with --gather-ctas; 0: all"
    )
    group.add_argument(
        "--gather-in-flight",
        type=int,
        default=d.gather_in_flight,
        help="CUDA: runs of 8 KiB each of --gather-ctas has under way: 2, 4, 6 or 8",
    )
    group.add_argument("--num-threads", type=int, default=d.num_threads, help="None: the cores this process may use")


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError."""
    return EngineConfig(**{f.name: getattr(args, f.name) for f in fields(EngineConfig) if hasattr(args, f.name)})
