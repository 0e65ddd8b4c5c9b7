"""`oasiskv bench soak`: hours of a service's life in minutes, and what must hold all the time.

Several threads send random requests to one engine whose pools are so small that requests wait and are preempted all the time, and cancel
some of them at random. Between them goes the canary, one long greedy request; where results do not depend on the batch (the CPU,
float32 on CUDA) it must have the same tokens every time. What is wrong ends the run, with a message that says what to look at.

Exit codes: 0 passed, 1 failed, 2 options that cannot be served, 130 or 143 after SIGINT or SIGTERM, which end it in order. The rows of
--json are of the kinds begin, progress, failure and end; each is written at once.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from oasiskv.bench.report import say
from oasiskv.bench.soak_report import Report, summary
from oasiskv.bench.soak_run import Soak
from oasiskv.config import DTYPES, EngineConfig
from oasiskv.engine.llm import LLM

# Sizes for the embedded model: two CPU cores, and an H200 in float32. A page of it in float32 is 720 KiB over all layers.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {
        "stall_s": 120.0, "rate": 1.0, "in_flight": 24, "max_prompt": 128, "max_output": 96, "canary_prompt": 100, "canary_output": 40,
        "top_k_blocks": 4, "fetch_ratio": "0.5", "max_batch_size": 12, "max_num_tokens": 128, "max_seq_len": 256,
        "device_kv_gib": 0.013, "host_kv_gib": 0.1,
    },
    "cuda": {
        "stall_s": 60.0, "rate": 15.0, "in_flight": 160, "max_prompt": 2000, "max_output": 512, "canary_prompt": 1200, "canary_output": 128,
        "top_k_blocks": 16, "fetch_ratio": "0.25", "max_batch_size": 64, "max_num_tokens": 512, "max_seq_len": 4096,
        "device_kv_gib": 0.65, "host_kv_gib": 2.0,
    },
}  # fmt: skip


def engine_config(args: argparse.Namespace) -> EngineConfig:
    names = ("model", "backend", "dtype", "dense", "top_k_blocks", "sparse_from", "fetch_ratio", "drafter", "draft_len", "accept_drafts")
    sizes = ("max_batch_size", "max_num_tokens", "max_seq_len", "device_kv_gib", "host_kv_gib", "host_memory_gib", "cuda_graphs")
    invariant = args.backend == "cuda" and args.dtype == "float32"
    return EngineConfig(batch_invariant=invariant, **{name: getattr(args, name) for name in names + sizes})


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The row of the whole run. Raises ConfigError, which is in the rows too, for options that no engine, or no soak, can be made of."""
    config, report = engine_config(args), Report(args.json)
    say(f"soak: {args.minutes:g} minutes of traffic with seed {args.seed}, {args.model} in {args.dtype} on {args.backend}")
    report.row("begin", vars(args))
    try:
        began = time.monotonic()
        llm = LLM(config)
        say(f"engine made in {time.monotonic() - began:.1f} s; the canary is asked alone")
        try:
            soak = Soak(args, config, llm, report)
        except BaseException:
            llm.close()
            raise
        return soak.run()
    except BaseException as error:
        report.row("end", {"passed": False, "failures": [f"{type(error).__name__}: {error}"]})
        raise


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of traffic, may be a fraction; loading, and some 20 s at the end, come on top"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the requests and of when they come")
    parser.add_argument("--backend", choices=["cpu", "cuda"], default="cpu", help="the sizes below have a default for each")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="in 16 bit the canary may answer anything")
    parser.add_argument("--json", help="file that rows are added to, a JSON object a line")
    traffic = parser.add_argument_group("traffic")
    traffic.add_argument("--clients", type=int, default=4, help="threads; the first streams, the others submit")
    traffic.add_argument("--rate", type=float, help="arrivals a second while busy; some are bursts")
    traffic.add_argument("--in-flight", type=int, help="requests at most; then clients wait")
    traffic.add_argument("--max-prompt", type=int, help="tokens; lengths are log-uniform")
    traffic.add_argument("--max-output", type=int)
    traffic.add_argument("--canary-prompt", type=int, help="tokens")
    traffic.add_argument("--canary-output", type=int)
    traffic.add_argument("--canary-every-s", type=float, default=4.0, help="pause between two of a thread, on average; two threads ask")
    checks = parser.add_argument_group("checks")
    checks.add_argument("--stall-s", type=float, help="a request without any output for longer hangs")
    checks.add_argument("--growth-mib", type=float, default=64.0, help="of RSS and of the GPU's memory over the last two thirds")
    checks.add_argument("--every-s", type=float, default=10.0, help="between progress lines")
    engine = parser.add_argument_group("engine")
    engine.add_argument("--dense", action="store_true")
    engine.add_argument("--top-k-blocks", type=int)
    engine.add_argument("--sparse-from", type=int, help="context tokens; None: (K + 1) * 16")
    engine.add_argument("--fetch-ratio")
    engine.add_argument("--drafter", default="ngram")
    engine.add_argument("--draft-len", type=int, default=1)
    engine.add_argument("--accept-drafts", action="store_true")
    engine.add_argument("--max-batch-size", type=int)
    engine.add_argument("--max-num-tokens", type=int, help="rows a step")
    engine.add_argument("--max-seq-len", type=int)
    engine.add_argument("--device-kv-gib", type=float)
    engine.add_argument("--host-kv-gib", type=float)
    engine.add_argument("--host-memory-gib", type=float, help="what the machine has in all, where memory grows with use")
    engine.add_argument("--no-graphs", action="store_false", dest="cuda_graphs")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="oasiskv bench soak", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(**DEFAULTS[parser.parse_args(argv).backend])
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    row = run(parse(argv))
    say(summary(row))
    if not row["closed"]:
        say("the engine's thread did not end: leaving without it")
        os._exit(row["exit_code"])
    return row["exit_code"]
