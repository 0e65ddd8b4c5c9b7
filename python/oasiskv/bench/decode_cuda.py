"""`oasiskv bench decode --backend cuda`: dense and oasis decoding on one GPU, alternating in one process, with the same memory for KV.

At each concurrency both arms prefill as many requests as run at once, then decode `--output` steps with all of them running. TPOT is
the time between the tokens of successive steps. The floors: dense reads the weights and all KV once a step at the rate of a plain read;
oasis reads the weights and K blocks a head, and brings what it admits over the link at the rate of a pinned copy. Both rates are
measured in the same run.
"""

from __future__ import annotations

import argparse
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch

from oasiskv.bench.arm import REFILL_STEPS, WARM_UP_STEPS, Arm
from oasiskv.bench.report import GIB, append_row, say
from oasiskv.bench.synthetic import SyntheticRunner
from oasiskv.bench.timing import Read, paired
from oasiskv.config import BLOCK_TOKENS, EngineConfig
from oasiskv.engine.core_config import core_config
from oasiskv.engine.cuda_runner import CudaRunner, make_decoder, require_cuda
from oasiskv.engine.engine import Engine
from oasiskv.engine.loaded import LoadedModel, load_model
from oasiskv.engine.sm_share import SmShare, sm_shares

_PROFILED_STEPS = 8

Share = tuple[int, ...] | None  # gather CTAs, SMs of products, runs in flight; None: by the GPU's table


def measured_rates() -> dict[str, float]:
    """GB/s of a plain read of device memory and of a pinned copy to the device."""
    size = GIB
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    device = torch.empty(size, dtype=torch.uint8, device="cuda")
    us = paired({"read": Read(size), "link": lambda: device.copy_(host, non_blocking=True)}, 5, 2)
    return {"hbm_gb_s": size / us["read"] / 1e3, "link_gb_s": size / us["link"] / 1e3}


def _config(args: argparse.Namespace, mode: str) -> EngineConfig:
    dense = mode == "dense"
    batch = max(args.concurrency)
    drafts = 0 if dense or args.drafter == "previous" else args.draft_len
    return EngineConfig(
        model=args.model,
        dummy_weights=args.dummy_weights,
        backend="cuda",
        dtype=args.dtype,
        dense=dense,
        top_k_blocks=args.top_k_blocks,
        fetch_ratio=args.fetch_ratio,
        drafter=args.drafter,
        draft_len=drafts,
        max_batch_size=batch,
        max_num_tokens=max(args.max_num_tokens, batch * (1 + drafts)),
        max_seq_len=args.context + max(_output(args, batch, steps) for steps in _passes(args)) + 32,
        device_kv_gib=args.hbm_kv_gib,
        host_kv_gib=0 if dense else args.host_kv_gib,
        enable_prefix_caching=False,  # the same prompts are prefilled at each concurrency, and timed
        host_memory_gib=args.host_memory_gib,
        cuda_graphs=not args.no_graphs,
    )


def _floors(arm: Arm, running: int, context: int, link_mb: float, rates: dict[str, float]) -> dict[str, float]:
    """Milliseconds a step at best."""
    config, core, model = arm.engine.config, arm.engine.core_config, arm.engine.model_config
    # An embedding that the head does not share is read by a row a token only.
    read = {name: shape for name, shape in model.shapes().items() if "vocab_embedding" not in name or model.share_embedding_table}
    weight_bytes = sum(math.prod(shape) for shape in read.values()) * getattr(torch, config.dtype).itemsize
    block_bytes = core.page_bytes * core.num_layers
    blocks = context / BLOCK_TOKENS
    if config.dense:
        request_bytes = blocks * block_bytes
    else:
        summary_bytes = block_bytes / BLOCK_TOKENS  # two vectors for 16 keys and 16 values
        request_bytes = min(core.top_k_blocks + 1, blocks) * block_bytes + blocks * summary_bytes
    hbm_bytes = weight_bytes + running * request_bytes
    return {"hbm_floor_ms": hbm_bytes / rates["hbm_gb_s"] / 1e6, "link_floor_ms": link_mb / rates["link_gb_s"]}


def _make_arms(args: argparse.Namespace) -> list[Arm]:
    """An engine a mode, on the same weights: they take turns."""
    configs = {mode: _config(args, mode) for mode in args.mode}
    widest = max(configs.values(), key=lambda c: c.max_num_tokens)
    loaded = load_model(widest)
    shared = LoadedModel(loaded.config, {}, loaded.tokenizer, make_decoder(widest, loaded, core_config(widest, loaded.config)))
    runner = SyntheticRunner if args.prefill == "synthetic" else CudaRunner
    arms = []
    for mode, config in configs.items():
        begin = time.perf_counter()
        arms.append(Arm(mode, Engine(config, model=shared, runner=runner)))
        say(f"{mode}: engine made in {time.perf_counter() - begin:.1f} s; {torch.cuda.mem_get_info()[0] / GIB:.1f} GiB of the GPU left")
    return arms


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    require_cuda()
    rates = measured_rates()
    say(f"plain read {rates['hbm_gb_s']:.0f} GB/s, pinned copy {rates['link_gb_s']:.1f} GB/s")
    arms = _make_arms(args)
    rows = []

    def measure(arm: Arm, concurrency: int, share: Share, filled: dict[str, float]) -> None:
        chosen = "table" if share is None else ":".join(str(part) for part in share)
        row = _rounded({"sms": chosen, **_measured(arm, args, rates, concurrency, filled)}, 3)
        rows.append(row)
        _report(row)
        if args.json:
            append_row(args.json, row)

    measured_steps, profiled_steps = _passes(args)
    _in_turn(arms, args, measured_steps, measure)
    if args.slow_down or args.profile:  # last of all: launches stay slower once the profiler has run
        measured = iter(rows)

        def profile(arm: Arm, concurrency: int, share: Share, filled: dict[str, float]) -> None:
            row = next(measured)
            if args.slow_down and row["gather_ctas"]:
                _slow_down(arm, args.slow_down, row)
                _share(arm, share)
            if args.profile:
                _profile(arm, args, concurrency)

        _in_turn(arms, args, profiled_steps, profile)
    return rows


def _passes(args: argparse.Namespace) -> tuple[int, int]:
    """Steps that a share takes at most: measured, and profiled."""
    return WARM_UP_STEPS + args.output + REFILL_STEPS, (WARM_UP_STEPS + _PROFILED_STEPS) * 3


def _output(args: argparse.Namespace, concurrency: int, steps: int) -> int:
    """Tokens of a request: it runs on while others are filled in, some steps each, and then for `steps` steps a share of SMs."""
    return steps * max(1, len(args.sms)) + 3 * concurrency + 32


def _in_turn(arms: list[Arm], args: argparse.Namespace, steps: int, call: Callable[[Arm, int, Share, dict[str, float]], None]) -> None:
    """Call with each concurrency, arm and share of SMs, and what `fill` returned: as many requests run as fit, for `steps` a share."""
    for concurrency in args.concurrency:
        for arm in arms:
            filled = arm.fill(concurrency, args.context, _output(args, concurrency, steps))
            for share in [None] if arm.engine.config.dense else args.sms or [None]:
                if share is not None:
                    _share(arm, share)
                call(arm, concurrency, share, filled)
            arm.empty()


def _share(arm: Arm, share: Share) -> None:
    """None: by the GPU's table."""
    arm.engine.runner.share_sms([SmShare(float("inf"), *share)] if share else sm_shares(torch.cuda.get_device_name()))


def _rounded(row: dict[str, Any], digits: int) -> dict[str, Any]:
    return {name: round(value, digits) if isinstance(value, float) else value for name, value in row.items()}


def _measured(arm: Arm, args: argparse.Namespace, rates: dict[str, float], concurrency: int, filled: dict[str, float]) -> dict[str, Any]:
    result, running = arm.measure(args.output), int(filled["running"])
    gather_ctas, foreground_sms, in_flight = arm.engine.runner.sms_in_use()
    floors = _floors(arm, running, args.context, result["link_mb_step"], rates)
    return {
        "mode": arm.name,
        "gather_ctas": gather_ctas,
        "foreground_sms": foreground_sms,
        "gather_in_flight": in_flight,
        "model": args.model,
        "context": args.context,
        "concurrency": concurrency,
        "running": running,
        "tok_s": running / result["tpot_mean_ms"] * 1e3,
        **result,
        "prefill": args.prefill,
        "prefill_s": filled["prefill_s"],
        **floors,
        **rates,
        "link_share": floors["link_floor_ms"] / result["tpot_mean_ms"],
        "fetch_ratio": args.fetch_ratio,
        "drafter": args.drafter,
        "hbm_kv_gib": args.hbm_kv_gib,
        "host_kv_gib": arm.engine.config.host_kv_gib,
    }


def _slow_down(arm: Arm, file: str, row: dict[str, Any]) -> None:
    """The foreground's kernels beside the gather, and of steps in which nothing is fetched; the step of `row` against what bounds it."""
    beside = arm.foreground_ms(_PROFILED_STEPS)
    _share(arm, (0, 0))
    alone = arm.foreground_ms(_PROFILED_STEPS)
    same = {name: row[name] for name in ("sms", "model", "context", "running", "fetch_ratio", "tpot_ms", "link_floor_ms")}
    over = row["tpot_ms"] / max(beside, row["link_floor_ms"])
    found = {"foreground_alone_ms": alone, "foreground_ms": beside, "slow_down": beside / alone, "over_bound": over}
    append_row(file, _rounded(same | found, 3))
    say(
        f"{row['mode']:6} {row['context']} x {row['running']:3} ({row['sms']}): foreground {alone:.2f} ms, {beside:.2f} beside the gather: "
        f"{beside / alone:.2f} times; the step is {over:.3f} of what bounds it"
    )


def _profile(arm: Arm, args: argparse.Namespace, concurrency: int) -> None:
    trace = f"{args.trace}.{arm.name}.{concurrency}.json.gz" if args.trace else None
    for entry in arm.profile(_PROFILED_STEPS, trace):
        append_row(args.profile, {"concurrency": concurrency, "context": args.context, **_rounded(entry, 2)})


def _report(row: dict[str, Any]) -> None:
    share = f"{row['gather_ctas']}:{row['foreground_sms']}:{row['gather_in_flight']}"
    say(
        f"{row['mode']:6} {row['context']} x {row['running']:3} of {row['concurrency']:3} ({share}): "
        f"{row['tok_s']:7.0f} tok/s, TPOT {row['tpot_ms']:6.2f} ms (mean {row['tpot_mean_ms']:.2f}, p99 {row['tpot_p99_ms']:.2f}), "
        f"floors: HBM {row['hbm_floor_ms']:.2f}, link {row['link_mb_step']:.0f} MB = {row['link_floor_ms']:.2f} ms; "
        f"stall {row['stall_ms_step']:.2f}, host {row['host_ms_step']:.2f}, turn {row['turn_ms']:.2f} ms, "
        f"prefill {row['prefill_s']:.1f} s"
    )


def _modes(text: str) -> list[str]:
    modes = text.split(",")
    if not set(modes) <= {"dense", "oasis"} or len(set(modes)) < len(modes):
        raise argparse.ArgumentTypeError(f"{text!r}: give dense, oasis or dense,oasis")
    return modes


def _sms(text: str) -> tuple[int, ...]:
    try:
        share = tuple(int(part) for part in text.split(":"))
    except ValueError:
        share = ()
    if len(share) not in (2, 3):
        raise argparse.ArgumentTypeError(
            f"{text!r}: give <gather CTAs>:<SMs of products>[:<runs in flight a CTA>], such as 4:128 or 8:120:4"
        )
    return share


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=["cuda"], default="cuda")
    parser.add_argument("--model", default="qwen3-8b", help="a preset with --dummy-weights, else a name or path as for `generate`")
    parser.add_argument("--dummy-weights", action="store_true")
    parser.add_argument("--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16")
    parser.add_argument("--context", type=int, default=16384, help="tokens of each prompt")
    parser.add_argument("--output", type=int, default=256, help="decode steps that are measured")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[16])
    parser.add_argument("--hbm-kv-gib", type=float, default=56.0, help="of the GPU's memory for KV and summaries, in each arm")
    parser.add_argument("--host-kv-gib", type=float, default=32.0, help="pinned, of the arm oasis; the dense arm has none")
    parser.add_argument("--host-memory-gib", type=float, default=None, help="what the machine has in all, where memory grows with use")
    parser.add_argument("--mode", type=_modes, default="dense,oasis", help="the arms, in the order of their turns")
    parser.add_argument("--prefill", choices=["synthetic", "real"], default="synthetic")
    parser.add_argument("--top-k-blocks", type=int, default=128)
    parser.add_argument("--fetch-ratio", default="0.05")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--draft-len", type=int, default=1)
    parser.add_argument("--max-num-tokens", type=int, default=8192, help="rows a step")
    parser.add_argument(
        "--sms",
        type=_sms,
        nargs="+",
        default=[],
        help="gather CTAs : SMs of products (0: all) : runs of 8 KiB in flight a CTA (8), for oasis, in place of the table's; each is "
        "measured; 0:0 fetches nothing",
    )
    parser.add_argument(
        "--slow-down",
        help="file that what the gather costs the foreground's kernels is added to, a JSON object a line: last, in steps that are profiled",
    )
    parser.add_argument("--no-graphs", action="store_true")
    parser.add_argument("--profile", help="file that the kernels and CUDA calls of a step are added to, a JSON object a line")
    parser.add_argument("--trace", help="with --profile: begin of the names of traces for chrome://tracing")
    parser.add_argument("--json", help="file that a JSON object a line is added to")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="oasiskv bench decode --backend cuda", description=__doc__)
    add_arguments(parser)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    run(parser.parse_args(argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
