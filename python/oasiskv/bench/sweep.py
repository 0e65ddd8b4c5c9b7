"""`oasiskv bench sweep`: what a summary kind and a fetch ratio cost in accuracy and in bytes.

A dense engine answers a long prose prompt; every sparse configuration is then teacher-forced along that answer. KL is dense against
sparse next-token distributions in nats, mean over the steps (docs/design.md, section 5, has the kinds).
"""

from __future__ import annotations

import argparse
import itertools
import json
from typing import Any

import torch

from oasiskv.bench.text import prose
from oasiskv.checkpoint import resolve_model
from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.sampler import Sampled, SampleRow
from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import ConfigError
from oasiskv.tokenizer import Tokenizer

# (summary, group combine, sink blocks): the default, the other kinds in its place, the paper's mode, and the default without sinks.
MODES = [
    ("mean_std", "softmax_sum", 1),
    ("halves", "softmax_sum", 1),
    ("minmax", "softmax_sum", 1),
    ("minmax", "max", 0),
    ("mean_std", "softmax_sum", 0),
]
RATIOS = ["0.01", "0.05", "0.1", "all"]


class ForcedSampler:
    """Answers with given tokens (or greedily where there are none) and keeps every row's log-probabilities."""

    def __init__(self, answer: list[int] | None = None) -> None:
        self._answer = answer
        self.logprobs: list[torch.Tensor] = []

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """logits: float32 [1, vocab]: one request at a time."""
        (row,) = rows
        self.logprobs.append(torch.log_softmax(logits[0].double(), dim=0))
        return [Sampled(int(logits[0].argmax()) if self._answer is None else self._answer[row.generated])]


def answer(
    config: EngineConfig, prompt_ids: list[int], steps: int, forced: list[int] | None
) -> tuple[list[int], torch.Tensor, dict[str, Any]]:
    """Token ids [steps + 1], log-probabilities [steps, vocab] of the decode steps, and the request's statistics."""
    sampler = ForcedSampler(forced)
    engine = Engine(config, sampler)
    request_id = engine.next_id()
    engine.add(request_id, prompt_ids, SamplingParams(max_tokens=steps + 1, ignore_eos=True))
    ids: list[int] = []
    while True:
        for output in engine.step():
            ids += output.token_ids
            if output.finished:
                return ids, torch.stack(sampler.logprobs[1:]), output.stats or {}


def mean_kl(dense: torch.Tensor, sparse: torch.Tensor) -> float:
    """Log-probabilities [steps, vocab] -> mean over steps of sum p_dense (log p_dense - log p_sparse)."""
    return float((dense.exp() * (dense - sparse)).sum(dim=1).mean())


def run(args: argparse.Namespace) -> list[dict[str, Any]]:
    least = (args.top_k_blocks + 1) * 16
    if args.context < least:
        raise ConfigError(f"--context {args.context}: decoding is sparse from {least} tokens on with --top-k-blocks {args.top_k_blocks}")
    common: dict[str, Any] = {"model": args.model, "num_threads": args.threads}
    prompt = Tokenizer.from_dir(resolve_model(args.model)).encode(prose())[: args.context]
    forced, dense, _ = answer(EngineConfig(**common, dense=True), prompt, args.steps, None)
    rows = []
    for (summary, combine, sinks), ratio in itertools.product(MODES, RATIOS):
        mode = {"top_k_blocks": args.top_k_blocks, "summary": summary, "group_combine": combine, "sink_blocks": sinks, "fetch_ratio": ratio}
        _, sparse, stats = answer(EngineConfig(**common, **mode), prompt, args.steps, forced)
        steps = stats["sparse_steps"]
        row = mode | {
            "context": len(prompt),
            "sparse_steps": steps,
            "bytes_per_step": stats["bytes_fetched"] // steps,
            "kl": mean_kl(dense, sparse),
        }
        rows.append(row)
        print(json.dumps(row) if args.json else _line(row), flush=True)
    return rows


def _line(row: dict[str, Any]) -> str:
    name = f"{row['summary']} / {row['group_combine']}, {row['sink_blocks']} sink"
    return f"{name:32} ratio {row['fetch_ratio']:>4}  {row['bytes_per_step'] / 2**20:8.2f} MiB a step  KL {row['kl']:.5f}"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="oasiskv bench sweep", description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=6000, help="tokens of the essays, worked.txt first")
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--top-k-blocks", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    run(parser.parse_args(argv))
    return 0
