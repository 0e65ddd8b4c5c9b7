"""The CUDA kernels of attention, scoring and selection against float64 references: random shapes, odd sizes, poisoned outputs and
poisoned unused memory.
"""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch

from oasiskv import _core
from reference.cuda import DTYPES, NAN, SMALL, attention_reference, ints, needs_gpu, relative_error, score_reference, stream

pytestmark = needs_gpu

ATTENTION_TOLERANCE = {"bfloat16": 6e-3, "float16": 8e-4, "float32": 3e-6}
TOKENS = [1, 15, 17, 40, 130] if SMALL else [1, 15, 16, 17, 500, 512, 513, 1000, 2100]
BLOCKS = [1, 15, 33, 65, 130] if SMALL else [1, 2, 15, 31, 33, 63, 64, 65, 200, 300, 1000, 2048]


# ---------------------------------------------------------------- attention


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
def test_attention(dtype: str, dim: int, group: int) -> None:
    rng = random.Random(f"{dtype} {dim} {group}")
    torch.manual_seed(rng.randrange(2**31))
    for num_ctas, split in ((5, 32), (132 * 2, 7), (132 * 2, 1000)):
        heads, batch = rng.choice([1, 2, 8]), rng.randrange(1, 3 if SMALL else 9)
        shapes = [(rng.randrange(1, 5), rng.choice(TOKENS)) for _ in range(batch)]
        shapes[0] = (1 + 255 // group // 4, 70 if SMALL else 700)  # several lane tiles
        need = [(visible + rows - 1 + 15) // 16 for rows, visible in shapes]
        pool = torch.full((sum(need) + 3, heads, 2, 16, dim), NAN, dtype=DTYPES[dtype], device="cuda")
        order = torch.randperm(len(pool), device="cuda", dtype=torch.int32)
        total = sum(rows for rows, _ in shapes)
        q = torch.randn(total, heads * group, dim, device="cuda").to(DTYPES[dtype])
        segments, splits, pages0, row0 = [], [], 0, 0
        for i, ((rows, visible), n) in enumerate(zip(shapes, need, strict=True)):
            mine = order[pages0 : pages0 + n].long()
            pool[mine] = torch.randn(n, heads, 2, 16, dim, device="cuda").to(DTYPES[dtype])
            beyond = n * 16 - (visible + rows - 1)
            if beyond:
                pool[mine[-1], :, :, 16 - beyond :] = NAN  # never written yet
            segments.append((row0, rows, pages0, n, visible))
            count = -(-n // split)
            splits += [(i, s * split, min(n, (s + 1) * split), s, count) for s in range(count)]
            pages0, row0 = pages0 + n, row0 + rows
        tiles = max(-(-rows * group // _core.cuda.lane_tile) for rows, _ in shapes)
        slots = len(splits) * heads * tiles
        out = torch.full_like(q, NAN)
        partials = torch.full((slots * _core.cuda.attention_partial_floats(dim),), NAN, device="cuda")
        arrivals = torch.zeros(slots, dtype=torch.int32, device="cuda")
        keep = [ints(segments), ints(splits), ints([len(splits)])]
        for _ in range(2):  # the arrival counters must be left as they were
            out.fill_(NAN)
            _core.cuda.attention(
                dtype=dtype, num_kv_heads=heads, group=group, head_dim=dim, q=q.data_ptr(), pool=pool.data_ptr(), out=out.data_ptr(),
                segments=keep[0].data_ptr(), pages=order.data_ptr(), splits=keep[1].data_ptr(), num_splits=keep[2].data_ptr(),
                max_lane_tiles=tiles, partials=partials.data_ptr(), arrivals=arrivals.data_ptr(), num_ctas=num_ctas, stream=stream(),
            )  # fmt: skip
            torch.cuda.synchronize()
        for row0, rows, first, n, visible in segments:
            expected = attention_reference(q[row0 : row0 + rows], pool.nan_to_num(0), order[first : first + n], rows, visible, heads, group)
            assert relative_error(out[row0 : row0 + rows], expected) < ATTENTION_TOLERANCE[dtype]
        assert int(arrivals.abs().sum()) == 0


# ---------------------------------------------------------------- scores


def score(dtype, kind, heads, group, staged, pool, tables, predictors, splits, scores, num_ctas) -> None:
    """Runs the kernel to its end; staged [rows, Hq, D], pool [page, H, 64, 2, D], tables [request, pages]."""
    tiles = max(-(-rows * group // _core.cuda.lane_tile) for _, _, rows, *_ in predictors)
    keep = [ints(predictors), ints(splits), ints([len(splits)])]
    _core.cuda.score(
        dtype=dtype, num_kv_heads=heads, group=group, head_dim=staged.shape[-1], kind=kind, staged=staged.data_ptr(),
        summaries=pool.data_ptr(), predictors=keep[0].data_ptr(), summary_pages=tables.data_ptr(), summary_stride=tables.shape[1],
        splits=keep[1].data_ptr(), num_splits=keep[2].data_ptr(), max_lane_tiles=tiles, scores=scores.data_ptr(), num_ctas=num_ctas,
        stream=stream(),
    )  # fmt: skip
    torch.cuda.synchronize()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["mean_std", "minmax", "halves"])
def test_score(dtype: str, dim: int, kind: str) -> None:
    rng = random.Random(f"{dtype} {dim} {kind}")
    torch.manual_seed(rng.randrange(2**31))
    for num_ctas, size in ((3, 256), (132 * 3, 112)):
        heads, group, batch = rng.choice([1, 2, 8]), rng.choice([1, 3, 4, 7, 16]), rng.randrange(1, 6)
        predictors, splits, scores0, staged0 = [], [], 0, 0
        stride = 40
        tables = torch.randperm(batch * stride, device="cuda", dtype=torch.int32).view(batch, stride)
        for i in range(batch):
            rows, blocks = rng.randrange(1, 4), rng.choice(BLOCKS)
            padded = -(-blocks // 32) * 32
            predictors.append((batch - 1 - i, staged0, rows, blocks, 0, scores0, padded))
            splits += [(i, b, min(blocks, b + size)) for b in range(0, blocks, size)]
            staged0, scores0 = staged0 + rows, scores0 + heads * rows * group * padded
        staged = torch.randn(staged0, heads * group, dim, device="cuda").to(DTYPES[dtype])
        pool = torch.randn(batch * stride, heads, 64, 2, dim, device="cuda").to(DTYPES[dtype])
        for p in predictors:  # what is not complete yet is not read
            for b in range(p[3], stride * 64):
                if b < p[3] + 70:
                    pool[int(tables[p[0], b // 64]), :, b % 64] = NAN
        scores = torch.full((scores0,), NAN, device="cuda")
        score(dtype, kind, heads, group, staged, pool, tables, predictors, splits, scores, num_ctas)
        for request, first, rows, blocks, _, at, padded in predictors:
            lanes = rows * group
            got = scores[at : at + heads * lanes * padded].view(heads, lanes, padded)[:, :, :blocks]
            for h in range(heads):
                q = staged[first : first + rows, h * group : (h + 1) * group].reshape(lanes, dim)
                summary = pool[tables[request].long(), h].flatten(0, 1)[:blocks]
                assert relative_error(got[h], score_reference(q, summary, kind)) < 1e-5


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.skipif(SMALL, reason="its shape is what it tests")
def test_score_of_summaries_that_are_not_in_the_cache(dtype: str, dim: int) -> None:
    """No piece is read before it has come; one that lies in the L2 cache would be there in time anyway."""
    torch.manual_seed(dim)
    batch, heads, group, blocks, size = 16, 8, 4, 2048, 112
    tables = torch.randperm(batch * 32, device="cuda", dtype=torch.int32).view(batch, 32)
    pool = torch.randn(batch * 32, heads, 64, 2, dim, device="cuda").to(DTYPES[dtype])  # 134 MB with D = 128
    staged = torch.randn(batch, heads * group, dim, device="cuda").to(DTYPES[dtype])
    predictors = [(i, i, 1, blocks, 0, i * heads * group * blocks, blocks) for i in range(batch)]
    splits = [(i, b, min(blocks, b + size)) for i in range(batch) for b in range(0, blocks, size)]
    scores = torch.full((batch, heads, group, blocks), NAN, device="cuda")
    torch.empty(2**28, device="cuda", dtype=torch.int8).zero_()  # five times the cache
    score(dtype, "mean_std", heads, group, staged, pool, tables, predictors, splits, scores, 132 * 3)
    for i in range(batch):
        for h in range(heads):
            expected = score_reference(staged[i, h * group : (h + 1) * group], pool[tables[i].long(), h].flatten(0, 1), "mean_std")
            assert relative_error(scores[i, h], expected) < 1e-5


# ---------------------------------------------------------------- selection


def group_scores(scores: np.ndarray, rows: int, group: int, combine: str, dim: int) -> np.ndarray:
    """[rows * group, blocks] -> [blocks] float64; a NaN in any lane makes the block's score NaN."""
    x = scores.astype(np.float64).reshape(rows, group, -1)
    with np.errstate(invalid="ignore"):
        if combine == "softmax_sum":
            x = x / math.sqrt(dim)
            e = np.exp(x - np.nanmax(x, axis=-1, keepdims=True))
            each = (e / np.nansum(e, axis=-1, keepdims=True)).sum(axis=1)
        else:
            each = x.sum(axis=1) if combine == "sum" else x.max(axis=1)
        return each.max(axis=0)


def lane_scores(rng: np.random.Generator, case: int, combine: str, shape: tuple[int, int, int], group: int) -> np.ndarray:
    """Scores [heads, rows * group, blocks] float32: reals for softmax_sum, else ones with many ties."""
    if combine == "softmax_sum":
        return rng.standard_normal(shape).astype(np.float32) * 3
    if case % 6 == 1:  # the lowest blocks win
        return np.full(shape, 1.5, np.float32)
    if case % 6 == 4:  # keys that differ in their last bits alone: a row's first lane decides
        values = np.zeros(shape, np.float32)
        values[:, ::group] = np.float32(1) + rng.integers(0, 16, values[:, ::group].shape).astype(np.float32) * np.float32(2.0**-23)
        return values
    return np.round(rng.standard_normal(shape).astype(np.float32) * 3)


@pytest.mark.parametrize("combine", ["max", "sum", "softmax_sum"])
def test_select(combine: str) -> None:
    rng = np.random.default_rng(len(combine))
    close = checked = 0
    for case in range(5 if SMALL else 60):
        heads, group, batch, dim = int(rng.choice([1, 2, 8])), int(rng.choice([1, 3, 4, 7, 16])), int(rng.integers(1, 5)), 64
        if case == 2:
            group = 1  # and one row: a lane alone
        if case == 5:
            group = 4  # with 9,001 blocks: scores that do not fit shared memory
        top_k = int(rng.choice([1, 2, 5, 32, 128]))
        cap, sinks, step = int(rng.integers(1, top_k + 1)), int(rng.integers(0, min(2, top_k) + 1)), 1000 + case
        requests, element_bytes = batch + 2, (2, 4)[case % 2]
        slot_blocks = np.full((requests, heads, top_k), -7, np.int32)
        slot_steps = np.full((requests, heads, top_k), -7, np.int32)
        first_choice = np.full((requests, heads, top_k), -9, np.int32)
        predictors, parts, at = [], [], 0
        for i in range(batch):
            rows, blocks = int(rng.integers(1, 4)), int(rng.choice(BLOCKS))
            if case == 2:
                rows = 1
            if case == 5 and i == 0:
                blocks = 9_001
            padded, slots = -(-blocks // 32) * 32, min(top_k, blocks)
            if case % 9 == 7:
                slots = int(rng.integers(1, slots + 1))  # fewer may go than are missing
            values = lane_scores(rng, case, combine, (heads, rows * group, padded), group)
            values[..., blocks:] = np.nan
            if case % 5 == 0 and blocks > 4 and combine != "softmax_sum":
                values[:, int(rng.integers(rows * group)), int(rng.integers(blocks))] = np.nan
            first = case % 4 == 3
            for h in range(heads):
                slot_blocks[i, h, :slots] = rng.permutation(blocks)[:slots]
                slot_steps[i, h, :slots] = rng.integers(step - 4, step, slots)
            predictors.append((i, 0, rows, blocks, 0 if first else slots, at, padded))
            parts.append(values)
            at += values.size
        max_blocks = max(p[3] for p in predictors)
        device = {
            "scores": torch.tensor(np.concatenate([p.ravel() for p in parts]), device="cuda"),
            "predictors": ints(predictors),
            "num_predictors": ints([batch]),
            "slot_blocks": ints(slot_blocks),
            "slot_steps": ints(slot_steps),
            "first_choice": ints(first_choice),
            "slot_pages": torch.arange(requests * top_k, dtype=torch.int32, device="cuda"),
            "host_units": torch.arange(requests * max_blocks, dtype=torch.int32, device="cuda"),
            "copies": torch.zeros(batch * heads * cap, 2, dtype=torch.int64, device="cuda"),
            "num_copies": ints([0]),
            "stats": torch.zeros(requests, 4, dtype=torch.int64, device="cuda"),
            "step": torch.tensor([step], device="cuda"),
        }
        host_base, pool = 1 << 40, 1 << 41
        _core.cuda.select(
            num_kv_heads=heads, group=group, head_dim=dim, combine=combine, top_k=top_k, fetch_cap=cap, sink_blocks=sinks,
            element_bytes=element_bytes,
            max_predictors=batch + 3, max_blocks=max_blocks, max_lanes=max(p[2] for p in predictors) * group,
            slot_stride=top_k, host_stride=max_blocks, host_step=1,
            host_offset=0, host_base=host_base, pool=pool, stream=stream(), **{k: v.data_ptr() for k, v in device.items()},
        )  # fmt: skip
        torch.cuda.synchronize()
        got_blocks, got_steps = device["slot_blocks"].cpu().numpy(), device["slot_steps"].cpu().numpy()
        copies = {tuple(c) for c in device["copies"][: int(device["num_copies"])].tolist()}
        expected_copies: set[tuple[int, int]] = set()
        bytes_ = 2 * 16 * dim * element_bytes
        stats = np.zeros((requests, 4), np.int64)
        skipped = set()
        for (i, _, rows, blocks, slots, _, _), values in zip(predictors, parts, strict=True):
            for h in range(heads):
                score = group_scores(values[h, :, :blocks], rows, group, combine, dim)
                score = np.where(np.isnan(score), -np.inf, score)
                nan = np.isnan(group_scores(values[h, :, :blocks], rows, group, combine, dim))
                score[:sinks] = np.inf
                rank = sorted(range(blocks), key=lambda b: (bool(nan[b]) and b >= sinks, -score[b], b))
                predicted = rank[:top_k]
                if combine == "softmax_sum":  # the kernel works in float32: what is closer than its rounding may rank either way
                    ordered = score[rank]
                    gap = np.min(np.abs(np.diff(ordered)) / np.maximum(ordered[1:], 1e-30), initial=1.0)
                    if gap < 1e-5:
                        close += 1
                        skipped.add(i)
                        continue
                checked += 1
                if not slots:
                    expected_first = sorted(predicted) + [-1] * (top_k - len(predicted))
                    assert device["first_choice"][i, h].tolist() == expected_first
                    continue
                blocks_, steps_ = slot_blocks[i, h].copy(), slot_steps[i, h].copy()
                resident = set(blocks_[:slots].tolist())
                for s in range(slots):
                    if blocks_[s] in set(predicted):
                        steps_[s] = step
                missing = [b for b in predicted if b not in resident]
                victims = sorted((int(slot_steps[i, h, s]), int(blocks_[s]), s) for s in range(slots) if blocks_[s] not in set(predicted))
                admitted = list(zip(missing, victims, strict=False))[:cap]
                for b, (_, _, s) in admitted:
                    blocks_[s], steps_[s] = b, step
                    expected_copies.add(
                        (host_base + ((i * max_blocks + b) * heads + h) * bytes_, pool + ((i * top_k + s) * heads + h) * bytes_)
                    )
                stats[i] += [len(predicted), len(admitted), len(missing) - len(admitted), 0]
                assert (got_blocks[i, h] == blocks_).all() and (got_steps[i, h] == steps_).all()
        if not skipped:
            assert copies == expected_copies and int(device["num_copies"]) == len(copies)
            assert (device["stats"].cpu().numpy() == stats).all()
    assert checked > (5 if SMALL else 200) and close < checked, (checked, close)
