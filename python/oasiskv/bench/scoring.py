"""Scoring and selection as `oasiskv bench kernels` runs them: bf16, `mean_std`, `softmax_sum`, a fetch cap of 6."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch

from oasiskv import _core
from oasiskv.bench.timing import Run, copies, ints, paired, stream, under_load

_cuda = getattr(_core, "cuda", None)


CALLS = 10  # in one timing


class Scoring(NamedTuple):
    """`select` chooses from the same scores each time, so that after some calls all that it wants is resident and nothing is fetched;
    `fetch` from two sets of scores in turn, so that each call fetches its cap. `clear`s the number of copies: before some CALLS of either
    (in a step `append` does it)."""

    score: Run
    select: Run
    fetch: Run
    clear: Run
    summary_bytes: int
    score_bytes: int  # of one set


def scoring(batch: int, blocks: int, rows: int, heads: int, group: int, dim: int, sms: int, top_k: int, repeat: int = 1) -> Scoring:
    """`batch` requests of `blocks` blocks (a multiple of 64) with `rows` staged rows. Selection is of `repeat` times as many, each of which
    has its own working set and shares the scores of `repeat` - 1 others: what differs with the number is the SMs' work, not the cache's.
    """
    stride, requests = blocks // 64, batch * repeat
    tables = torch.randperm(batch * stride, device="cuda", dtype=torch.int32)
    summary_bytes = batch * stride * heads * 64 * 2 * dim * 2
    pools = torch.randn(copies(summary_bytes), batch * stride, heads, 64, 2, dim, device="cuda", dtype=torch.bfloat16).unbind()
    staged = torch.randn(batch * rows, heads * group, dim, device="cuda", dtype=torch.bfloat16)
    lanes = rows * group
    each = heads * lanes * blocks  # scores
    predictors = ints([(i, i % batch * rows, rows, blocks, top_k, i % batch * each, blocks) for i in range(requests)])
    size = _cuda.split_size([-(-blocks // 16)] * batch, heads, sms * _cuda.score_ctas_per_sm, fixed=4) * 16
    splits = ints([(i, b, min(blocks, b + size)) for i in range(batch) for b in range(0, blocks, size)])
    scores = torch.empty(2, batch * each, device="cuda")
    number, count, step = ints([len(splits)]), ints([requests]), torch.tensor([1000], device="cuda")
    slot_blocks = torch.rand(requests * heads, blocks, device="cuda").topk(top_k).indices.int()
    slot_steps = torch.randint(900, 1000, (requests * heads, top_k), device="cuda").int()
    first_choice, slot_pages = torch.empty_like(slot_blocks), torch.zeros(requests * top_k, dtype=torch.int32, device="cuda")
    host_units = torch.zeros(requests * blocks, dtype=torch.int32, device="cuda")
    fetches, copied = torch.empty((CALLS + 1) * requests * heads * 6, 2, dtype=torch.int64, device="cuda"), ints([0])
    stats = torch.zeros(requests * 4, dtype=torch.int64, device="cuda")

    pool_turn = itertools.cycle(pools)

    def score() -> None:
        _cuda.score(
            dtype="bfloat16", num_kv_heads=heads, group=group, head_dim=dim, kind="mean_std", staged=staged.data_ptr(),
            summaries=next(pool_turn).data_ptr(), predictors=predictors.data_ptr(), summary_pages=tables.data_ptr(), summary_stride=stride,
            splits=splits.data_ptr(), num_splits=number.data_ptr(), max_lane_tiles=-(-lanes // _cuda.lane_tile), scores=scores.data_ptr(),
            num_ctas=sms * _cuda.score_ctas_per_sm, stream=stream(),
        )  # fmt: skip

    def clear() -> None:
        copied.zero_()

    def select_from(mine: torch.Tensor) -> None:
        _cuda.select(
            num_kv_heads=heads, group=group, head_dim=dim, combine="softmax_sum", top_k=top_k, fetch_cap=6, sink_blocks=1, element_bytes=2,
            scores=mine.data_ptr(), predictors=predictors.data_ptr(), num_predictors=count.data_ptr(), max_predictors=requests,
            max_blocks=blocks, max_lanes=lanes, step=step.data_ptr(), slot_blocks=slot_blocks.data_ptr(),
            slot_steps=slot_steps.data_ptr(),
            first_choice=first_choice.data_ptr(), slot_pages=slot_pages.data_ptr(), slot_stride=top_k, host_units=host_units.data_ptr(),
            host_stride=blocks, host_step=1, host_offset=0, host_base=0, pool=0, copies=fetches.data_ptr(), num_copies=copied.data_ptr(),
            stats=stats.data_ptr(), stream=stream(),
        )  # fmt: skip

    score()
    scores[1] = scores[0].view(-1, blocks).roll(blocks // 2, 1).flatten()
    scores_turn = itertools.cycle(scores)

    def select() -> None:
        select_from(scores[0])

    def fetch() -> None:
        select_from(next(scores_turn))

    return Scoring(score, select, fetch, clear, summary_bytes, batch * each * 4)


def selection_row(shape: str, few: Scoring, many: Scoring, gather: Run, gather_bytes: int, sms: int, runs: int) -> dict[str, object]:
    """Selection that fetches, alone (`alone_us`) and while `gather` keeps the link and its SMs busy (`us`; `gather_gbps` is what it moves
    meanwhile). `sm_us`: what the requests of `few` cost at full occupancy, in SM-microseconds: `many` are four times as many, and the
    difference is shared out, so that launch and latency, which each of the times includes, are not in it.
    """
    loaded = under_load(few.fetch, gather, runs, CALLS, few.clear)
    times = paired({"few": few.fetch}, runs, CALLS, few.clear) | paired({"many": many.fetch}, runs, CALLS, many.clear)
    return {
        "kernel": "select, link loaded",
        "shape": shape,
        "bytes": few.score_bytes,
        "us": round(loaded["loaded"], 1),
        "alone_us": round(loaded["alone"], 1),
        "gather_gbps": round(gather_bytes / loaded["load"] / 1e3, 1),
        "sm_us": round(sms * (times["many"] - times["few"]) / 3),
    }
