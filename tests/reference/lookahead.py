"""The whole lookahead-sparse decode of one request in plain numpy: the oracle for the C++ core (docs/design.md, sections 2-5).

Nothing here is shared with the core. Keys and values are stored as float32, as the pools hold them; every sum is float64. Each
(layer, head) keeps its working set as a dict slot -> its own copy of a block's K and V, and sparse attention reads from those
copies and the local pages alone, so a copy of the wrong block, or a copy made too early or too late, changes the output.

A step is `begin_step`, `forward` once a layer, `finish_selection`, `commit`. Selection runs in `finish_selection`, after the
attention of every layer: in the core it runs behind each layer's attention and nothing of the layer reads it before the next step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from decimal import Decimal

import numpy as np

BLOCK = 16
LOCAL_PAGES = 3
BYTES = 4  # of an element, float32
SUMMARIES = ("mean_std", "minmax", "halves")
COMBINES = ("softmax_sum", "max", "sum")


# ---------------------------------------------------------------- plain functions


def rope(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Half-split rotary embedding: x[..., D], cos and sin[D/2] of one position -> float32 [..., D]."""
    half = x.shape[-1] // 2
    lo, hi = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
    c, s = cos.astype(np.float64), sin.astype(np.float64)
    return np.concatenate([lo * c - hi * s, hi * c + lo * s], axis=-1).astype(np.float32)


def summarize(kind: str, keys: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two vectors of a complete block: keys[16, D] -> (a[D], b[D]), float64."""
    k = keys.astype(np.float64)
    if kind == "mean_std":
        mean = k.mean(axis=0)
        return mean, np.sqrt(((k - mean) ** 2).mean(axis=0))
    if kind == "minmax":
        return k.max(axis=0), k.min(axis=0)
    if kind == "halves":
        return k[:8].mean(axis=0), k[8:].mean(axis=0)
    raise ValueError(f"summary = {kind!r}: use one of {SUMMARIES}")


def block_scores(kind: str, q: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Scores of one query against every block: q[D], a and b[blocks, D] -> float64 [blocks]."""
    q = q.astype(np.float64)
    if kind == "mean_std":
        return a @ q + b @ np.abs(q)
    if kind == "minmax":
        return a @ np.maximum(q, 0) + b @ np.minimum(q, 0)
    if kind == "halves":
        return np.maximum(a @ q, b @ q)
    raise ValueError(f"summary = {kind!r}: use one of {SUMMARIES}")


def combine(group: str, scores: np.ndarray, head_dim: int) -> np.ndarray:
    """Scores [rows, G, blocks] -> [blocks]: over the group first, then the maximum over the rows. A NaN block hides no other."""
    if group == "softmax_sum":
        x = scores / np.sqrt(head_dim)
        valid = ~np.isnan(x)
        top = np.max(x, axis=-1, keepdims=True, initial=-np.inf, where=valid)
        e = np.exp(x - np.where(np.isfinite(top), top, 0.0))
        per_row = (e / np.sum(e, axis=-1, keepdims=True, where=valid)).sum(axis=1)
    elif group == "max":
        per_row = scores.max(axis=1)
    elif group == "sum":
        per_row = scores.sum(axis=1)
    else:
        raise ValueError(f"group_combine = {group!r}: use one of {COMBINES}")
    return per_row.max(axis=0)


def top_k(scores: np.ndarray, k: int) -> list[int]:
    """The best min(k, n) blocks by (score descending, lower block first); NaN ranks last."""
    order = sorted(range(len(scores)), key=lambda b: (1, 0.0, b) if np.isnan(scores[b]) else (0, -float(scores[b]), b))
    return order[:k]


def rank_gap(scores: np.ndarray, k: int) -> float:
    """Distance between the K-th and the (K+1)-th best score; inf when there is no boundary, nan when a NaN sits at it."""
    order = top_k(scores, len(scores))
    if len(order) <= k:
        return float("inf")
    inside, outside = float(scores[order[k - 1]]), float(scores[order[k]])
    return 0.0 if inside == outside else inside - outside


def ranking_excess(scores: np.ndarray, ranked: list[int]) -> float:
    """How far `ranked` is from a true ranking: the largest score by which a later or left-out block beats an earlier one (0 if none).

    A list that differs from top_k() only by rounding has an excess below the rounding bound of the scores.
    """
    s = np.where(np.isnan(scores), -np.inf, scores)
    left_out = [b for b in range(len(s)) if b not in set(ranked)]
    rest = [float(s[b]) for b in ranked] + [max((float(s[b]) for b in left_out), default=-np.inf)]
    excess = 0.0
    for i, own in enumerate(rest[:-1]):
        best_after = max(rest[i + 1 :])
        if best_after > own:
            excess = max(excess, best_after - own)
    return excess


def fetch_cap(ratio: str, k: int) -> int:
    """C = max(1, floor(ratio * K)) in exact decimals; `all` is K."""
    return k if ratio == "all" else max(1, int(Decimal(ratio) * k))


def dense_attention(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Softmax attention of G queries: q[G, D], keys and values[n, D] -> float64 [G, D]."""
    s = q.astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(q.shape[-1])
    p = np.exp(s - s.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)) @ values.astype(np.float64)


@dataclass
class Slot:
    """One slot of a head's working set: which block, when last selected, and its own copy of K and V."""

    block: int
    last_selected: int
    keys: np.ndarray  # [16, D]
    values: np.ndarray  # [16, D]


@dataclass
class Selection:
    predicted: list[int]
    admitted: list[tuple[int, int, int]]  # (block, slot, evicted block), in rank order
    capped: int


def victims(working: dict[int, Slot], keep: set[int]) -> list[int]:
    """Slots whose block is not in `keep`, in the order of eviction: (last_selected, lower block)."""
    slots = [s for s, w in working.items() if w.block not in keep]
    return sorted(slots, key=lambda s: (working[s].last_selected, working[s].block))


def select(
    working: dict[int, Slot], predicted: list[int], cap: int, step: int, host: dict[int, tuple[np.ndarray, np.ndarray]]
) -> Selection:
    """Touches what is resident, admits the first `cap` missing blocks in rank order and copies their K and V from `host`."""
    resident = {w.block for w in working.values()}
    for w in working.values():
        if w.block in predicted:
            w.last_selected = step
    missing = [b for b in predicted if b not in resident]
    order = victims(working, set(predicted))
    admitted = []
    for block, slot in zip(missing[:cap], order, strict=False):
        admitted.append((block, slot, working[slot].block))
        keys, values = host[block]
        working[slot] = Slot(block, step, keys.copy(), values.copy())
    assert len(admitted) == min(cap, len(missing)), "fewer victims than admissions"
    return Selection(list(predicted), admitted, len(missing) - len(admitted))


# ---------------------------------------------------------------- one request


@dataclass
class Record:
    """What one (layer, head) decided in one predicting step."""

    step: int
    layer: int
    head: int
    first: bool
    predicted: list[int]
    admitted: list[tuple[int, int, int]]
    capped: int
    fill: tuple[int, int] | None  # (slot, evicted block or -1)
    map: list[int]  # block of each slot after the step; empty for a first selection
    last_selected: list[int]
    scores: np.ndarray  # float64 [complete]
    bound: np.ndarray  # float64 [complete]: what float32 arithmetic may move each score by


@dataclass
class ReferenceSequence:
    """One request over L layers. Rows of a step are positions `committed`, `committed + 1`, ...; RoPE tables are [positions, D/2]."""

    layers: int
    heads: int  # KV heads
    group: int  # query heads per KV head
    head_dim: int
    top_k: int
    cap: int
    max_drafts: int
    sparse_from: int
    summary: str
    group_combine: str
    cos: np.ndarray
    sin: np.ndarray
    prompt_tokens: int
    sparse_enabled: bool = True
    sinks: int = 0  # first blocks that every head always wants

    committed: int = 0  # tokens whose KV exists and stays
    settled: int = 0  # complete blocks summarised and written through
    sparse: bool = False
    stats: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("dense_steps", "sparse_steps", "blocks_predicted", "blocks_admitted", "blocks_capped", "bytes_fetched", "resident_tokens_max"),
            0,
        )
    )

    def __post_init__(self) -> None:
        each = range(self.layers)
        # Whole KV of settled blocks, [layer][head] -> block -> (keys, values). Dense attention reads it; sparse steps only gather from it.
        self._full = [[{} for _ in range(self.heads)] for _ in each]
        self._summaries = [[[] for _ in range(self.heads)] for _ in each]
        # Blocks not settled yet. Dense: by block. Sparse: by local page, block % LOCAL_PAGES.
        self._open: list[dict[int, np.ndarray]] = [{} for _ in each]
        self._working: list[list[dict[int, Slot]]] = [[{} for _ in range(self.heads)] for _ in each]
        self._chosen: dict[tuple[int, int], list[int]] | None = None  # a first selection waiting for SPARSIFY
        self._chosen_complete = self._chosen_step = 0
        self._in_step = False

    # ---- a step

    def begin_step(self, step: int, rows: int, drafts: int) -> str:
        """Fixes the step's shape; returns its kind: prefill, dense or sparse. SPARSIFY happens here, before the step."""
        assert not self._in_step
        if self._chosen is not None:
            self._sparsify()
        prefill = self.committed < self.prompt_tokens
        assert prefill or rows == 1 + drafts <= 1 + self.max_drafts
        self._in_step, self._step, self._rows, self._drafts, self._prefill = True, step, rows, drafts, prefill
        self._complete = self.committed // BLOCK
        ready = self.committed >= self.sparse_from and not prefill
        self._first = self.sparse_enabled and ready and not self.sparse
        self._fills: dict[tuple[int, int], tuple[int, int]] = {}
        self._scores: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        if self.sparse:
            assert self._complete - self.settled <= 1, "more than one block completed in a step"
        return "prefill" if prefill else "sparse" if self.sparse else "dense"

    def forward(self, layer: int, qkv: np.ndarray) -> np.ndarray:
        """Packed rows [rows, (Hq + 2H) * D] of one layer -> attention output, float64 [rows, Hq * D]."""
        assert self._in_step and qkv.shape[0] == self._rows
        self._settle(layer)
        dim, hq = self.head_dim, self.heads * self.group
        q_all = qkv[:, : hq * dim].reshape(self._rows, self.heads, self.group, dim)
        k_all = qkv[:, hq * dim : (hq + self.heads) * dim].reshape(self._rows, self.heads, dim)
        v_all = qkv[:, (hq + self.heads) * dim :].reshape(self._rows, self.heads, dim)
        queries = np.stack([rope(q_all[r], *self._tables(r)) for r in range(self._rows)])
        for r in range(self._rows):
            self._append(layer, self.committed + r, rope(k_all[r], *self._tables(r)), v_all[r])
        out = np.empty((self._rows, self.heads, self.group, dim))
        for h in range(self.heads):
            for r in range(self._rows):
                keys, values = self._visible(layer, h, self.committed + r)
                out[r, h] = dense_attention(queries[r, h], keys, values)
        if self.sparse or self._first:
            staged = queries[1:] if self._drafts else queries[:1]
            for h in range(self.heads):
                self._scores[layer, h] = self._score(layer, h, staged[:, h])
        return out.reshape(self._rows, hq * dim)

    @property
    def sparsify_pending(self) -> bool:
        return self._chosen is not None

    def predicting(self) -> list[tuple[int, int]]:
        """The (layer, head) pairs that predicted in this step; empty in a step that selects nothing."""
        return list(self._scores)

    def predicted(self, layer: int, head: int) -> list[int]:
        return top_k(self._scores[layer, head][0], self.top_k)

    def scores(self, layer: int, head: int) -> tuple[np.ndarray, np.ndarray]:
        """(scores, rounding bound) of every complete block, float64."""
        return self._scores[layer, head]

    def finish_selection(self, adopt: dict[tuple[int, int], list[int]] | None = None) -> list[Record]:
        """Selects for every (layer, head) of a predicting step. `adopt` replaces predictions that tied within rounding."""
        records = []
        if self._first:
            self._chosen, self._chosen_complete, self._chosen_step = {}, self._complete, self._step
        for layer, head in self._scores:
            best = (adopt or {}).get((layer, head)) or self.predicted(layer, head)
            if self._first:
                self._chosen[layer, head] = best
                picked, now = Selection(best, [], 0), {}
            else:
                now = self._working[layer][head]
                picked = select(now, best, self.cap, self._step, self._full[layer][head])
                self.stats["blocks_predicted"] += len(best)
                self.stats["blocks_admitted"] += len(picked.admitted)
                self.stats["blocks_capped"] += picked.capped
                self.stats["bytes_fetched"] += len(picked.admitted) * 2 * BLOCK * self.head_dim * BYTES
            slots = [now[s] for s in range(len(now))]
            scores, bound = self._scores[layer, head]
            records.append(
                Record(
                    step=self._step,
                    layer=layer,
                    head=head,
                    first=self._first,
                    predicted=picked.predicted,
                    admitted=picked.admitted,
                    capped=picked.capped,
                    fill=self._fills.get((layer, head)),
                    map=[w.block for w in slots],
                    last_selected=[w.last_selected for w in slots],
                    scores=scores,
                    bound=bound,
                )
            )
        return records

    def commit(self, new_tokens: int) -> None:
        """A prefill chunk keeps all its rows; a decode step the normal row and the accepted drafts: `new_tokens` = accepted + 1."""
        assert self._in_step
        self._in_step = False
        if self._prefill:
            self.committed += self._rows
        else:
            assert 1 <= new_tokens <= self._rows
            if self.sparse:
                self.stats["sparse_steps"] += 1
                resident = len(self._working[0][0]) * BLOCK + self.committed + self._rows - self._complete * BLOCK
                self.stats["resident_tokens_max"] = max(self.stats["resident_tokens_max"], resident)
            else:
                self.stats["dense_steps"] += 1
            self.committed += new_tokens
        self.settled = self._complete

    # ---- what a step is made of

    def _tables(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        return self.cos[self.committed + row], self.sin[self.committed + row]

    def _place(self, block: int) -> int:
        return block % LOCAL_PAGES if self.sparse else block

    def _settle(self, layer: int) -> None:
        for block in range(self.settled, self._complete):
            data = self._open[layer][self._place(block)]  # [H, 2, 16, D]
            assert not np.isnan(data).all(axis=-1).any(), "a complete block has a token that was never written"
            for h in range(self.heads):
                keys, values = data[h, 0].copy(), data[h, 1].copy()
                self._full[layer][h][block] = (keys, values)
                if self.sparse_enabled:
                    self._summaries[layer][h].append(summarize(self.summary, keys))
                    assert len(self._summaries[layer][h]) == block + 1
                if self.sparse:
                    self._fills[layer, h] = self._fill(self._working[layer][h], block, keys, values)
            self._open[layer][self._place(block)] = np.full_like(data, np.nan)

    def _fill(self, working: dict[int, Slot], block: int, keys: np.ndarray, values: np.ndarray) -> tuple[int, int]:
        if len(working) < self.top_k:
            slot, evicted = len(working), -1
        else:
            slot = victims(working, set())[0]
            evicted = working[slot].block
        working[slot] = Slot(block, self._step, keys.copy(), values.copy())
        return slot, evicted

    def _append(self, layer: int, position: int, keys: np.ndarray, values: np.ndarray) -> None:
        place, token = self._place(position // BLOCK), position % BLOCK
        if place not in self._open[layer]:
            self._open[layer][place] = np.full((self.heads, 2, BLOCK, self.head_dim), np.nan, np.float32)
        self._open[layer][place][:, 0, token] = keys
        self._open[layer][place][:, 1, token] = values

    def _visible(self, layer: int, head: int, position: int) -> tuple[np.ndarray, np.ndarray]:
        """K and V that the row at `position` sees: complete blocks that are resident, then the open ones up to itself."""
        if self.sparse:
            working = self._working[layer][head]
            pairs = [(working[s].keys, working[s].values) for s in range(len(working))]
        else:
            pairs = [self._full[layer][head][b] for b in range(self._complete)]
        for block in range(self._complete, position // BLOCK + 1):
            tokens = min(BLOCK, position + 1 - block * BLOCK)
            data = self._open[layer][self._place(block)][head]
            pairs.append((data[0, :tokens], data[1, :tokens]))
        return np.concatenate([k for k, _ in pairs]), np.concatenate([v for _, v in pairs])

    def _score(self, layer: int, head: int, staged: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """staged[rows, G, D] -> scores that rank and how far float32 may be from them, each [complete]. Sinks above all, in block order."""
        scores, bound = self._block_scores(layer, head, staged)
        sinks = min(self.sinks, self._complete)
        scores[:sinks], bound[:sinks] = 1e30 * (sinks - np.arange(sinks)), 0.0
        return scores, bound

    def _block_scores(self, layer: int, head: int, staged: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        a = np.stack([s[0] for s in self._summaries[layer][head]])
        b = np.stack([s[1] for s in self._summaries[layer][head]])
        assert len(a) == self._complete
        raw = np.stack([[block_scores(self.summary, q, a, b) for q in row] for row in staged])
        scores = combine(self.group_combine, raw, self.head_dim)
        # A sum of D products in lanes of 16, each product of two rounded factors: within 16 ulps of the sum of magnitudes.
        size = np.abs(a) + np.abs(b)
        each = 16 * 2.0**-24 * np.stack([[size @ np.abs(q.astype(np.float64)) for q in row] for row in staged])
        if self.group_combine == "softmax_sum":
            # Relative to a softmax value: the exponent's error, the denominator's (the largest of any block), and exp itself.
            relative = (each + each.max(axis=-1, keepdims=True)).max(axis=(0, 1)) / np.sqrt(self.head_dim) + 32 * 2.0**-24
            return scores, relative * scores + 1e-36
        return scores, each.sum(axis=1).max(axis=0)

    def _sparsify(self) -> None:
        """Slots 0..S-1 are the pages of blocks 0..S-1; chosen blocks below S stay, the others go into the slots left, both ascending."""
        complete, slots = self._chosen_complete, min(self.top_k, self._chosen_complete)
        for (layer, head), chosen in self._chosen.items():
            assert len(chosen) == slots
            stays = {b for b in chosen if b < slots}
            free = [s for s in range(slots) if s not in stays]
            moved = sorted(b for b in chosen if b >= slots)
            held = {**{b: b for b in stays}, **dict(zip(free, moved, strict=True))}
            for slot in range(slots):
                keys, values = self._full[layer][head][held[slot]]
                self._working[layer][head][slot] = Slot(held[slot], self._chosen_step, keys.copy(), values.copy())
        for layer in range(self.layers):
            kept = range(complete, complete + LOCAL_PAGES)
            self._open[layer] = {b % LOCAL_PAGES: self._open[layer][b] for b in kept if b in self._open[layer]}
        self._chosen, self.sparse = None, True
