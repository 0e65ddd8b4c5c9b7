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
import statistics
import sys
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from oasiskv import _core
from oasiskv.engine.cuda_runner import require_cuda

Run = Callable[[], None]
_cuda = getattr(_core, "cuda", None)
ATTENTION = [("sparse", 64, 2080, 2), ("sparse", 16, 2080, 2), ("dense", 16, 16384, 1), ("dense", 24, 16384, 1), ("dense", 12, 32768, 1)]
PREFILL = [("full", 4, 16384, 1), ("chunk", 1, 8192, 8193)]
SCORING = [(64, 1024), (64, 2048), (16, 2048), (16, 1024)]
KERNELS = ["attention", "prefill", "score", "select", "gather"]


def _ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def paired(arms: dict[str, Run], runs: int, calls: int) -> dict[str, float]:
    """Median microseconds a call of each arm; the arms alternate, a graph of `calls` calls between two events."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    graphs = {}
    for name, call in arms.items():
        call()
        torch.cuda.synchronize()
        graphs[name] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graphs[name]):
            for _ in range(calls):
                call()
    for run in range(runs + 2):
        for name, graph in graphs.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if run >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(t) for name, t in times.items()}


class Read:
    """A plain read of as many bytes; the floor of what only reads device memory."""

    def __init__(self, size: int) -> None:
        self._buffer = torch.empty(size, dtype=torch.uint8, device="cuda")
        self._out = _ints([0])
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(self) -> None:
        _cuda.read(self._buffer.data_ptr(), self._buffer.numel(), self._out.data_ptr(), self.sms * 4, _stream())


def attention(batch: int, tokens: int, rows: int, heads: int, group: int, dim: int, sms: int) -> tuple[Run, int, list[torch.Tensor]]:
    """bf16 decode attention of `batch` segments that see `tokens` tokens each: (call, bytes, what it holds on to)."""
    pages_each = -(-(tokens + rows - 1) // 16)
    pool = torch.randn(batch * pages_each, heads, 2, 16, dim, device="cuda", dtype=torch.bfloat16)
    pages = torch.randperm(batch * pages_each, device="cuda", dtype=torch.int32)
    q = torch.randn(batch * rows, heads * group, dim, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(q)
    segments = _ints([(i * rows, rows, i * pages_each, pages_each, tokens) for i in range(batch)])
    tiles = -(-rows * group // _cuda.lane_tile)
    size = _cuda.split_size([pages_each] * batch, heads * tiles, sms * _cuda.attention_ctas_per_sm, fixed=8)
    count = -(-pages_each // size)
    cuts = [pages_each * s // count for s in range(count + 1)]
    splits = _ints([(i, cuts[s], cuts[s + 1], s, count) for i in range(batch) for s in range(count)])
    slots = len(splits) * heads * tiles
    partials = torch.empty(slots * _cuda.attention_partial_floats(dim), device="cuda")
    arrivals, number = torch.zeros(slots, dtype=torch.int32, device="cuda"), _ints([len(splits)])

    def call() -> None:
        _cuda.attention(
            dtype="bfloat16", num_kv_heads=heads, group=group, head_dim=dim, q=q.data_ptr(), pool=pool.data_ptr(), out=out.data_ptr(),
            segments=segments.data_ptr(), pages=pages.data_ptr(), splits=splits.data_ptr(), num_splits=number.data_ptr(),
            max_lane_tiles=tiles, partials=partials.data_ptr(), arrivals=arrivals.data_ptr(),
            num_ctas=sms * _cuda.attention_ctas_per_sm, stream=_stream(),
        )  # fmt: skip

    return call, pool.numel() * 2, [pool, pages, q, out, segments, splits, partials, arrivals, number]


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
    segments_there, tiles_there = _ints(segments), _ints(tiles)

    def call() -> None:
        _cuda.prefill(
            dtype="bfloat16", num_kv_heads=heads, group=group, head_dim=dim, q=q.data_ptr(), pool=pool.data_ptr(), out=out.data_ptr(),
            segments=segments_there.data_ptr(), pages=pages.data_ptr(), tiles=tiles_there.data_ptr(), num_tiles=len(tiles),
            num_pages=len(pool), stream=_stream(),
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


def scoring(
    batch: int, blocks: int, rows: int, heads: int, group: int, dim: int, sms: int, top_k: int
) -> tuple[Run, Run, Run, int, list[torch.Tensor]]:
    """bf16 scoring and the selection after it: (score, selection, the clearing before it, bytes of summaries, what they hold on to)."""
    stride, padded = -(-blocks // 64), -(-blocks // 32) * 32
    tables = torch.randperm(batch * stride, device="cuda", dtype=torch.int32)
    pool = torch.randn(batch * stride, heads, 64, 2, dim, device="cuda", dtype=torch.bfloat16)
    staged = torch.randn(batch * rows, heads * group, dim, device="cuda", dtype=torch.bfloat16)
    lanes = rows * group
    predictors = _ints([(i, i * rows, rows, blocks, top_k, i * heads * lanes * padded, padded) for i in range(batch)])
    size = _cuda.split_size([-(-blocks // 16)] * batch, heads, sms * _cuda.score_ctas_per_sm, fixed=4) * 16
    splits = _ints([(i, b, min(blocks, b + size)) for i in range(batch) for b in range(0, blocks, size)])
    scores = torch.empty(batch * heads * lanes * padded, device="cuda")
    number, count, step = _ints([len(splits)]), _ints([batch]), torch.tensor([1000], device="cuda")
    slot_blocks = torch.stack([torch.randperm(blocks, device="cuda")[:top_k] for _ in range(batch * heads)]).int()
    slot_steps = torch.randint(900, 1000, (batch * heads, top_k), device="cuda").int()
    first_choice, slot_pages = torch.empty_like(slot_blocks), torch.zeros(batch * top_k, dtype=torch.int32, device="cuda")
    host_units = torch.zeros(batch * blocks, dtype=torch.int32, device="cuda")
    copies, copied = torch.empty(batch * heads * 6, 2, dtype=torch.int64, device="cuda"), _ints([0])
    stats = torch.zeros(batch * 4, dtype=torch.int64, device="cuda")

    def score() -> None:
        _cuda.score(
            dtype="bfloat16", num_kv_heads=heads, group=group, head_dim=dim, kind="mean_std", staged=staged.data_ptr(),
            summaries=pool.data_ptr(), predictors=predictors.data_ptr(), summary_pages=tables.data_ptr(), summary_stride=stride,
            splits=splits.data_ptr(), num_splits=number.data_ptr(), max_lane_tiles=-(-lanes // _cuda.lane_tile), scores=scores.data_ptr(),
            num_ctas=sms * _cuda.score_ctas_per_sm, stream=_stream(),
        )  # fmt: skip

    def clear() -> None:
        copied.zero_()

    def select() -> None:
        clear()
        _cuda.select(
            num_kv_heads=heads, group=group, head_dim=dim, combine="softmax_sum", top_k=top_k, fetch_cap=6, sink_blocks=1, element_bytes=2,
            scores=scores.data_ptr(), predictors=predictors.data_ptr(), num_predictors=count.data_ptr(), max_predictors=batch,
            max_blocks=blocks, max_lanes=lanes, step=step.data_ptr(), slot_blocks=slot_blocks.data_ptr(),
            slot_steps=slot_steps.data_ptr(),
            first_choice=first_choice.data_ptr(), slot_pages=slot_pages.data_ptr(), slot_stride=top_k, host_units=host_units.data_ptr(),
            host_stride=blocks, host_step=1, host_offset=0, host_base=0, pool=0, copies=copies.data_ptr(), num_copies=copied.data_ptr(),
            stats=stats.data_ptr(), stream=_stream(),
        )  # fmt: skip

    held = [tables, pool, staged, predictors, splits, scores, number, count, step, slot_blocks, slot_steps, first_choice, slot_pages]
    return score, select, clear, pool.numel() * 2, [*held, host_units, copies, copied, stats]


def gathering(count: int, size: int, ctas: int, host: torch.Tensor) -> tuple[Run, Run, list[torch.Tensor]]:
    """`count` runs of `size` bytes from random places of `host`: (gather call, pinned copy of as many bytes, what they hold on to)."""
    places = torch.randperm(host.numel() // size)[:count]
    device = torch.empty(count * size, dtype=torch.uint8, device="cuda")
    copies = torch.stack([host.data_ptr() + places * size, device.data_ptr() + torch.randperm(count) * size], dim=1).cuda()
    number = _ints([count])

    def gather() -> None:
        _cuda.gather(copies.data_ptr(), number.data_ptr(), size, ctas, _stream())

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
    for batch, blocks in SCORING if {"score", "select"} & set(args.only) else []:
        score, select, clear, size, held = scoring(batch, blocks, 1, 8, 4, 128, sms, 128)
        shape = f"{batch} x {blocks:,} blocks, 1 row"
        report("score", shape, size, paired({"kernel": score, "floor": Read(size)}, args.runs, 10))
        report("select", shape, held[5].numel() * 4, paired({"kernel": select, "floor": clear}, args.runs, 10))
        del score, select, clear, held
    if "gather" in args.only:
        host = torch.empty(4 << 30, dtype=torch.uint8).pin_memory()
        for count, ctas in itertools.product((2048, 3072, 16384), (2, 3, 4, 8)):
            gather, copy, held = gathering(count, 8192, ctas, host)
            report("gather", f"{count:,} x 8 KiB, {ctas} CTAs", count * 8192, paired({"kernel": gather, "floor": copy}, args.runs, 4))
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
