"""`oasiskv bench kernels`: each CUDA kernel alone, against its floor.

Bytes are those that the kernel must move; the floor is their time at the rate of a plain read (device memory) or of a pinned copy (the
link), measured in the same run, alternating. Every figure is the median of CUDA-event times over replays of a graph of several calls,
on inputs larger than the L2 cache. Prefill attention is bound by arithmetic: it is held against torch's scaled_dot_product_attention on the
same q, k and v in dense tensors, by floating-point operations a second, where only what is seen counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from oasiskv import _core
from oasiskv.bench.scoring import CALLS, scoring, selection_row
from oasiskv.bench.timing import Read, Run, copies, ints, paired, stream
from oasiskv.engine.cuda_runner import require_cuda
from oasiskv.engine.sm_share import sm_shares

_cuda = getattr(_core, "cuda", None)
ATTENTION = [("sparse", 64, 2080, 2), ("sparse", 16, 2080, 2), ("dense", 16, 16384, 1), ("dense", 24, 16384, 1), ("dense", 12, 32768, 1)]
PREFILL = [("full", 4, 16384, 1), ("chunk", 1, 8192, 8193)]
SCORING = [(64, 1024), (64, 2048), (16, 2048), (16, 1024)]
GATHERS = [(2, 8), (3, 8), (4, 8), (8, 8), (6, 4), (8, 4), (12, 4)]  # CTAs, runs in flight each
KERNELS = ["attention", "prefill", "score", "select", "gather"]


def attention(batch: int, tokens: int, rows: int, heads: int, group: int, dim: int, sms: int) -> tuple[Run, int, list[torch.Tensor]]:
    """bf16 decode attention of `batch` segments that see `tokens` tokens each: (call, bytes, what it holds on to)."""
    pages_each = -(-(tokens + rows - 1) // 16)
    pool_bytes = batch * pages_each * heads * 2 * 16 * dim * 2
    pools = torch.randn(copies(pool_bytes), batch * pages_each, heads, 2, 16, dim, device="cuda", dtype=torch.bfloat16).unbind()
    pages = torch.randperm(batch * pages_each, device="cuda", dtype=torch.int32)
    q = torch.randn(batch * rows, heads * group, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    segments = ints([(i * rows, rows, i * pages_each, pages_each, tokens) for i in range(batch)])
    tiles = -(-rows * group // _cuda.lane_tile)
    size = _cuda.split_size([pages_each] * batch, heads * tiles, sms * _cuda.attention_ctas_per_sm, fixed=8)
    count = -(-pages_each // size)
    cuts = [pages_each * s // count for s in range(count + 1)]
    splits = ints([(i, cuts[s], cuts[s + 1], s, count) for i in range(batch) for s in range(count)])
    slots = len(splits) * heads * tiles
    partials = torch.empty(slots * _cuda.attention_partial_floats(dim), device="cuda")
    arrivals, number = torch.zeros(slots, dtype=torch.int32, device="cuda"), ints([len(splits)])
    turn = itertools.cycle(pools)

    def call() -> None:
        _cuda.attention(
            dtype="bfloat16", num_kv_heads=heads, group=group, head_dim=dim, q=q.data_ptr(), pool=next(turn).data_ptr(), out=out.data_ptr(),
            segments=segments.data_ptr(), pages=pages.data_ptr(), splits=splits.data_ptr(), num_splits=number.data_ptr(),
            max_lane_tiles=tiles, partials=partials.data_ptr(), arrivals=arrivals.data_ptr(),
            num_ctas=sms * _cuda.attention_ctas_per_sm, stream=stream(),
        )  # fmt: skip

    return call, pool_bytes, [pages, q, out, segments, splits, partials, arrivals, number]


def prefill(batch: int, rows: int, visible: int, heads: int, group: int, dim: int) -> tuple[Run, dict[str, Run], float, list[torch.Tensor]]:
    """bf16 attention of `batch` segments of `rows` rows, the first of which sees `visible` tokens, which end a page with the last row's:
    (call, torch's by its backends, floating-point operations, what the first holds on to)."""
    tokens, hq = visible + rows - 1, heads * group
    pages_each = tokens // 16
    pool = torch.randn(batch * pages_each, heads, 2, 16, dim, device="cuda", dtype=torch.bfloat16)
    pages = torch.randperm(batch * pages_each, device="cuda", dtype=torch.int32)
    q = torch.randn(batch * rows, hq, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    segments = [(i * rows, rows, i * pages_each, pages_each, visible) for i in range(batch)]
    tiles = _cuda.prefill_tiles(segments, heads, group, dim)
    segments_there, tiles_there = ints(segments), ints(tiles)

    def call() -> None:
        _cuda.prefill(
            dtype="bfloat16", num_kv_heads=heads, group=group, head_dim=dim, q=q.data_ptr(), pool=pool.data_ptr(), out=out.data_ptr(),
            segments=segments_there.data_ptr(), pages=pages.data_ptr(), tiles=tiles_there.data_ptr(), num_tiles=len(tiles),
            num_pages=len(pool), stream=stream(),
        )  # fmt: skip

    dense = pool[pages.long()].view(batch, pages_each, heads, 2, 16, dim).permute(3, 0, 2, 1, 4, 5).reshape(2, batch, heads, tokens, dim)
    dense_q = q.view(batch, rows, hq, dim).transpose(1, 2)

    corner = causal_lower_right(rows, tokens)

    def flash() -> None:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            scaled_dot_product_attention(dense_q, dense[0], dense[1], attn_mask=corner, enable_gqa=True)

    def cudnn() -> None:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            scaled_dot_product_attention(dense_q, dense[0], dense[1], is_causal=True, enable_gqa=True)

    # Torch has no causal mask that ends in the lower right corner for cuDNN.
    arms = {"flash": flash, "cudnn": cudnn} if rows == tokens else {"flash": flash}
    pairs = batch * (rows * visible + rows * (rows - 1) // 2)
    return call, arms, 4.0 * dim * pairs * hq, [pool, pages, q, out, segments_there, tiles_there]


def gathering(count: int, size: int, ctas: int, in_flight: int, host: torch.Tensor) -> tuple[Run, Run, list[torch.Tensor]]:
    """`count` runs of `size` bytes from random places of `host`: (gather call, pinned copy of as many bytes, what they hold on to)."""
    places = torch.randperm(host.numel() // size)[:count]
    device = torch.empty(count * size, dtype=torch.uint8, device="cuda")
    copies = torch.stack([host.data_ptr() + places * size, device.data_ptr() + torch.randperm(count) * size], dim=1).cuda()
    number = ints([count])

    def gather() -> None:
        _cuda.gather(copies.data_ptr(), number.data_ptr(), size, ctas, in_flight, stream())

    def copy() -> None:
        device.copy_(host[: count * size], non_blocking=True)

    return gather, copy, [copies, number, device]


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    require_cuda()
    rows: list[dict[str, object]] = []
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def report(kernel: str, shape: str, size: int, times: dict[str, float]) -> None:
        us, floor = times["kernel"], times["floor"]
        row = {
            "kernel": kernel,
            "shape": shape,
            "bytes": size,
            "us": round(us, 1),
            "floor_us": round(floor, 1),
            "share": round(floor / us, 3),
        }
        rows.append(row)
        print(f"{kernel:10} {shape:34} {us:9.1f} us, floor {floor:9.1f} us: {floor / us:6.1%}", file=sys.stderr, flush=True)

    if "attention" in args.only:
        for name, batch, tokens, q_rows in ATTENTION:
            call, size, held = attention(batch, tokens, q_rows, 8, 4, 128, sms)
            shape = f"{name}, {batch} x {tokens:,}, {q_rows} rows"
            report("attention", shape, size, paired({"kernel": call, "floor": Read(size)}, args.runs, 10))
            del call, held
    for name, batch, q_rows, visible in PREFILL if "prefill" in args.only else []:
        call, arms, flops, held = prefill(batch, q_rows, visible, 8, 4, 128)
        times = paired({"kernel": call, **arms}, args.runs, 2)
        shape = f"{name}, {batch} x {q_rows:,} rows at {visible:,}"
        rates = {arm: flops / us / 1e6 for arm, us in times.items()}
        best = max(rates[arm] for arm in arms)
        row = {"kernel": "prefill", "shape": shape, "us": round(times["kernel"], 1), "tflops": round(rates["kernel"], 1)}
        row |= {f"{arm}_tflops": round(rates[arm], 1) for arm in arms} | {"ratio": round(rates["kernel"] / best, 3)}
        rows.append(row)
        others = ", ".join(f"{arm} {rates[arm]:.0f}" for arm in arms)
        print(f"{'prefill':10} {shape:34} {times['kernel']:9.1f} us, {rates['kernel']:.0f} TFLOP/s; {others}", file=sys.stderr, flush=True)
        del call, arms, held
    host = torch.empty(4 << 30, dtype=torch.uint8).pin_memory() if {"select", "gather"} & set(args.only) else None
    for batch, blocks in SCORING if {"score", "select"} & set(args.only) else []:
        few = scoring(batch, blocks, 1, 8, 4, 128, sms, 128)
        shape = f"{batch} x {blocks:,} blocks, 1 row"
        report("score", shape, few.summary_bytes, paired({"kernel": few.score, "floor": Read(few.summary_bytes)}, args.runs, 10))
        report("select", shape, few.score_bytes, paired({"kernel": few.select, "floor": few.clear}, args.runs, CALLS, few.clear))
        many = scoring(batch, blocks, 1, 8, 4, 128, sms, 128, repeat=4) if batch == 64 else None
        for share in sm_shares(torch.cuda.get_device_name()) if many and host is not None else []:
            gather, _, held = gathering(16384, 8192, share.gather_ctas, share.in_flight, host)
            beside = f"{shape}, beside {share.gather_ctas} CTAs x {share.in_flight} runs"
            row = selection_row(beside, few, many, gather, 16384 * 8192, sms, args.runs)
            rows.append(row)
            times = f"{row['us']:9.1f} us, {row['alone_us']} alone; {row['sm_us']} SM-us; the gather {row['gather_gbps']} GB/s"
            print(f"{'select':10} {beside:34} {times}", file=sys.stderr, flush=True)
            del gather, held
        del few, many
    for count, (ctas, in_flight) in itertools.product((2048, 3072, 16384), GATHERS) if "gather" in args.only else []:
        gather, copy, held = gathering(count, 8192, ctas, in_flight, host)
        shape = f"{count:,} x 8 KiB, {ctas} CTAs x {in_flight} runs"
        report("gather", shape, count * 8192, paired({"kernel": gather, "floor": copy}, args.runs, 4))
        del gather, copy, held
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="oasiskv bench kernels", description=__doc__)
    parser.add_argument("--runs", type=int, default=15, help="paired runs; medians are reported")
    parser.add_argument("--only", nargs="+", choices=KERNELS, default=KERNELS, help="kernels to run")
    parser.add_argument("--json", action="store_true", help="one JSON object a line on standard output")
    args = parser.parse_args(argv)
    for row in run(args):
        if args.json:
            print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
