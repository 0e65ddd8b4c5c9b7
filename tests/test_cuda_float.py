"""What the CUDA kernels promise in float32: prefill chunks, results that depend on a row alone, exact scores; and the matrix products that
keep those promises.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from oasiskv import _core
from reference.cuda import DTYPES, NAN, SMALL, attention_reference, ints, needs_gpu, relative_error, score_reference, stream

pytestmark = needs_gpu

Segments = list[tuple[int, int, int, int, int]]  # row0, rows, pages0, num_pages, visible


# ---------------------------------------------------------------- attention


def cache(shapes: list[tuple[int, int]], heads: int, dim: int) -> tuple[torch.Tensor, torch.Tensor, Segments]:
    """Segments of (rows, visible) each, their pages at random places of a pool: (pool [page, H, 2, 16, D], page list, segments).

    Whatever no row sees is NaN: unused pages and the tokens after the last one.
    """
    need = [(visible + rows - 1 + 15) // 16 for rows, visible in shapes]
    pool = torch.full((sum(need) + 3, heads, 2, 16, dim), NAN, device="cuda")
    pages = torch.randperm(len(pool), device="cuda", dtype=torch.int32)
    segments, pages0, row0 = [], 0, 0
    for (rows, visible), n in zip(shapes, need, strict=True):
        known = torch.randn(n, heads, 2, 16, dim, device="cuda")
        known[-1, :, :, 16 - (n * 16 - (visible + rows - 1)) :] = NAN
        pool[pages[pages0 : pages0 + n].long()] = known
        segments.append((row0, rows, pages0, n, visible))
        pages0, row0 = pages0 + n, row0 + rows
    return pool, pages, segments


def cut(segments: Segments, size: int) -> list[tuple[int, int, int, int, int]]:
    """Splits of at most `size` pages."""
    counts = [-(-segment[3] // size) for segment in segments]
    return [(i, s * size, min(segments[i][3], (s + 1) * size), s, count) for i, count in enumerate(counts) for s in range(count)]


def lane_tiles(segments: Segments, group: int) -> int:
    return max(-(-segment[1] * group // _core.cuda.lane_tile) for segment in segments)


def attend(
    q: torch.Tensor, pool: torch.Tensor, pages: torch.Tensor, segments: Segments, split: int = 1 << 20, num_ctas: int = 264
) -> torch.Tensor:
    """Float32 attention of q [rows, Hq, D]; no partials and no arrivals."""
    heads, dim = pool.shape[1], pool.shape[-1]
    group = q.shape[1] // heads
    splits, out = cut(segments, split), torch.full_like(q, NAN)
    keep = [ints(segments), ints(splits), ints([len(splits)])]
    _core.cuda.attention(
        dtype="float32", num_kv_heads=heads, group=group, head_dim=dim, q=q.data_ptr(), pool=pool.data_ptr(), out=out.data_ptr(),
        segments=keep[0].data_ptr(), pages=pages.data_ptr(), splits=keep[1].data_ptr(), num_splits=keep[2].data_ptr(),
        max_lane_tiles=lane_tiles(segments, group), partials=0, arrivals=0, num_ctas=num_ctas, stream=stream(),
    )  # fmt: skip
    torch.cuda.synchronize()
    return out


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
def test_prefill_chunks_and_decode_rows_together(dim: int, group: int) -> None:
    torch.manual_seed(dim + group)
    heads = 2
    shapes = [(40, 1), (33, 50), (1, 90), (3, 16)] if SMALL else [(512, 1), (1, 3000), (512, 1489), (300, 213), (2, 16), (16, 700), (1, 1)]
    pool, pages, segments = cache(shapes, heads, dim)
    q = torch.randn(sum(rows for rows, _ in shapes), heads * group, dim, device="cuda")
    for num_ctas in (5, 264):
        out = attend(q, pool, pages, segments, num_ctas=num_ctas)
        for row0, rows, first, n, visible in segments:
            expected = attention_reference(q[row0 : row0 + rows], pool.nan_to_num(0), pages[first : first + n], rows, visible, heads, group)
            assert relative_error(out[row0 : row0 + rows], expected) < 3e-6


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 4, 7, 16])
def test_attention_of_a_row_depends_on_that_row_alone(dim: int, group: int) -> None:
    rng = random.Random(dim * group)
    torch.manual_seed(dim * group)
    heads = 3
    shapes = [(30, 25), (3, 70)] if SMALL else [(300, 301), (1, 2100), (5, 513), (64, 1), (2, 1023)]
    pool, pages, segments = cache(shapes, heads, dim)
    q = torch.randn(sum(rows for rows, _ in shapes), heads * group, dim, device="cuda")
    q *= 6  # so that some weights are 0
    together = attend(q, pool, pages, segments)
    assert torch.equal(together, attend(q, pool, pages, segments, split=7, num_ctas=11))
    assert torch.equal(together, attend(q, pool, pages, list(reversed(segments)), split=32, num_ctas=1))
    for row0, rows, first, n, visible in segments:
        for _ in range(2 if SMALL else 12):  # any run of a segment's rows, as a segment of its own
            r = rng.randrange(rows)
            count = rng.choice([1, 1, 1, 2, rows - r])
            count = min(count, rows - r)
            alone = attend(q[row0 + r : row0 + r + count].clone(), pool, pages, [(0, count, first, n, visible + r)], rng.choice([3, 32]), 4)
            assert torch.equal(alone, together[row0 + r : row0 + r + count])


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 3, 16])
def test_what_a_row_must_not_see_has_no_effect_on_it(dim: int, group: int) -> None:
    torch.manual_seed(dim - group)
    heads, rows = 2, 5
    for visible in (1, 13, 16, 77) if SMALL else (1, 13, 16, 77, 510, 1200):
        pool, pages, segments = cache([(rows, visible)], heads, dim)
        q = torch.randn(rows, heads * group, dim, device="cuda")
        clean = attend(q, pool, pages, segments)
        for poisoned in range(1, rows):  # the token that row `poisoned` is the first to see
            token = visible + poisoned - 1
            for value in (NAN, float("inf")):
                bad = pool.clone()
                bad[pages[token // 16].long(), :, :, token % 16] = value
                out = attend(q, bad, pages, segments)
                assert torch.equal(out[:poisoned], clean[:poisoned])
                assert torch.isnan(out[poisoned:]).all()
        q[rows - 1] = NAN
        out = attend(q, pool, pages, segments)
        assert torch.equal(out[:-1], clean[:-1]) and torch.isnan(out[-1]).all()


def test_captured_attention_serves_any_step() -> None:
    torch.manual_seed(3)
    heads, group, dim, tiles, room = 3, 3, 64, 12, 8
    steps = [[(1, 40), (60, 5)], [(2, 33)], [(1, 500), (1, 17), (64, 1), (9, 200)]]
    pools = [cache(shapes, heads, dim) for shapes in steps]
    total = max(len(pool) for pool, _, _ in pools)
    pool, q = torch.full((total, heads, 2, 16, dim), NAN, device="cuda"), torch.zeros(128, heads * group, dim, device="cuda")
    out, pages = torch.full_like(q, NAN), torch.zeros(total, dtype=torch.int32, device="cuda")
    segments, splits, count = ints([[0] * 5] * room), ints([[0] * 5] * room), ints([0])

    def call() -> None:
        _core.cuda.attention(
            dtype="float32", num_kv_heads=heads, group=group, head_dim=dim, q=q.data_ptr(), pool=pool.data_ptr(), out=out.data_ptr(),
            segments=segments.data_ptr(), pages=pages.data_ptr(), splits=splits.data_ptr(), num_splits=count.data_ptr(),
            max_lane_tiles=tiles, partials=0, arrivals=0, num_ctas=40, stream=stream(),
        )  # fmt: skip

    call()  # no splits: nothing is done
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for own_pool, own_pages, own_segments in pools:
        rows = own_segments[-1][0] + own_segments[-1][1]
        own_q = torch.randn(rows, heads * group, dim, device="cuda")
        own_splits = cut(own_segments, 1 << 20)
        pool[: len(own_pool)], q[:rows], pages[: len(own_pages)] = own_pool, own_q, own_pages
        segments[: len(own_segments)], splits[: len(own_splits)] = ints(own_segments), ints(own_splits)
        count.fill_(len(own_splits))
        out.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out[:rows], attend(own_q, own_pool, own_pages, own_segments))
        assert torch.isnan(out[rows:]).all()


# ---------------------------------------------------------------- scores and selection


def score(
    staged: torch.Tensor, summaries: torch.Tensor, kind: str, predictors: list, tables: torch.Tensor, size: int, num_ctas: int
) -> torch.Tensor:
    """Float32 scores of staged [row, Hq, D] for summaries [page, H, 64, 2, D], as the kernel lays them out."""
    heads, dim = summaries.shape[1], summaries.shape[-1]
    group = staged.shape[1] // heads
    splits = [(i, b, min(p[3], b + size)) for i, p in enumerate(predictors) for b in range(0, p[3], size)]
    last = predictors[-1]
    scores = torch.full((last[5] + heads * last[2] * group * last[6],), NAN, device="cuda")
    keep = [ints(predictors), ints(splits), ints([len(splits)])]
    _core.cuda.score(
        dtype="float32", num_kv_heads=heads, group=group, head_dim=dim, kind=kind, staged=staged.data_ptr(), summaries=summaries.data_ptr(),
        predictors=keep[0].data_ptr(), summary_pages=tables.data_ptr(), summary_stride=tables.shape[1], splits=keep[1].data_ptr(),
        num_splits=keep[2].data_ptr(), max_lane_tiles=max(-(-p[2] * group // _core.cuda.lane_tile) for p in predictors),
        scores=scores.data_ptr(), num_ctas=num_ctas, stream=stream(),
    )  # fmt: skip
    torch.cuda.synchronize()
    return scores


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kind", ["mean_std", "minmax", "halves"])
def test_scores_of_integers_are_exact_and_select_ranks_them(dim: int, kind: str) -> None:
    rng = np.random.default_rng(dim + len(kind))
    torch.manual_seed(dim + len(kind))
    for group, combine in ((1, "max"), (3, "sum"), (7, "max"), (16, "sum")):
        heads, top_k, cap, step, stride = 3, 24, 5, 50, 10
        shapes = [(1, 130), (2, 33), (1, 90)] if SMALL else [(1, 513), (3, 200), (1, 33), (2, 640)]  # staged rows, blocks
        predictors, at, staged_rows = [], 0, 0
        for i, (rows, blocks) in enumerate(shapes):
            padded = -(-blocks // 32) * 32
            predictors.append((len(shapes) - 1 - i, staged_rows, rows, blocks, top_k, at, padded))
            at, staged_rows = at + heads * rows * group * padded, staged_rows + rows
        tables = torch.randperm(len(shapes) * stride, device="cuda", dtype=torch.int32).view(len(shapes), stride)
        staged = torch.randint(-8, 9, (staged_rows, heads * group, dim), device="cuda").float()
        summaries = torch.randint(-8, 9, (len(shapes) * stride, heads, 64, 2, dim), device="cuda").float()
        for request, _, _, blocks, *_ in predictors:  # not complete yet
            mine = torch.full((stride * 64,), False, device="cuda")
            mine[blocks:] = True
            pages = tables[request].long()
            summaries[pages] = torch.where(mine.view(stride, 1, 64, 1, 1), NAN, summaries[pages])
        scores = score(staged, summaries, kind, predictors, tables, 112, 264)

        requests, most = len(shapes), max(blocks for _, blocks in shapes)
        slot_blocks = np.stack([[rng.permutation(blocks)[:top_k] for _ in range(heads)] for _, blocks in reversed(shapes)])
        slot_steps = rng.integers(step - 9, step, slot_blocks.shape)
        device = {
            "scores": scores, "predictors": ints(predictors), "num_predictors": ints([requests]), "slot_blocks": ints(slot_blocks),
            "slot_steps": ints(slot_steps), "first_choice": ints(slot_blocks), "slot_pages": ints(list(range(requests * top_k))),
            "host_units": ints(list(range(requests * most))), "copies": torch.zeros(requests * heads * cap, 2, dtype=torch.int64).cuda(),
            "num_copies": ints([0]), "stats": torch.zeros(requests, 4, dtype=torch.int64).cuda(), "step": torch.tensor([step]).cuda(),
        }  # fmt: skip
        _core.cuda.select(
            num_kv_heads=heads, group=group, head_dim=dim, combine=combine, top_k=top_k, fetch_cap=cap, sink_blocks=1, element_bytes=4,
            max_predictors=requests, max_blocks=most, max_lanes=max(rows for rows, _ in shapes) * group, slot_stride=top_k,
            host_stride=most, host_step=1, host_offset=0, host_base=1 << 40, pool=1 << 41, stream=stream(),
            **{name: array.data_ptr() for name, array in device.items()},
        )  # fmt: skip
        torch.cuda.synchronize()
        copies: set[tuple[int, int]] = set()
        unit = 2 * 16 * dim * 4
        for request, first, rows, blocks, _, begin, padded in predictors:
            lanes = rows * group
            got = scores[begin : begin + heads * lanes * padded].view(heads, lanes, padded)[:, :, :blocks]
            for h in range(heads):
                q = staged[first : first + rows, h * group : (h + 1) * group].reshape(lanes, dim)
                expected = score_reference(q, summaries[tables[request].long(), h].flatten(0, 1)[:blocks], kind)
                assert torch.equal(got[h].double(), expected)
                each = expected.view(rows, group, blocks)
                rank = (each.sum(1) if combine == "sum" else each.amax(1)).amax(0).tolist()
                wanted = sorted(range(blocks), key=lambda b, rank=rank: (b != 0, -rank[b], b))[:top_k]  # block 0 is the sink
                resident = slot_blocks[request, h].tolist()
                missing = [b for b in wanted if b not in resident]
                victims = sorted((int(slot_steps[request, h, s]), b, s) for s, b in enumerate(resident) if b not in wanted)
                for block, (_, _, slot) in list(zip(missing, victims, strict=True))[:cap]:
                    resident[slot] = block
                    copies.add(
                        (
                            (1 << 40) + ((request * most + block) * heads + h) * unit,
                            (1 << 41) + ((request * top_k + slot) * heads + h) * unit,
                        )
                    )
                assert device["slot_blocks"][request, h].tolist() == resident
        got_copies = [tuple(copy) for copy in device["copies"][: int(device["num_copies"])].tolist()]
        assert len(got_copies) == len(copies) and set(got_copies) == copies


@pytest.mark.parametrize("kind", ["mean_std", "minmax", "halves"])
def test_a_score_depends_on_its_query_and_block_alone(kind: str) -> None:
    torch.manual_seed(len(kind))
    heads, group, dim, rows, blocks, stride = 2, 5, 64, 7, 200, 4
    staged = torch.randn(rows, heads * group, dim, device="cuda")
    summaries = torch.randn(stride, heads, 64, 2, dim, device="cuda")
    tables, padded = torch.randperm(stride, device="cuda", dtype=torch.int32).view(1, stride), 224
    together = score(staged, summaries, kind, [(0, 0, rows, blocks, 0, 0, padded)], tables, 48, 264)
    together = together.view(heads, rows, group, padded)[..., :blocks]
    for row, size, num_ctas in ((0, 16, 3), (3, 256, 1), (6, 64, 50)):
        alone = score(staged, summaries, kind, [(0, row, 1, blocks, 0, 0, padded)], tables, size, num_ctas)
        assert torch.equal(alone.view(heads, group, padded)[..., :blocks], together[:, row])


# ---------------------------------------------------------------- linear


@pytest.mark.cublas
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("fixed_rows", [0, 64])
def test_linear_with_float32_results(dtype: str, fixed_rows: int) -> None:
    torch.manual_seed(6)
    linear, t = _core.cuda.Linear(), DTYPES[dtype]
    for rows, n, k in ((0, 64, 64), (1, 4096, 576), (3, 960, 576), (64, 512, 4096), (130, 1000, 4096)):
        x, weight = torch.randn(rows, k, device="cuda").to(t), torch.randn(n, k, device="cuda").to(t)
        for bias in (None, torch.randn(n, device="cuda")):
            problem = (dtype, rows, n, k, 0, x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr())
            y = torch.full((rows + 1, n), NAN, device="cuda")
            linear.run(*problem, y.data_ptr(), stream(), float_out=True, fixed_rows=fixed_rows)
            torch.cuda.synchronize()
            assert torch.isnan(y[rows]).all()
            if rows:  # inputs are exact, and rounding the result to 16 bit would cost 2e-4 or 2e-3
                expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
                assert relative_error(y[:rows], expected) < (2e-6 if dtype == "float32" else 3e-5)


@pytest.mark.cublas
@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("float_out", [False, True])
@pytest.mark.parametrize(
    ("n", "k", "fixed_rows", "sms", "tuned"), [(960, 576, 64, 0, False), (576, 1536, 32, 0, True), (520, 4096, 64, 100, False)]
)
def test_linear_of_a_row_depends_on_that_row_alone(
    dtype: str, float_out: bool, n: int, k: int, fixed_rows: int, sms: int, tuned: bool
) -> None:
    rng = random.Random(dtype)
    torch.manual_seed(7)
    linear, t, most = _core.cuda.Linear(), DTYPES[dtype], 70 if SMALL else 200
    out, mode = torch.float32 if float_out else t, {"float_out": float_out, "fixed_rows": fixed_rows}
    weight, x = torch.randn(n, k, device="cuda").to(t), torch.randn(most, k, device="cuda").to(t)
    bias = torch.randn(n, device="cuda").to(out)

    def run(first: int, rows: int, tune: bool = False) -> torch.Tensor:
        y = torch.full((rows + 1, n), NAN, dtype=out, device="cuda")
        shape, arrays = (dtype, rows, n, k, sms, x[first:].data_ptr()), (bias.data_ptr(), y.data_ptr())
        if tune:
            assert linear.tune(*shape, [weight.data_ptr()], *arrays, 2, stream(), **mode) > 0
        else:
            linear.run(*shape, weight.data_ptr(), *arrays, stream(), **mode)
        torch.cuda.synchronize()
        assert torch.isnan(y[rows]).all() and not torch.isnan(y[:rows]).any()
        return y[:rows]

    if tuned:
        run(0, most, tune=True)
    together = run(0, most)
    assert relative_error(together, x.double() @ weight.double().T + bias.double()) < (2e-6 if dtype == "float32" else 6e-3)
    for rows in range(1, most + 1):
        first = rng.randrange(most - rows + 1)
        assert torch.equal(run(first, rows), together[first : first + rows])


@pytest.mark.cublas
def test_captured_linear_of_fixed_rows() -> None:
    torch.manual_seed(8)
    linear, rows, n, k = _core.cuda.Linear(), 70, 192, 576
    x, weight, y = torch.randn(rows, k, device="cuda"), torch.randn(n, k, device="cuda"), torch.zeros(rows, n, device="cuda")

    def call() -> None:
        linear.run("float32", rows, n, k, 0, x.data_ptr(), weight.data_ptr(), 0, y.data_ptr(), stream(), fixed_rows=64)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    x.normal_()
    graph.replay()
    torch.cuda.synchronize()
    captured = y.clone()
    call()
    torch.cuda.synchronize()
    assert torch.equal(y, captured) and relative_error(y, x.double() @ weight.double().T) < 2e-6
