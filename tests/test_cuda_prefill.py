"""The CUDA kernel of prefill attention against float64 references: random shapes, odd sizes, poisoned outputs and poisoned unused
memory.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch

from oasiskv import _core
from reference.cuda import DTYPES, NAN, SMALL, ints, needs_gpu, relative_error, stream

pytestmark = needs_gpu

SIXTEEN_BIT = ["bfloat16", "float16"]
ROWS = [1, 5, 33, 65] if SMALL else [1, 2, 15, 31, 32, 33, 64, 127, 128, 129, 300, 511, 700]
VISIBLE = [1, 17, 120, 150] if SMALL else [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 500, 1025, 2000]
OVERALL = {"bfloat16": 6e-3, "float16": 8e-4}  # relative error of a segment's outputs
EACH = {"bfloat16": 1.5e-2, "float16": 2e-3}  # of any one row and head


@dataclass
class Batch:
    """Segments over one pool; `pages` holds each segment's list, in which ids of poisoned pages follow those that it needs."""

    heads: int
    group: int
    dim: int
    dtype: str
    q: torch.Tensor  # [rows, Hq, D]; rows of no segment are NaN
    pool: torch.Tensor  # [page, H, 2, 16, D]; tokens that no row sees are NaN
    pages: torch.Tensor
    segments: list[tuple[int, int, int, int, int]]  # row0, rows, pages0, num_pages, visible


def make(shapes: list[tuple[int, int]], heads: int, group: int, dim: int, dtype: str, rng: random.Random, q_scale: float = 1.0) -> Batch:
    """shapes: (rows, visible) of each segment."""
    need = [-(-(visible + rows - 1) // 16) for rows, visible in shapes]
    spare = [rng.randrange(3) for _ in shapes]
    pool = torch.full((sum(need) + sum(spare) + 2, heads, 2, 16, dim), NAN, dtype=DTYPES[dtype], device="cuda")
    pages = torch.randperm(len(pool), device="cuda", dtype=torch.int32)
    segments, row0, pages0 = [], rng.randrange(3), 0
    for (rows, visible), n, unused in zip(shapes, need, spare, strict=True):
        mine = pages[pages0 : pages0 + n].long()
        pool[mine] = torch.randn(n, heads, 2, 16, dim, device="cuda").to(DTYPES[dtype])
        beyond = n * 16 - (visible + rows - 1)
        if beyond:
            pool[mine[-1], :, :, 16 - beyond :] = NAN  # never written yet
        segments.append((row0, rows, pages0, n + unused, visible))
        row0, pages0 = row0 + rows + rng.randrange(3), pages0 + n + unused
    q = torch.full((row0 + 2, heads * group, dim), NAN, device="cuda").to(DTYPES[dtype])
    for first, rows, *_ in segments:
        q[first : first + rows] = (torch.randn(rows, heads * group, dim, device="cuda") * q_scale).to(DTYPES[dtype])
    return Batch(heads, group, dim, dtype, q, pool, pages, segments)


def run(b: Batch, segments: list[tuple[int, int, int, int, int]], out: torch.Tensor) -> None:
    tiles = _core.cuda.prefill_tiles(segments, b.heads, b.group, b.dim)
    on_device = [ints(segments), ints(tiles)]
    _core.cuda.prefill(
        dtype=b.dtype, num_kv_heads=b.heads, group=b.group, head_dim=b.dim, q=b.q.data_ptr(), pool=b.pool.data_ptr(), out=out.data_ptr(),
        segments=on_device[0].data_ptr(), pages=b.pages.data_ptr(), tiles=on_device[1].data_ptr(), num_tiles=len(tiles),
        num_pages=len(b.pool), stream=stream(),
    )  # fmt: skip
    torch.cuda.synchronize()


def reference(b: Batch, segment: tuple[int, int, int, int, int], rows: torch.Tensor) -> torch.Tensor:
    """The outputs [n, Hq, D] in float64 of n rows of a segment, counted from its first."""
    row0, num_rows, pages0, _, visible = segment
    tokens = visible + num_rows - 1
    kv = b.pool[b.pages[pages0 : pages0 + -(-tokens // 16)].long()]  # [n, H, 2, 16, D]
    hidden = torch.arange(tokens, device="cuda")[None, :] >= (visible + rows)[:, None]  # [n, tokens]
    out = torch.empty(len(rows), b.heads * b.group, b.dim, dtype=torch.float64, device="cuda")
    for h in range(b.heads):
        keys, values = (kv[:, h, i].flatten(0, 1)[:tokens].double() for i in range(2))
        mine = slice(h * b.group, (h + 1) * b.group)
        scores = b.q[row0 + rows, mine].double() @ keys.T / math.sqrt(b.dim)  # [n, G, tokens]
        out[:, mine] = scores.masked_fill(hidden[:, None], -math.inf).softmax(dim=-1) @ values
    return out


def check(b: Batch, segment: tuple[int, int, int, int, int], out: torch.Tensor, rows: torch.Tensor | None = None) -> None:
    """out: of the whole batch."""
    rows = torch.arange(segment[1], device="cuda") if rows is None else rows
    got, expected = out[segment[0] + rows], reference(b, segment, rows)
    assert relative_error(got, expected) < OVERALL[b.dtype]
    each = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert float(each.max()) < EACH[b.dtype], divmod(int(each.argmax()), b.heads * b.group)


def check_all(b: Batch) -> None:
    out = torch.full_like(b.q, NAN)
    run(b, b.segments, out)
    for segment in b.segments:
        check(b, segment, out)
    ours = torch.zeros(len(out), dtype=torch.bool, device="cuda")
    for row0, rows, *_ in b.segments:
        ours[row0 : row0 + rows] = True
    assert out[~ours].isnan().all()


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8, 16])
def test_prefill(dtype: str, dim: int, group: int) -> None:
    rng = random.Random(f"prefill {dtype} {dim} {group}")
    torch.manual_seed(rng.randrange(2**31))
    for _ in range(1 if SMALL else 4):
        shapes = [(rng.choice(ROWS), rng.choice(VISIBLE)) for _ in range(rng.randrange(1, 3 if SMALL else 6))]
        check_all(make(shapes, rng.choice([1, 2] if SMALL else [1, 2, 3, 8]), group, dim, dtype, rng))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("dim", [64, 128])
def test_every_edge(dtype: str, dim: int) -> None:
    """Ends of what is seen around the ends of pages and of key steps, with one row and with a few."""
    rng = random.Random(f"edges {dtype} {dim}")
    torch.manual_seed(rng.randrange(2**31))
    ends = range(1, 20) if SMALL else [*range(1, 36), *range(60, 70), *range(120, 136), *range(188, 196), *range(250, 262)]
    check_all(make([(rows, end) for end in ends for rows in (1, 3)], 1, 4, dim, dtype, rng))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("dim", [64, 128])
def test_large_scores(dtype: str, dim: int) -> None:
    """Scores of a standard deviation of 25, up to about +-80: a row's weights fall on a few tokens."""
    rng = random.Random(f"large {dtype} {dim}")
    torch.manual_seed(rng.randrange(2**31))
    shapes = [(40, 1), (17, 90)] if SMALL else [(700, 1), (130, 1900), (1, 1000)]
    check_all(make(shapes, 2, 4, dim, dtype, rng, q_scale=25.0))


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
def test_rising_scores(dtype: str) -> None:
    """Each step of keys has larger scores than all before it, so that every step rescales what is summed."""
    rng = random.Random(f"rising {dtype}")
    torch.manual_seed(rng.randrange(2**31))
    b = make([(60, 40)] if SMALL else [(300, 900)], 1, 2, 128, dtype, rng)
    row0, rows, pages0, _, visible = b.segments[0]
    b.q[row0 : row0 + rows] = b.q[row0 : row0 + rows].abs()
    mine = b.pages[pages0 : pages0 + -(-(visible + rows - 1) // 16)].long()
    b.pool[mine, :, 0] += torch.linspace(-3, 3, len(mine), device="cuda").to(b.pool.dtype)[:, None, None, None]
    check_all(b)


@pytest.mark.parametrize("dtype", SIXTEEN_BIT)
@pytest.mark.parametrize("dim", [64, 128])
def test_chunks(dtype: str, dim: int) -> None:
    """Rows in two calls give what they give at once."""
    rng = random.Random(f"chunks {dtype} {dim}")
    torch.manual_seed(rng.randrange(2**31))
    rows, cut = (45, 19) if SMALL else (500, 237)
    b = make([(rows, 50)], 2, 4, dim, dtype, rng)
    (row0, _, pages0, num_pages, visible) = b.segments[0]
    whole, parts = torch.full_like(b.q, NAN), torch.full_like(b.q, NAN)
    run(b, b.segments, whole)
    run(b, [(row0, cut, pages0, num_pages, visible)], parts)
    assert parts[row0 + cut :].isnan().all()
    run(b, [(row0 + cut, rows - cut, pages0, num_pages, visible + cut)], parts)
    mine = slice(row0, row0 + rows)
    assert relative_error(parts[mine], whole[mine].double()) < OVERALL[dtype]
    check(b, b.segments[0], parts)


def test_same_every_time() -> None:
    """A call's bits do not depend on timing, nor on what else is in the call."""
    rng = random.Random("same")
    torch.manual_seed(1)
    b = make([(40, 30), (9, 70)] if SMALL else [(700, 300), (65, 1500), (300, 1)], 2, 4, 128, "bfloat16", rng)
    first = torch.full_like(b.q, NAN)
    run(b, b.segments, first)
    for _ in range(3):
        again = torch.full_like(b.q, NAN)
        for segment in reversed(b.segments):
            run(b, [segment], again)
        assert torch.equal(first.view(torch.int16), again.view(torch.int16))


@pytest.mark.skipif(SMALL, reason="large on purpose")
@pytest.mark.parametrize("rows, visible", [(4096, 1), (3001, 5190)])
def test_large(rows: int, visible: int) -> None:
    """Qwen3-8B's heads; pages lie beyond 2^31 elements of the pool. Some rows are checked."""
    torch.manual_seed(rows)
    heads, group, dim = 8, 4, 128
    need = -(-(visible + rows - 1) // 16)
    pool = torch.empty(2**31 // (heads * 2 * 16 * dim) + need, heads, 2, 16, dim, dtype=torch.bfloat16, device="cuda")
    pages = len(pool) - 1 - torch.randperm(need, device="cuda", dtype=torch.int32)
    pool[pages.long()] = torch.randn(need, heads, 2, 16, dim, device="cuda").to(pool.dtype)
    q = torch.randn(rows, heads * group, dim, device="cuda").to(pool.dtype)
    segment = (0, rows, 0, need, visible)
    b = Batch(heads, group, dim, "bfloat16", q, pool, pages, [segment])
    out = torch.full_like(q, NAN)
    run(b, b.segments, out)
    assert torch.isfinite(out).all()
    check(b, segment, out, torch.cat([torch.arange(8), torch.randint(rows, (100,)), torch.arange(rows - 8, rows)]).cuda())


def test_tiles() -> None:
    """Each lane of each segment and head is in one tile; of a head the last rows come first, the longest segment before the others."""
    lanes = _core.cuda.prefill_lanes
    segments = [(0, 3, 0, 9, 1), (3, 700, 0, 99, 500), (703, 1, 0, 99, 1500), (704, 0, 0, 0, 1)]
    for heads, group in ((1, 1), (8, 4), (2, 5), (3, 16)):
        tiles = _core.cuda.prefill_tiles(segments, heads, group, 128)
        want = [[s, head, begin] for s in (2, 1, 0) for head in range(heads) for begin in reversed(range(0, segments[s][1] * group, lanes))]
        assert [list(t) for t in tiles] == want


def test_refusals() -> None:
    b = make([(4, 4)], 1, 1, 64, "bfloat16", random.Random(0))
    for field, value in (("dim", 96), ("dtype", "float32")):
        wrong = Batch(**{**vars(b), field: value})
        with pytest.raises(ValueError, match="prefill"):
            run(wrong, b.segments, torch.empty_like(b.q))
    _core.cuda.prefill(  # nothing to do
        dtype="bfloat16", num_kv_heads=1, group=1, head_dim=64, q=0, pool=0, out=0, segments=0, pages=0, tiles=0, num_tiles=0, num_pages=0,
        stream=stream(),
    )  # fmt: skip
