"""The per-row operations of oasiskv._core against float64 numpy: random shapes, poisoned outputs, hostile values, batch invariance."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv import _core

SHAPES = settings(max_examples=80, deadline=None)
EPS = np.finfo(np.float32).eps
GUARD = 64  # floats on each side of an output that must stay as they were
CANARY = np.float32(-12345.5)
sizes = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)
# Of SmolLM2-135M and Qwen2.5-0.5B: (n, k) of projections.
REAL = [(576, 576), (192, 576), (3072, 576), (576, 1536), (1152, 896), (4864, 896)]


class Output:
    """[rows, columns] of NaN between two guards."""

    def __init__(self, rows: int, columns: int) -> None:
        self._all = np.full(rows * columns + 2 * GUARD, CANARY, np.float32)
        self.array = self._all[GUARD:-GUARD].reshape(rows, columns)
        self.array[:] = np.nan
        self.ptr = self._all.ctypes.data + GUARD * 4

    def checked(self) -> np.ndarray:
        assert (self._all[:GUARD] == CANARY).all() and (self._all[-GUARD:] == CANARY).all(), "wrote outside the output"
        return self.array


def linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, packed=None) -> np.ndarray:
    x, w = np.ascontiguousarray(x), np.ascontiguousarray(w)
    packed = packed or _core.PackedWeight(w.ctypes.data, *w.shape)
    out = Output(len(x), len(w))
    _core.linear(x.ctypes.data, len(x), packed, 0 if bias is None else bias.ctypes.data, out.ptr)
    return out.checked()


def rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> np.ndarray:
    x = np.ascontiguousarray(x)
    out = Output(*x.shape)
    _core.rms_norm(x.ctypes.data, *x.shape, w.ctypes.data, eps, out.ptr)
    return out.checked()


def silu_mul(x: np.ndarray) -> np.ndarray:
    x = np.ascontiguousarray(x)
    out = Output(len(x), x.shape[1] // 2)
    _core.silu_mul(x.ctypes.data, len(x), x.shape[1] // 2, out.ptr)
    return out.checked()


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def bits(a: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint32)


# ---------------------------------------------------------------- linear


def check_linear(x: np.ndarray, w: np.ndarray, bias: np.ndarray | None) -> None:
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    want = x64 @ w64.T + (0 if bias is None else bias)
    size = np.abs(x64) @ np.abs(w64).T + (0 if bias is None else np.abs(bias))
    got = linear(x, w, bias)
    assert not np.isnan(got).any(), "an output was not written"
    # A sequential float32 sum of k products is within k + 1 half-ulps of the sum of magnitudes.
    assert (np.abs(got - want) <= (x.shape[1] + 2) * EPS / 2 * size).all()


@SHAPES
@given(rows=sizes, n=sizes, k=sizes, bias=st.booleans(), seed=seeds)
def test_linear(rows: int, n: int, k: int, bias: bool, seed: int) -> None:
    check_linear(normal(seed, rows, k), normal(seed + 1, n, k), normal(seed + 2, n) if bias else None)


@pytest.mark.parametrize(("n", "k"), REAL)
def test_linear_real_sizes(n: int, k: int) -> None:
    check_linear(normal(n, 5, k), normal(k, n, k), normal(n + k, n))


def test_linear_is_exact_on_integers() -> None:
    rng = np.random.default_rng(5)
    x, w = rng.integers(-8, 9, (13, 129)).astype(np.float32), rng.integers(-8, 9, (67, 129)).astype(np.float32)
    np.testing.assert_array_equal(linear(x, w), x @ w.T)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 1e-45, 1e-39])
def test_linear_hostile_values_stay_in_their_row_and_column(value: float) -> None:
    """Output columns are padded to panels: 0 * inf in the padding must reach nothing."""
    x, w = np.ones((14, 9), np.float32), np.ones((33, 9), np.float32)
    clean = linear(x, w)
    x[3, 4] = value
    got = linear(x, w)
    np.testing.assert_array_equal(np.delete(got, 3, axis=0), np.delete(clean, 3, axis=0))
    np.testing.assert_allclose(got[3], np.float64(np.float32(value)) + 8, rtol=1e-6)
    x[3, 4], w[32, 0] = 1, value
    got = linear(x, w)
    np.testing.assert_array_equal(got[:, :32], clean[:, :32])
    np.testing.assert_allclose(got[:, 32], np.float64(np.float32(value)) + 8, rtol=1e-6)


def test_linear_overflows_to_inf_and_keeps_denormals() -> None:
    one = np.ones((1, 1), np.float32)
    assert linear(one * np.float32(3e38), one * 2)[0, 0] == np.inf
    assert linear(one * np.float32(1e-40), one)[0, 0] == np.float32(1e-40)


@pytest.mark.parametrize("bad", [(0, 4), (4, 0), (-1, 4)])
def test_packed_weight_refuses_empty(bad: tuple[int, int]) -> None:
    w = np.ones((4, 4), np.float32)
    with pytest.raises(ValueError):
        _core.PackedWeight(w.ctypes.data, *bad)


@SHAPES
@given(rows=st.integers(1, 40), n=sizes, k=st.integers(1, 300), seed=seeds, threads=st.integers(1, 2))
def test_linear_row_alone_has_the_same_bits(rows: int, n: int, k: int, seed: int, threads: int) -> None:
    x, w, bias = normal(seed, rows, k), normal(seed + 1, n, k), normal(seed + 2, n)
    packed = _core.PackedWeight(w.ctypes.data, n, k)
    _core.set_num_threads(threads)
    try:
        together = linear(x, w, bias, packed)
    finally:
        _core.set_num_threads(1)
    alone = np.concatenate([linear(x[r : r + 1], w, bias, packed) for r in range(rows)])
    np.testing.assert_array_equal(bits(together), bits(alone))


# ---------------------------------------------------------------- rms_norm


def check_rms_norm(x: np.ndarray, w: np.ndarray, eps: float) -> None:
    x64 = x.astype(np.float64)
    want = x64 / np.sqrt((x64**2).mean(axis=1, keepdims=True) + np.float32(eps)) * w
    np.testing.assert_allclose(rms_norm(x, w, eps), want, rtol=(x.shape[1] / 16 + 24) * EPS, atol=1e-44)


@SHAPES
@given(rows=sizes, dim=sizes, eps=st.sampled_from([1e-5, 1e-6, 0.1]), exponent=st.integers(-12, 12), seed=seeds)
def test_rms_norm(rows: int, dim: int, eps: float, exponent: int, seed: int) -> None:
    check_rms_norm(normal(seed, rows, dim) * np.float32(10.0**exponent), normal(seed + 1, dim), eps)


@pytest.mark.parametrize("dim", [576, 896, 1536, 4096, 4097])
def test_rms_norm_real_sizes(dim: int) -> None:
    check_rms_norm(normal(dim, 7, dim), normal(1, dim), 1e-6)


def test_rms_norm_of_zeros_and_denormals() -> None:
    x = np.zeros((2, 37), np.float32)
    x[1] = 1e-40
    got = rms_norm(x, np.ones(37, np.float32), 1e-6)
    assert (got[0] == 0).all()
    np.testing.assert_allclose(got[1], np.float32(1e-40) / 1e-3, rtol=1e-3)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("at", [0, 15, 16, 36])
def test_rms_norm_hostile_value_stays_in_its_row(value: float, at: int) -> None:
    x, w = normal(6, 5, 37), np.ones(37, np.float32)
    clean = rms_norm(x, w, 1e-6)
    x[2, at] = value
    got = rms_norm(x, w, 1e-6)
    np.testing.assert_array_equal(np.delete(got, 2, axis=0), np.delete(clean, 2, axis=0))
    assert np.isnan(got[2, at])
    rest = np.delete(got[2], at)
    assert np.isnan(rest).all() if np.isnan(value) else (rest == 0).all()


@SHAPES
@given(rows=st.integers(1, 40), dim=st.integers(1, 700), seed=seeds, threads=st.integers(1, 2))
def test_rms_norm_row_alone_has_the_same_bits(rows: int, dim: int, seed: int, threads: int) -> None:
    x, w = normal(seed, rows, dim), normal(seed + 1, dim)
    _core.set_num_threads(threads)
    try:
        together = rms_norm(x, w, 1e-6)
    finally:
        _core.set_num_threads(1)
    np.testing.assert_array_equal(bits(together), bits(np.concatenate([rms_norm(x[r : r + 1], w, 1e-6) for r in range(rows)])))


# ---------------------------------------------------------------- silu_mul


def silu_reference(x: np.ndarray) -> np.ndarray:
    gate, up = np.split(x.astype(np.float64), 2, axis=1)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-gate)) * up


@SHAPES
@given(rows=sizes, inter=sizes, scale=st.sampled_from([0.01, 1.0, 20.0]), seed=seeds)
def test_silu_mul(rows: int, inter: int, scale: float, seed: int) -> None:
    x = normal(seed, rows, 2 * inter) * np.float32(scale)
    # Where exp(-gate) overflows float32 the true value is below 88 * 3e-39 of `up`: nothing.
    np.testing.assert_allclose(silu_mul(x), silu_reference(x), rtol=16 * EPS, atol=1e-35)


@pytest.mark.parametrize("inter", [1536, 4864, 8960])
def test_silu_mul_real_sizes(inter: int) -> None:
    x = normal(inter, 3, 2 * inter)
    np.testing.assert_allclose(silu_mul(x), silu_reference(x), rtol=16 * EPS, atol=1e-35)


@pytest.mark.parametrize("inter", [1, 5, 16, 33])
def test_silu_mul_hostile_gates(inter: int) -> None:
    """Each gate in every lane, up = 2."""
    gates = np.array([0, -0.0, 1e-45, -1e-45, 88.8, -87, -87.4, -88.5, -89, -200, 200, 1e30, 3e38, np.inf, np.nan], np.float32)
    want = np.array([0, 0, 0, 0, 88.8, 0, 0, 0, 0, 0, 200, 1e30, np.float32(3e38), np.inf, np.nan]) * 2
    want[12] = np.inf  # 2 * 3e38 is over the largest float32
    for gate, expected in zip(gates, want, strict=True):
        x = np.concatenate([np.full((2, inter), gate), np.full((2, inter), 2)], axis=1).astype(np.float32)
        np.testing.assert_allclose(silu_mul(x), np.full((2, inter), expected), rtol=1e-6, atol=1e-34, err_msg=f"gate {gate}")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38])
def test_silu_mul_hostile_value_stays_in_its_element(value: float) -> None:
    x = normal(7, 3, 2 * 21)
    clean = silu_mul(x)
    for at in (2, 18, 21 + 5, 21 + 20):
        y = x.copy()
        y[1, at] = value
        changed = bits(silu_mul(y)) != bits(clean)
        changed[1, at % 21] = False
        assert not changed.any()


@SHAPES
@given(rows=st.integers(1, 40), inter=sizes, seed=seeds, threads=st.integers(1, 2))
def test_silu_mul_row_alone_has_the_same_bits(rows: int, inter: int, seed: int, threads: int) -> None:
    x = normal(seed, rows, 2 * inter)
    _core.set_num_threads(threads)
    try:
        together = silu_mul(x)
    finally:
        _core.set_num_threads(1)
    np.testing.assert_array_equal(bits(together), bits(np.concatenate([silu_mul(x[r : r + 1]) for r in range(rows)])))
