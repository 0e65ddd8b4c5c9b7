"""Tests of the oracle itself, against rules worked out by hand and against dense attention."""

from __future__ import annotations

import numpy as np
import pytest

from reference import lookahead as ref
from reference.lookahead import BLOCK, ReferenceSequence, Slot


def working_set(blocks: list[int], last: list[int]) -> dict[int, Slot]:
    return {
        s: Slot(b, t, np.full((BLOCK, 2), b, np.float32), np.full((BLOCK, 2), -b, np.float32))
        for s, (b, t) in enumerate(zip(blocks, last, strict=True))
    }


def host(blocks: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    return {b: (np.full((BLOCK, 2), b, np.float32), np.full((BLOCK, 2), -b, np.float32)) for b in range(blocks)}


# ---------------------------------------------------------------- plain functions


def test_rope_rotates_halves() -> None:
    x = np.array([1, 2, 3, 4], np.float32)
    np.testing.assert_array_equal(ref.rope(x, np.array([0, 1], np.float32), np.array([1, 0], np.float32)), [-3, 2, 1, 4])


def test_rope_scores_depend_on_distance_only() -> None:
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 8)).astype(np.float32)
    angle = np.arange(20)[:, None] * 10.0 ** -np.arange(4)
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
    dots = [ref.rope(q, cos[p + 3], sin[p + 3]) @ ref.rope(k, cos[p], sin[p]) for p in range(16)]
    np.testing.assert_allclose(dots, dots[0], rtol=1e-4)


def test_summaries_by_hand() -> None:
    keys = np.zeros((BLOCK, 2), np.float32)
    keys[:8, 0], keys[8:, 0] = 3, -1  # mean 1, deviation 2
    keys[:, 1] = np.arange(16)
    a, b = ref.summarize("mean_std", keys)
    np.testing.assert_allclose(a, [1, 7.5])
    np.testing.assert_allclose(b, [2, np.sqrt(255 / 12)])
    np.testing.assert_array_equal(ref.summarize("minmax", keys), [[3, 15], [-1, 0]])
    np.testing.assert_array_equal(ref.summarize("halves", keys), [[3, 3.5], [-1, 11.5]])


def test_scores_by_hand() -> None:
    a, b, q = np.array([[1.0, 2.0], [0.0, -4.0]]), np.array([[3.0, 5.0], [1.0, 1.0]]), np.array([2.0, -1.0])
    np.testing.assert_array_equal(ref.block_scores("mean_std", q, a, b), [(2 - 2) + (6 + 5), 4 + 3])
    np.testing.assert_array_equal(ref.block_scores("minmax", q, a, b), [2 * 1 - 1 * 5, 0 - 1])
    np.testing.assert_array_equal(ref.block_scores("halves", q, a, b), [max(0, 1), max(4, 1)])


def test_minmax_bounds_every_key() -> None:
    rng = np.random.default_rng(1)
    keys, q = rng.standard_normal((BLOCK, 8)), rng.standard_normal(8)
    a, b = ref.summarize("minmax", keys)
    assert ref.block_scores("minmax", q, a[None], b[None])[0] >= (keys @ q).max()


def test_combine_by_hand() -> None:
    scores = np.array([[[1.0, 5.0, 0.0], [4.0, 1.0, 0.0]], [[2.0, 0.0, 9.0], [0.0, 0.0, 0.0]]])  # [rows 2, G 2, blocks 3]
    np.testing.assert_array_equal(ref.combine("max", scores, 4), [4, 5, 9])
    np.testing.assert_array_equal(ref.combine("sum", scores, 4), [5, 6, 9])
    soft = lambda x: np.exp(np.array(x) / 2) / np.exp(np.array(x) / 2).sum()  # noqa: E731
    rows = [soft([1, 5, 0]) + soft([4, 1, 0]), soft([2, 0, 9]) + soft([0, 0, 0])]
    np.testing.assert_allclose(ref.combine("softmax_sum", scores, 4), np.maximum(*rows))


def test_softmax_sum_survives_a_nan_block_and_huge_scores() -> None:
    out = ref.combine("softmax_sum", np.array([[[1e30, np.nan, -1e30, 1e30]]]), 64)
    np.testing.assert_array_equal(out, [0.5, np.nan, 0, 0.5])


@pytest.mark.parametrize(
    ("scores", "k", "want"),
    [
        ([1, 3, 2], 2, [1, 2]),
        ([1, 1, 1, 1], 3, [0, 1, 2]),  # ties: the lower block
        ([0.0, -0.0, 0.0], 3, [0, 1, 2]),  # zeros of either sign are equal
        ([2, np.nan, 1, np.nan, 2], 5, [0, 4, 2, 1, 3]),  # NaN last, in block order
        ([np.nan, -np.inf], 1, [1]),  # even behind -inf
        ([np.inf, 5, np.inf], 2, [0, 2]),
        ([4, 2], 9, [0, 1]),  # fewer blocks than K
    ],
)
def test_top_k_order(scores: list[float], k: int, want: list[int]) -> None:
    assert ref.top_k(np.array(scores), k) == want


def test_rank_gap() -> None:
    assert ref.rank_gap(np.array([5.0, 1.0, 4.5]), 2) == 3.5
    assert ref.rank_gap(np.array([5.0, 5.0, 1.0]), 1) == 0
    assert ref.rank_gap(np.array([5.0, 1.0]), 2) == np.inf


def test_ranking_excess() -> None:
    s = np.array([5.0, 4.0, 3.0, 2.0])
    assert ref.ranking_excess(s, [0, 1]) == 0
    assert ref.ranking_excess(s, [1, 0]) == 1  # wrong order
    assert ref.ranking_excess(s, [0, 3]) == 2  # block 1 left out
    assert ref.ranking_excess(np.array([1.0, np.nan]), [1]) == np.inf


@pytest.mark.parametrize(
    ("ratio", "k", "want"),
    [("0.05", 128, 6), ("0.29", 100, 29), ("0.57", 100, 57), ("0.01", 10, 1), ("1", 7, 7), ("all", 7, 7), ("0.999", 8, 7), ("0.7", 10, 7)],
)
def test_cap_is_exact_in_decimals(ratio: str, k: int, want: int) -> None:
    """0.29 * 100 is 28.999... in binary floating point."""
    assert ref.fetch_cap(ratio, k) == want
    config = pytest.importorskip("oasiskv.config")
    assert config.fetch_cap_blocks(k, ratio) == want


# ---------------------------------------------------------------- selection


def test_select_caps_in_rank_order_and_evicts_the_least_recent() -> None:
    working = working_set([0, 5, 2, 7], [9, 3, 3, 8])
    got = ref.select(working, [6, 0, 1, 4], 2, 10, host(8))
    # 0 is touched; 6 then 1 are admitted, 4 is capped. Victims: last 3 (block 2 in slot 2, then block 5 in slot 1).
    assert got.admitted == [(6, 2, 2), (1, 1, 5)] and got.capped == 1
    assert [working[s].block for s in range(4)] == [0, 1, 6, 7]
    assert [working[s].last_selected for s in range(4)] == [10, 10, 10, 8]
    assert [working[s].keys[0, 0] for s in range(4)] == [0, 1, 6, 7] and working[2].values[0, 0] == -6


def test_predicted_blocks_are_no_victims_even_when_oldest() -> None:
    working = working_set([3, 4], [1, 50])
    assert ref.select(working, [3, 9], 2, 60, host(10)).admitted == [(9, 1, 4)]


def test_select_copies() -> None:
    working, full = working_set([0], [1]), host(2)
    ref.select(working, [1], 1, 2, full)
    full[1][0][:] = 99
    assert working[0].keys[0, 0] == 1


# ---------------------------------------------------------------- the decode


def sequence(**kw) -> ReferenceSequence:
    args = {
        "layers": 1,
        "heads": 1,
        "group": 1,
        "head_dim": 2,
        "top_k": 2,
        "cap": 1,
        "max_drafts": 3,
        "sparse_from": 64,
        "summary": "mean_std",
        "group_combine": "max",
        "cos": np.ones((400, 1), np.float32),
        "sin": np.zeros((400, 1), np.float32),
        "prompt_tokens": 64,
    }
    return ReferenceSequence(**{**args, **kw})


def run_step(seq: ReferenceSequence, step: int, qkv: np.ndarray, drafts: int = 0, new: int = 1):
    kind = seq.begin_step(step, qkv.shape[-2], drafts)
    outs = [seq.forward(layer, qkv[layer]) for layer in range(seq.layers)]
    records = seq.finish_selection()
    seq.commit(new)
    return kind, outs, records


def rows(q: list[float], k: list[float], v: list[float], n: int = 1) -> np.ndarray:
    return np.tile(np.array([*q, *k, *v], np.float32), (1, n, 1))


def test_tiny_decode_by_hand() -> None:
    """K = 2, C = 1, four prompt blocks whose keys are constant: block b scores q . (x_b, y_b)."""
    seq = sequence()
    keys = [(1, 0), (0, 1), (3, 0), (0, 3)]
    prompt = np.concatenate([rows([0, 0], k, (i, i), 16) for i, k in enumerate(keys)], axis=1)
    assert run_step(seq, 1, prompt)[0] == "prefill"

    # Step 2, the last dense step, looks along x: block 2 then 0. S = 2: block 0 stays in slot 0, block 2 goes to slot 1.
    kind, _, (r,) = run_step(seq, 2, rows([1, 0], (0, 0), (9, 9)))
    assert (kind, r.first, r.predicted, r.admitted, r.map) == ("dense", True, [2, 0], [], [])

    # Step 3, sparse, its draft looks along y: 3 then 1, both missing, C = 1. Victim: all selected at 2, so block 0.
    q = np.concatenate([rows([0, 0], (0, 0), (9, 9)), rows([0, 1], (7, 7), (7, 7))], axis=1)
    kind, outs, (r,) = run_step(seq, 3, q, drafts=1)
    assert (kind, r.first, r.predicted, r.admitted, r.capped, r.fill) == ("sparse", False, [3, 1], [(3, 0, 0)], 1, None)
    assert (r.map, r.last_selected) == ([3, 2], [3, 2])
    # q = 0 averages what was resident before the gather: blocks 0 and 2 and two open tokens. The normal row does not see the draft.
    np.testing.assert_allclose(outs[0][0], [(16 * 0 + 16 * 2 + 2 * 9) / 34] * 2)

    # Step 4: the rejected draft's K and V are gone; block 3 is resident now. The row looks along y again: 1 replaces 2.
    kind, outs, (r,) = run_step(seq, 4, rows([0, 1], (0, 0), (9, 9)))
    assert (r.predicted, r.admitted, r.map, r.last_selected) == ([3, 1], [(1, 1, 2)], [3, 1], [4, 4])
    s = np.exp(3 / np.sqrt(2))
    np.testing.assert_allclose(outs[0][0], [(16 * 3 * s + 16 * 2 + 3 * 9) / (16 * s + 16 + 3)] * 2)

    # On to position 80: 13 more rows complete block 4 at step 17; it settles at step 18.
    for t in range(5, 18):
        _, _, (r,) = run_step(seq, t, rows([0, 1], (0, 0), (9, 9)))
        assert (r.predicted, r.admitted, r.map, r.fill) == ([3, 1], [], [3, 1], None)
    assert seq.committed == 80
    # Fill: both slots were selected at 17, the lower block 1 leaves. The fill is selected at 18, so it would be the last victim, but
    # block 1 is wanted again and the only block outside the prediction is the fill itself.
    _, outs, (r,) = run_step(seq, 18, rows([0, 1], (0, 0), (9, 9)))
    assert (r.fill, r.predicted, r.admitted, r.map, r.last_selected) == ((1, 1), [3, 1], [(1, 1, 4)], [3, 1], [18, 18])
    # The attention of step 18 still read the fill, block 4 (keys 0, values 9), beside block 3 and one open token.
    np.testing.assert_allclose(outs[0][0], [(16 * 3 * s + 16 * 9 + 9) / (16 * s + 17)] * 2)
    assert seq.stats["sparse_steps"] == 16 and seq.stats["blocks_predicted"] == 32 and seq.stats["blocks_admitted"] == 3
    assert seq.stats["blocks_capped"] == 1 and seq.stats["bytes_fetched"] == 3 * 2 * 16 * 2 * 4
    assert seq.stats["resident_tokens_max"] == 2 * 16 + 16


def test_slots_grow_until_k() -> None:
    seq = sequence(top_k=3, sparse_from=16, prompt_tokens=17)
    run_step(seq, 1, rows([0, 0], (1, 1), (1, 1), 17))
    fills = []
    for t in range(2, 60):
        _, _, records = run_step(seq, t, rows([1, 0], (1, 1), (1, 1)))
        fills += [(seq.committed - 1, r.fill) for r in records if r.fill]
    # Blocks 1 and 2 take the next slots at positions 32 and 48; block 3 at 64 evicts the lowest of the equally recent: block 0.
    assert fills == [(32, (1, -1)), (48, (2, -1)), (64, (0, 0))]


@pytest.mark.parametrize("kind", ref.SUMMARIES)
@pytest.mark.parametrize("combine", ref.COMBINES)
def test_sparse_equals_dense_when_k_covers_everything(kind: str, combine: str) -> None:
    rng = np.random.default_rng(2)
    shape = {
        "layers": 2,
        "heads": 2,
        "group": 3,
        "head_dim": 8,
        "top_k": 20,
        "cap": 20,
        "sparse_from": 40,
        "summary": kind,
        "group_combine": combine,
        "prompt_tokens": 45,
    }
    angle = rng.random((400, 4))
    tables = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    sparse, dense = sequence(**shape, **tables), sequence(**shape, **tables, sparse_enabled=False)
    kinds, step = set(), 0
    while sparse.committed < 200:
        step += 1
        prefill = sparse.committed < 45
        drafts = 0 if prefill else int(rng.integers(0, 4))
        n = 15 if prefill else 1 + drafts
        qkv = rng.standard_normal((2, n, (6 + 4) * 8)).astype(np.float32)
        new = int(rng.integers(1, max(1, drafts) + 1))
        a, b = run_step(sparse, step, qkv, drafts, new), run_step(dense, step, qkv, drafts, new)
        kinds.add(a[0])
        for x, y in zip(a[1], b[1], strict=True):
            np.testing.assert_array_equal(x, y)
    assert kinds == {"prefill", "dense", "sparse"} and sparse.stats["blocks_admitted"] == 0


def test_dense_rows_are_causal_attention() -> None:
    rng = np.random.default_rng(3)
    seq = sequence(sparse_enabled=False, prompt_tokens=37, head_dim=4, cos=np.ones((50, 2), np.float32), sin=np.zeros((50, 2), np.float32))
    qkv = rng.standard_normal((1, 37, 12)).astype(np.float32)
    got = np.concatenate([run_step(seq, t + 1, qkv[:, a : a + 13])[1][0] for t, a in enumerate(range(0, 37, 13))])
    q, k, v = np.split(qkv[0].astype(np.float64), 3, axis=1)
    s = np.where(np.tri(37, dtype=bool), q @ k.T / 2, -np.inf)
    p = np.exp(s)
    np.testing.assert_allclose(got, p / p.sum(axis=1, keepdims=True) @ v, rtol=1e-12)


def test_sparse_with_small_k_differs_from_dense() -> None:
    """The copies are what attention reads: dropping blocks must show."""
    rng = np.random.default_rng(4)
    sparse, dense = sequence(), sequence(sparse_enabled=False)
    differ = False
    for t in range(1, 6):
        qkv = rng.standard_normal((1, 64 if t == 1 else 1, 6)).astype(np.float32)
        a, b = run_step(sparse, t, qkv)[1][0], run_step(dense, t, qkv)[1][0]
        differ = differ or not np.allclose(a, b)
    assert differ
