"""The CUDA kernels against float64 references: random shapes, odd sizes, poisoned outputs and poisoned unused memory.

With OASISKV_SMALL_SHAPES=1 the shapes are small enough for compute-sanitizer's racecheck.
"""

from __future__ import annotations

import math
import os
import random

import numpy as np
import pytest
import torch

from oasiskv import _core

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or not hasattr(_core, "cuda"), reason="needs a GPU and a core built with CUDA"),
]

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SIXTEEN_BIT = ["bfloat16", "float16"]
NAN = float("nan")
SMALL = os.environ.get("OASISKV_SMALL_SHAPES") == "1"
TOKENS = [1, 15, 17, 40, 130] if SMALL else [1, 15, 16, 17, 500, 512, 513, 1000, 2100]
BLOCKS = [1, 15, 33, 65, 130] if SMALL else [1, 2, 15, 31, 33, 63, 64, 65, 200, 300, 1000, 2048]


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(got).all()
    return float((got.double() - expected).norm() / expected.norm())


# ---------------------------------------------------------------- attention


def attention_reference(q, pool, pages, rows, visible, heads, group):
    """[rows, Hq, D] float64; pool [page, H, 2, 16, D]."""
    kv = pool[pages.long()].double()  # [n, H, 2, 16, D]
    keys = kv[:, :, 0].transpose(0, 1).flatten(1, 2)  # [H, n * 16, D]
    values = kv[:, :, 1].transpose(0, 1).flatten(1, 2)
    out = torch.empty(q.shape, dtype=torch.float64, device=q.device)
    for r in range(rows):
        n = visible + r
        for h in range(heads):
            x = q[r, h * group : (h + 1) * group].double() @ keys[h, :n].T / math.sqrt(q.shape[-1])
            out[r, h * group : (h + 1) * group] = x.softmax(dim=-1) @ values[h, :n]
    return out


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
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
            assert relative_error(out[row0 : row0 + rows], expected) < (6e-3 if dtype == "bfloat16" else 8e-4)
        assert int(arrivals.abs().sum()) == 0


# ---------------------------------------------------------------- scores


def score_reference(q: torch.Tensor, summary: torch.Tensor, kind: str) -> torch.Tensor:
    """q [lanes, D], summary [blocks, 2, D] -> [lanes, blocks] float64."""
    q, a, b = q.double(), summary[:, 0].double(), summary[:, 1].double()
    if kind == "mean_std":
        return q @ a.T + q.abs() @ b.T
    if kind == "minmax":
        return q.clamp(min=0) @ a.T + q.clamp(max=0) @ b.T
    return torch.maximum(q @ a.T, q @ b.T)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
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
        tiles = max(-(-p[2] * group // _core.cuda.lane_tile) for p in predictors)
        keep = [ints(predictors), ints(splits), ints([len(splits)])]
        _core.cuda.score(
            dtype=dtype, num_kv_heads=heads, group=group, head_dim=dim, kind=kind, staged=staged.data_ptr(), summaries=pool.data_ptr(),
            predictors=keep[0].data_ptr(), summary_pages=tables.data_ptr(), summary_stride=stride, splits=keep[1].data_ptr(),
            num_splits=keep[2].data_ptr(), max_lane_tiles=tiles, scores=scores.data_ptr(), num_ctas=num_ctas, stream=stream(),
        )  # fmt: skip
        torch.cuda.synchronize()
        for request, first, rows, blocks, _, at, padded in predictors:
            lanes = rows * group
            got = scores[at : at + heads * lanes * padded].view(heads, lanes, padded)[:, :, :blocks]
            for h in range(heads):
                q = staged[first : first + rows, h * group : (h + 1) * group].reshape(lanes, dim)
                summary = pool[tables[request].long(), h].flatten(0, 1)[:blocks]
                assert relative_error(got[h], score_reference(q, summary, kind)) < 1e-5


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


@pytest.mark.parametrize("combine", ["max", "sum", "softmax_sum"])
def test_select(combine: str) -> None:
    rng = np.random.default_rng(len(combine))
    close = checked = 0
    for case in range(5 if SMALL else 60):
        heads, group, batch, dim = int(rng.choice([1, 2, 8])), int(rng.choice([1, 3, 4, 7, 16])), int(rng.integers(1, 5)), 64
        top_k = int(rng.choice([1, 2, 5, 32, 128]))
        cap, sinks, step = int(rng.integers(1, top_k + 1)), int(rng.integers(0, min(2, top_k) + 1)), 1000 + case
        requests = batch + 2
        slot_blocks = np.full((requests, heads, top_k), -7, np.int32)
        slot_steps = np.full((requests, heads, top_k), -7, np.int32)
        first_choice = np.full((requests, heads, top_k), -9, np.int32)
        predictors, parts, at = [], [], 0
        for i in range(batch):
            rows, blocks = int(rng.integers(1, 4)), int(rng.choice(BLOCKS))
            padded, slots = -(-blocks // 32) * 32, min(top_k, blocks)
            values = rng.standard_normal((heads, rows * group, padded)).astype(np.float32) * 3
            if combine != "softmax_sum":
                values = np.round(values)  # many ties
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
            num_kv_heads=heads, group=group, head_dim=dim, combine=combine, top_k=top_k, fetch_cap=cap, sink_blocks=sinks, element_bytes=2,
            max_predictors=batch + 3, max_blocks=max_blocks, max_lanes=max(p[2] for p in predictors) * group, step_offset=0,
            slot_stride=top_k, host_stride=max_blocks, host_step=1,
            host_offset=0, host_base=host_base, pool=pool, stream=stream(), **{k: v.data_ptr() for k, v in device.items()},
        )  # fmt: skip
        torch.cuda.synchronize()
        got_blocks, got_steps = device["slot_blocks"].cpu().numpy(), device["slot_steps"].cpu().numpy()
        copies = {tuple(c) for c in device["copies"][: int(device["num_copies"])].tolist()}
        expected_copies: set[tuple[int, int]] = set()
        bytes_ = 2 * 16 * dim * 2
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
                for b, (_, _, s) in list(zip(missing, victims, strict=True))[:cap]:
                    blocks_[s], steps_[s] = b, step
                    expected_copies.add(
                        (host_base + ((i * max_blocks + b) * heads + h) * bytes_, pool + ((i * top_k + s) * heads + h) * bytes_)
                    )
                stats[i] += [len(predicted), min(len(missing), cap), max(0, len(missing) - cap), 0]
                assert (got_blocks[i, h] == blocks_).all() and (got_steps[i, h] == steps_).all()
        if not skipped:
            assert copies == expected_copies and int(device["num_copies"]) == len(copies)
            assert (device["stats"].cpu().numpy() == stats).all()
    assert checked > (5 if SMALL else 200) and close < checked, (checked, close)


# ---------------------------------------------------------------- the cache's ends


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("norm", [False, True])
def test_append(dtype: str, dim: int, norm: bool) -> None:
    torch.manual_seed(dim + norm)
    heads, group, rows, pages = 2, 3, 21, 9
    t, hq = DTYPES[dtype], heads * group
    qkv = torch.randn(rows, (hq + 2 * heads) * dim, device="cuda").to(t)
    positions = torch.randperm(pages * 16)[:rows]
    table = [(int(p), int(p) // 16, i // 2 if i % 2 else -1) for i, p in enumerate(positions)]
    table[4] = (-1, 0, -1)
    angles = torch.rand(pages * 16, dim // 2, device="cuda") * 6
    cos, sin = angles.cos(), angles.sin()
    weights = [torch.rand(dim, device="cuda").to(t) + 0.5 for _ in range(2)]
    q = torch.full((rows, hq, dim), NAN, dtype=t, device="cuda")
    staged = torch.full((rows, hq, dim), NAN, dtype=t, device="cuda")
    pool = torch.full((pages, heads, 2, 16, dim), NAN, dtype=t, device="cuda")
    keep = ints(table)
    _core.cuda.append(
        dtype=dtype, num_kv_heads=heads, group=group, head_dim=dim, qkv=qkv.data_ptr(), rows=keep.data_ptr(), cos=cos.data_ptr(),
        sin=sin.data_ptr(), q_norm=weights[0].data_ptr() if norm else 0, k_norm=weights[1].data_ptr() if norm else 0, norm_eps=1e-6,
        q=q.data_ptr(), staged=staged.data_ptr(), pool=pool.data_ptr(), num_rows=rows, stream=stream(),
    )  # fmt: skip
    torch.cuda.synchronize()
    x = qkv.double().view(rows, hq + 2 * heads, dim)
    written = torch.zeros(pool.shape[:4], dtype=torch.bool)
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]

    def rotated(row: int, head: int, weight: torch.Tensor) -> torch.Tensor:
        v = x[row, head]
        if norm:
            v = v / (v.square().mean() + 1e-6).sqrt() * weight.double()
        a, b, position = v[: dim // 2], v[dim // 2 :], table[row][0]
        c, s = cos[position].double(), sin[position].double()
        return torch.cat([a * c - b * s, b * c + a * s])

    for row, (position, page, to) in enumerate(table):
        if position < 0:
            assert torch.isnan(q[row]).all()
            continue
        for head in range(hq):
            expected = rotated(row, head, weights[0])
            assert relative_error(q[row, head], expected) < tolerance
            if to >= 0:
                assert torch.equal(staged[to, head], q[row, head])
        for h in range(heads):
            assert relative_error(pool[page, h, 0, position % 16], rotated(row, hq + h, weights[1])) < tolerance
            assert torch.equal(pool[page, h, 1, position % 16], qkv.view(rows, -1, dim)[row, hq + heads + h])
            written[page, h, :, position % 16] = True
    assert torch.isnan(pool[~written.cuda()]).all()
    assert torch.isnan(staged[[i for i in range(rows) if i not in {s for _, _, s in table}]]).all()


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("kind", ["mean_std", "minmax", "halves"])
def test_settle_and_write_through(dtype: str, kind: str) -> None:
    rng = np.random.default_rng(len(dtype) * len(kind))
    torch.manual_seed(1)
    t = DTYPES[dtype]
    for dim in (64, 128):
        heads, top_k, requests, summary_stride, pages = 3, 9, 4, 3, 60
        pool = torch.randn(pages, heads, 2, 16, dim, device="cuda").to(t)
        before = pool.clone()
        summaries = torch.full((requests * summary_stride, heads, 64, 2, dim), NAN, dtype=t, device="cuda")
        slot_blocks = torch.tensor(np.stack([[rng.permutation(120)[:top_k] for _ in range(heads)] for _ in range(requests)]), device="cuda")
        slot_steps = torch.tensor(rng.integers(5, 9, (requests, heads, top_k)), device="cuda")
        slot_blocks, slot_steps = slot_blocks.int(), slot_steps.int()
        was_blocks, was_steps = slot_blocks.clone(), slot_steps.clone()
        slot_pages = torch.arange(requests * top_k, dtype=torch.int32, device="cuda").view(requests, top_k)
        summary_pages = torch.randperm(requests * summary_stride, dtype=torch.int32, device="cuda").view(requests, summary_stride)
        # request, block, page, slots in use, grows: dense twice, a full working set, one with a free slot
        settled = [(0, 0, 40, -1, 0), (0, 65, 41, -1, 0), (1, 127, 42, top_k, 0), (3, 191, 43, top_k - 2, 1)]
        step, fills = torch.tensor([77], device="cuda"), torch.full((len(settled), heads), -5, dtype=torch.int32, device="cuda")
        host_step, host_offset, stride = 2, 1, 400
        units = requests * stride
        host = torch.full((units, heads, 2, 16, dim), 7.0, dtype=t).pin_memory()
        host_units = torch.randperm(units, dtype=torch.int32, device="cuda").view(requests, stride)
        lists, count = ints(settled), ints([len(settled)])
        _core.cuda.settle(
            dtype=dtype, num_kv_heads=heads, group=1, head_dim=dim, kind=kind, top_k=top_k, blocks=lists.data_ptr(),
            num_blocks=count.data_ptr(), pool=pool.data_ptr(), summaries=summaries.data_ptr(), summary_pages=summary_pages.data_ptr(),
            summary_stride=summary_stride, slot_blocks=slot_blocks.data_ptr(), slot_steps=slot_steps.data_ptr(),
            slot_pages=slot_pages.data_ptr(), slot_stride=top_k, step=step.data_ptr(), fill_slots=fills.data_ptr(),
            max_blocks=len(settled) + 2, stream=stream(),
        )  # fmt: skip
        _core.cuda.write_through(
            dtype=dtype, num_kv_heads=heads, group=1, head_dim=dim, blocks=lists.data_ptr(), num_blocks=count.data_ptr(),
            pool=pool.data_ptr(), slot_pages=slot_pages.data_ptr(), fill_slots=fills.data_ptr(), slot_stride=top_k,
            host_units=host_units.data_ptr(), host_stride=stride, host_step=host_step, host_offset=host_offset, host_base=host.data_ptr(),
            num_ctas=2, stream=stream(),
        )  # fmt: skip
        torch.cuda.synchronize()
        touched = set()
        for i, (request, block, page, slots, grows) in enumerate(settled):
            keys = before[page, :, 0].double()
            first, second = {
                "mean_std": lambda k: (k.mean(1), k.std(1, unbiased=False)),
                "minmax": lambda k: (k.amax(1), k.amin(1)),
                "halves": lambda k: (k[:, :8].mean(1), k[:, 8:].mean(1)),
            }[kind](keys)
            got = summaries[summary_pages[request, block // 64].long(), :, block % 64]
            tolerance = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 4e-3}[dtype]
            assert relative_error(got[:, 0], first) < tolerance and relative_error(got[:, 1], second) < tolerance
            for h in range(heads):
                unit = int(host_units[request, block * host_step + host_offset])
                assert torch.equal(host[unit, h], before[page, h].cpu())
                if slots < 0:
                    continue
                order = [(int(was_steps[request, h, s]), int(was_blocks[request, h, s]), s) for s in range(slots)]
                slot = slots if grows else min(order)[2]
                assert int(fills[i, h]) == slot
                assert int(slot_blocks[request, h, slot]) == block and int(slot_steps[request, h, slot]) == 77
                assert torch.equal(pool[slot_pages[request, slot].long(), h], before[page, h])
                touched.add((request, h, slot))
        for request in range(requests):
            for h in range(heads):
                for s in range(top_k):
                    if (request, h, s) not in touched:
                        assert slot_blocks[request, h, s] == was_blocks[request, h, s]
                        assert torch.equal(pool[slot_pages[request, s].long(), h], before[slot_pages[request, s].long(), h])
        written = {int(host_units[r, b * host_step + host_offset]) for r, b, *_ in settled}
        assert all(bool((host[u] == 7.0).all()) for u in range(units) if u not in written)


@pytest.mark.parametrize("size", [2048, 4096, 8192, 16384, 65536])
def test_gather(size: int) -> None:
    torch.manual_seed(size)
    host = torch.randint(-(2**31), 2**31 - 1, (300, size // 4), dtype=torch.int32).pin_memory()
    for count, num_ctas in ((0, 4), (1, 4), (3, 1), (17, 2), (40, 3)) if SMALL else ((0, 4), (1, 4), (3, 1), (17, 2), (250, 3), (299, 16)):
        device = torch.full_like(host, -1, device="cuda")
        source, target = torch.randperm(300)[:count], torch.randperm(300)[:count]
        copies = [(host.data_ptr() + int(s) * size, device.data_ptr() + int(d) * size) for s, d in zip(source, target, strict=True)] + [
            (0, 0)
        ]  # beyond the count: never looked at
        keep = [torch.tensor(copies, device="cuda"), ints([count])]
        _core.cuda.gather(keep[0].data_ptr(), keep[1].data_ptr(), size, num_ctas, stream())
        torch.cuda.synchronize()
        expected = torch.full_like(host, -1)
        expected[target] = host[source]
        assert torch.equal(device.cpu(), expected)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_layers(dtype: str) -> None:
    torch.manual_seed(4)
    t, tolerance = DTYPES[dtype], {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    for rows, dim in ((0, 64), (1, 8), (3, 576)) if SMALL else ((0, 64), (1, 8), (3, 576), (129, 4096), (2, 12288)):
        x, residual, weight = (torch.randn(n, dim, device="cuda").to(t) for n in (rows, rows, 1))
        y, before = torch.full_like(x, NAN), residual.clone()
        for r in (0, residual.data_ptr()):
            _core.cuda.add_rms_norm(dtype, x.data_ptr(), r, weight.data_ptr(), y.data_ptr(), rows, dim, 1e-5, stream())
            torch.cuda.synchronize()
            total = (x + before if r else x).double()
            if rows:
                assert relative_error(y, total / (total.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()) < tolerance
            assert torch.equal(residual, x + before if r else before)
        gate_up, z = torch.randn(rows, 2 * dim, device="cuda").to(t), torch.full_like(x, NAN)
        _core.cuda.silu_mul(dtype, gate_up.data_ptr(), z.data_ptr(), rows, dim, stream())
        torch.cuda.synchronize()
        if rows:
            gate, up = gate_up.double().split(dim, dim=1)
            assert relative_error(z, gate * gate.sigmoid() * up) < tolerance


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_linear(dtype: str) -> None:
    torch.manual_seed(5)
    t, tolerance, linear = DTYPES[dtype], {"float32": 2e-6, "float16": 1e-3, "bfloat16": 6e-3}[dtype], _core.cuda.Linear()
    for rows, n, k in ((0, 64, 64), (1, 8, 16), (3, 960, 576), (64, 6144, 4096), (257, 520, 1536)):
        x, weight, bias = (
            torch.randn(rows, k, device="cuda").to(t),
            torch.randn(n, k, device="cuda").to(t),
            torch.randn(n, device="cuda").to(t),
        )
        for b, sms in ((None, 0), (bias, 0), (None, 100), (bias, 128)):
            problem = (dtype, rows, n, k, sms, x.data_ptr(), weight.data_ptr(), 0 if b is None else b.data_ptr())
            expected = x.double() @ weight.double().T + (0 if b is None else b.double())
            for tuned in (False, True):
                y = torch.full((rows, n), NAN, dtype=t, device="cuda")
                if tuned and rows:
                    assert linear.tune(*problem, y.data_ptr(), 3, stream()) > 0
                    y.fill_(NAN)
                linear.run(*problem, y.data_ptr(), stream())
                torch.cuda.synchronize()
                if rows:
                    assert relative_error(y, expected) < tolerance


def test_shapes_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match=r"gather: bytes = 12"):
        _core.cuda.gather(0, 0, 12, 1, 0)
