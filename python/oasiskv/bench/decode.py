"""`oasiskv bench decode`: decode step time, dense against transformers and sparse against dense, paired.

Each pair alternates a few steps of one arm with a few of the other in one process and compares their medians. Floors: a dense
step at batch B reads the weights once and every request's KV; a sparse one the weights and K blocks a head.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import torch

from oasiskv.bench.reference_model import transformers_llama
from oasiskv.bench.report import say
from oasiskv.bench.text import prose
from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.sampling import SamplingParams

Step = Callable[[], object]


def _engine(args: argparse.Namespace, dense: bool, batch: int, context: int) -> Engine:
    """An engine whose `batch` requests have decoded a few tokens past `context`."""
    config = EngineConfig(
        model=args.model,
        backend=args.backend,
        dense=dense,
        top_k_blocks=args.top_k_blocks,
        fetch_ratio=args.fetch_ratio,
        drafter=args.drafter,
        device_kv_gib=args.device_kv_gib,
        host_kv_gib=args.host_kv_gib,
        num_threads=args.threads,
    )
    engine = Engine(config)
    ids = engine.tokenizer.encode(prose())
    params = SamplingParams(max_tokens=args.runs * args.steps + 40, ignore_eos=True)
    begin = time.perf_counter()
    for i in range(batch):
        engine.add(engine.next_id(), ids[i * 64 : i * 64 + context], params)
    generated: dict[int, int] = {}
    while len(generated) < batch or min(generated.values()) < 6:
        for output in engine.step():
            generated[output.request_id] = generated.get(output.request_id, 0) + len(output.token_ids)
    say(f"{'dense' if dense else 'sparse'}: {batch} x {context} tokens prefilled in {time.perf_counter() - begin:.1f} s")
    return engine


def _transformers_step(model: object, context: int, engine: Engine, threads: int) -> Step:
    torch.set_num_threads(threads)
    ids = torch.tensor([engine.tokenizer.encode(prose())[:context]])
    with torch.inference_mode():
        out = model(ids, use_cache=True, logits_to_keep=1)
    state = {"past": out.past_key_values, "next": out.logits[:, -1:].argmax(-1)}

    def step() -> None:
        with torch.inference_mode():
            out = model(state["next"], past_key_values=state["past"], use_cache=True)
        state["next"] = out.logits[:, -1:].argmax(-1)

    return step


def paired(a: Step, b: Step, runs: int, steps: int) -> dict[str, float]:
    """Alternate `steps` calls of each, `runs` times. ms are medians over the runs' means; ratio is a's over b's, median of the pairs."""
    times: list[tuple[float, float]] = []
    for _ in range(runs):
        pair = []
        for step in (a, b):
            begin = time.perf_counter()
            for _ in range(steps):
                step()
            pair.append((time.perf_counter() - begin) * 1e3 / steps)
        times.append((pair[0], pair[1]))
    return {
        "a_ms": statistics.median(t[0] for t in times),
        "b_ms": statistics.median(t[1] for t in times),
        "ratio": statistics.median(t[0] / t[1] for t in times),
    }


def _row(name: str, batch: int, context: int, result: dict[str, float], args: argparse.Namespace) -> dict[str, object]:
    row = {
        "pair": name,
        "batch": batch,
        "context": context,
        "threads": args.threads,
        "runs": args.runs,
        "steps_per_run": args.steps,
        "a_ms": round(result["a_ms"], 2),
        "b_ms": round(result["b_ms"], 2),
        "ratio": round(result["ratio"], 3),
    }
    say(f"{name}: batch {batch}, {context} tokens: {row['a_ms']} ms against {row['b_ms']} ms, ratio {row['ratio']}")
    return row


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    rows = []
    if not args.skip_transformers:
        model = transformers_llama(args.model)
        for context in args.context:
            dense = _engine(args, True, 1, context)
            step = _transformers_step(model, context, dense, args.threads)
            rows.append(_row("dense / transformers", 1, context, paired(dense.step, step, args.runs, args.steps), args))
        del model
    context = max(args.context)
    for batch in args.batch:
        dense, sparse = _engine(args, True, batch, context), _engine(args, False, batch, context)
        rows.append(_row("sparse / dense", batch, context, paired(sparse.step, dense.step, args.runs, args.steps), args))
    return rows


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=["cpu"], default="cpu")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--context", type=int, nargs="+", default=[512, 3000, 6000])
    parser.add_argument(
        "--batch", type=int, nargs="*", default=[1, 8], help="batches of the sparse / dense pair, at the longest context; none skips it"
    )
    parser.add_argument("--top-k-blocks", type=int, default=128)
    parser.add_argument("--fetch-ratio", default="0.05")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--runs", type=int, default=7, help="paired runs; medians are reported")
    parser.add_argument("--steps", type=int, default=5, help="decode steps of each arm in a run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device-kv-gib", type=float, default=3.0)
    parser.add_argument("--host-kv-gib", type=float, default=4.0)
    parser.add_argument("--skip-transformers", action="store_true")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on standard output")


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    backend = argparse.ArgumentParser(add_help=False)
    backend.add_argument("--backend", choices=["cpu", "cuda"], default="cpu")
    if backend.parse_known_args(arguments)[0].backend == "cuda":
        from oasiskv.bench import decode_cuda

        return decode_cuda.main(arguments)
    parser = argparse.ArgumentParser(prog="oasiskv bench decode", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(arguments)
    for row in run(args):
        if args.json:
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
