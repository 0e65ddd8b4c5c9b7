"""Random cases for a core: shapes, rows of small integers whose scores are exact, configurations with roomy or tight pools."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from oasiskv import _core
from reference.lookahead import BLOCK, LOCAL_PAGES


@dataclass
class Shape:
    """One random case."""

    integer: bool = True
    layers: int = 1
    heads: int = 1
    group: int = 1
    dim: int = 64
    top_k: int = 4
    cap: int = 2
    sinks: int = 0
    drafts: int = 1
    sparse_from: int = 80
    summary: str = "mean_std"
    combine: str = "max"
    accept: bool = True
    sparse: bool = True
    requests: int = 2
    prompts: tuple[int, int] = (1, 200)
    new_tokens: tuple[int, int] = (1, 60)
    max_num_tokens: int = 64
    spare_pages: int | None = None  # None: plenty of device pages; else this many beyond what the widest request needs alone
    delay_us: int = 0
    cancel: float = 0.0  # chance a step that a live request is cancelled
    draft_chance: float = 0.8
    threads: int = 1
    prefixes: int = 0  # streams of rows that requests begin with, under names; 0: no request has names
    spare_blocks: int | None = None  # None: host units for all requests; else for the longest and this many blocks more


def integer_rows(rng: np.random.Generator, s: Shape, positions: int) -> np.ndarray:
    """Small integers. A key channel of a block is c+d for half its tokens and c-d for the other half: mean and deviation are exact."""
    blocks = -(-positions // BLOCK)
    kv = s.heads * s.dim
    q = rng.integers(-2, 3, (s.layers, positions, s.heads * s.group * s.dim)) * (rng.random((s.layers, positions, 1)) < 0.9)
    centre = rng.integers(-1, 2, (s.layers, blocks, 1, kv))
    spread = rng.integers(0, 3, (s.layers, blocks, 1, kv))
    halves = np.argsort(rng.random((s.layers, blocks, BLOCK, kv)), axis=2) % 2 * 2 - 1
    k = (centre + spread * halves).reshape(s.layers, blocks * BLOCK, kv)[:, :positions]
    v = rng.integers(-4, 5, (s.layers, positions, kv))
    return np.concatenate([q, k, v], axis=-1).astype(np.float32)


def real_rows(rng: np.random.Generator, s: Shape, positions: int) -> np.ndarray:
    return rng.standard_normal((s.layers, positions, (s.heads * s.group + 2 * s.heads) * s.dim)).astype(np.float32)


class Rows:
    """Rows of one case's requests, of which many begin alike where the shape has prefixes."""

    def __init__(self, rng: np.random.Generator, s: Shape, positions: int) -> None:
        self._rng, self._s = rng, s
        self._make = integer_rows if s.integer else real_rows
        self._streams = [self._make(rng, s, positions) for _ in range(s.prefixes)]

    def __call__(self, positions: int) -> np.ndarray:
        """[L, positions, W] float32: up to some block those of one of the streams."""
        rows = self._make(self._rng, self._s, positions)
        if self._streams:
            shared = int(self._rng.integers(0, positions, endpoint=True)) // BLOCK * BLOCK
            rows[:, :shared] = self._streams[self._rng.integers(len(self._streams))][:, :shared]
        return rows

    def names(self, rows: np.ndarray) -> bytes:
        """Of the complete blocks of these rows, for the prefix cache: the same rows from the first on have the same name."""
        names = [b""]
        for end in range(BLOCK, (rows.shape[1] if self._streams else 0) + 1, BLOCK):
            block = np.ascontiguousarray(rows[:, end - BLOCK : end]).tobytes()
            names.append(hashlib.blake2b(names[-1] + block, digest_size=16).digest())
        return b"".join(names)


def rope_tables(s: Shape, positions: int) -> tuple[np.ndarray, np.ndarray]:
    half = s.dim // 2
    if s.integer:
        return np.ones((positions, half), np.float32), np.zeros((positions, half), np.float32)
    angle = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(half) / half)
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)


def pages_alone(s: Shape, prompt: int, max_new: int) -> int:
    """An upper bound of what a request needs at its widest, running alone."""
    every = -(-(prompt + max_new) // BLOCK)
    if not s.sparse:
        return every
    dense = -(-(max(prompt, s.sparse_from) + 3 * s.drafts + 2) // BLOCK) + LOCAL_PAGES
    return max(min(dense, every + LOCAL_PAGES), min(s.top_k, every) + LOCAL_PAGES)


def core_config(s: Shape, wanted: list[tuple[int, int]], seed: int) -> _core.CoreConfig:
    """For requests of (prompt, new tokens) each."""
    cfg = _core.CoreConfig()
    cfg.num_layers, cfg.num_kv_heads, cfg.num_q_heads, cfg.head_dim = s.layers, s.heads, s.heads * s.group, s.dim
    cfg.top_k_blocks, cfg.fetch_cap_blocks, cfg.max_draft_len = s.top_k, s.cap, s.drafts
    cfg.sink_blocks = s.sinks
    cfg.sparse_enabled, cfg.sparse_from_tokens, cfg.summary, cfg.group_combine = s.sparse, s.sparse_from, s.summary, s.combine
    cfg.accept_drafts = s.accept
    blocks = [-(-(p + n) // BLOCK) for p, n in wanted]
    widest = max(pages_alone(s, p, n) for p, n in wanted)
    cfg.device_pages = sum(blocks) + 4 * s.requests if s.spare_pages is None else widest + s.spare_pages
    cfg.host_blocks = (sum(blocks) if s.spare_blocks is None else max(blocks) + s.spare_blocks) * s.layers
    cfg.max_batch_size = s.requests
    cfg.max_num_tokens = max(s.max_num_tokens, s.requests * (1 + s.drafts))
    cfg.max_seq_len, cfg.num_threads, cfg.trace = max(p + n for p, n in wanted), s.threads, True
    cfg.transfer_delay_us, cfg.fault_seed = s.delay_us, seed
    return cfg
