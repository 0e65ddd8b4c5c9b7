"""Holds oasiskv._core.Core against tests/reference/lookahead.py step by step: outputs, sets, maps, evictions, bytes.

Each case drives the core through random requests and logs what went in and out; the oracle replays the log a few steps later, so
that the core's background really overlaps with the next step. On integer inputs every score is exact in float32 and everything
must match exactly. On real inputs a predicted list may differ where its scores are within the rounding bound of each other; the
oracle then adopts the core's list, the case goes on exactly, and such ties are counted and must stay rare.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from oasiskv import _core
from reference.cases import Rows, Shape, core_config, integer_rows, real_rows, rope_tables
from reference.lookahead import BLOCK, COMBINES, SUMMARIES, ReferenceSequence, ranking_excess, top_k

OUTPUT_TOLERANCE = 2e-5  # of the largest output of the row and head
STAT_KEYS = ("dense_steps", "sparse_steps", "blocks_predicted", "blocks_admitted", "blocks_capped", "bytes_fetched", "resident_tokens_max")


@dataclass
class Totals:
    """What the cases went through, so that a test can refuse to pass without having tested anything."""

    records: int = 0
    ties: int = 0
    firsts: int = 0
    firsts_below_complete: int = 0
    admitted: int = 0
    capped: int = 0
    grown: int = 0
    evicted_by_fill: int = 0
    sparse_steps: int = 0
    preemptions: int = 0
    preempted_before_sparsify: int = 0
    chunks: int = 0
    accepted_drafts: int = 0
    rejected_drafts: int = 0
    reused_blocks: int = 0
    evicted_blocks: int = 0


@dataclass
class Request:
    rows: np.ndarray  # [L, positions, (Hq + 2H) * D] float32: the row that stays at each position
    prompt: int
    max_new: int
    tokens: int
    reference: ReferenceSequence
    preemptions: int = 0
    last_step: int = 0


@dataclass
class Step:
    groups: list
    qkv: list  # [layer] -> [rows, W]
    out: list  # [layer] -> [rows, Hq * D]
    new_tokens: dict
    number: int


class Case:
    """Drives one core through one random case and holds it against the oracle."""

    def __init__(self, shape: Shape, seed: int, totals: Totals) -> None:
        self.s, self.totals = shape, totals
        self.rng = np.random.default_rng(seed)
        s, rng = shape, self.rng
        wanted = [
            (int(rng.integers(*s.prompts, endpoint=True)), int(rng.integers(*s.new_tokens, endpoint=True))) for _ in range(s.requests)
        ]
        cfg = core_config(s, wanted, seed)
        self.cos, self.sin = rope_tables(s, cfg.max_seq_len)
        self.cfg = cfg
        self.core = _core.Core(cfg, self.cos.ctypes.data, self.sin.ctypes.data)
        self.arrivals = [(int(rng.integers(0, 12)) if i else 0, i, p, n) for i, (p, n) in enumerate(wanted)]
        self.rows = Rows(rng, s, cfg.max_seq_len)
        self.live: dict[int, Request] = {}
        self.log: list[Step] = []
        self.number = 0

    # ---- driving the core

    def run(self) -> None:
        tick = idle = 0
        while self.arrivals or self.live:
            for a in [a for a in self.arrivals if a[0] <= tick]:
                self.arrivals.remove(a)
                self.submit(*a[1:])
            tick += 1
            if self.live and self.rng.random() < self.s.cancel:
                self.finish(int(self.rng.choice(list(self.live))))
            idle = 0 if self.step() or not self.live else idle + 1
            assert idle < 3, f"nothing runs although {sorted(self.live)} are unfinished: {self.core.usage()}"
            assert tick < 5000, "no progress"
            if self.rng.random() < 0.2:
                self.replay()
        self.replay()
        self.core.begin_step()
        assert self.core.plan({}) == []
        usage = self.core.usage()
        for pool in ("device_pages", "host_blocks", "summary_pages"):
            assert usage[pool + "_free"] == usage[pool], f"{pool} leaked: {usage}"
        self.totals.reused_blocks += usage["prefix_blocks_reused"]
        self.totals.evicted_blocks += usage["prefix_blocks_evicted"]

    def submit(self, rid: int, prompt: int, max_new: int) -> None:
        s, rows = self.s, self.rows(prompt + max_new)
        self.core.submit(rid, prompt, max_new, self.rows.names(rows[:, :prompt]))
        reference = ReferenceSequence(
            s.layers,
            s.heads,
            s.group,
            s.dim,
            s.top_k,
            s.cap,
            s.drafts,
            s.sparse_from,
            s.summary,
            s.combine,
            self.cos,
            self.sin,
            prompt,
            s.sparse,
            s.sinks,
        )
        self.live[rid] = Request(rows, prompt, max_new, prompt, reference)

    def step(self) -> bool:
        rng = self.rng
        offered = {}
        wanted = dict(self.core.begin_step())
        for rid, rows in wanted.items():
            assert 1 <= rows <= min(self.s.drafts, self.live[rid].prompt + self.live[rid].max_new - self.live[rid].tokens)
            if rng.random() < self.s.draft_chance:
                offered[rid] = int(rng.integers(0, rows, endpoint=True))
        groups = self.core.plan(offered)
        assert set(wanted) <= {g.id for g in groups}  # who was asked for drafts runs
        if not groups:
            return False
        self.number += 1
        assert len({g.id for g in groups}) == len(groups)
        new_tokens, parts = {}, []
        for g in groups:
            assert g.drafts == (0 if g.kind == "prefill" else offered.get(g.id, 0))
            if g.kind == "sparse":  # else a selection would depend on whether the request has just resumed
                request = self.live[g.id]
                assert wanted.get(g.id, 0) == min(self.s.drafts, request.prompt + request.max_new - request.tokens)
            if g.logits_rows > 0:
                most = max(1, g.drafts) if self.s.accept and g.kind != "prefill" else 1
                new_tokens[g.id] = int(rng.integers(1, most, endpoint=True))
            parts.append(self.rows_of(g, new_tokens.get(g.id, g.rows)))
        qkv = [np.ascontiguousarray(np.concatenate([p[layer] for p in parts])) for layer in range(self.s.layers)]
        assert len(qkv[0]) <= self.cfg.max_num_tokens
        outs = []
        for layer in range(self.s.layers):
            out = np.full((len(qkv[layer]), self.cfg.num_q_heads * self.s.dim), np.nan, np.float32)
            self.core.forward(layer, qkv[layer].ctypes.data, out.ctypes.data)
            outs.append(out)
        self.core.commit(new_tokens)
        self.log.append(Step(groups, qkv, outs, new_tokens, self.number))
        for rid, n in new_tokens.items():
            self.live[rid].tokens += n
        for rid in new_tokens:
            if self.live[rid].tokens >= self.live[rid].prompt + self.live[rid].max_new:
                self.finish(rid)
        return True

    def rows_of(self, g, kept: int) -> np.ndarray:
        """[L, rows, W]: the rows that stay, then rejected draft rows whose K and V must never be seen again."""
        true = self.live[g.id].rows[:, g.start : g.start + g.rows]
        if g.kind == "prefill" or kept >= g.rows:
            return true
        rows = true.copy()
        make = integer_rows if self.s.integer else real_rows
        rows[:, kept:] = make(self.rng, self.s, g.rows - kept)
        return rows

    def finish(self, rid: int) -> None:
        self.replay()
        request = self.live.pop(rid)
        self.totals.preemptions += request.preemptions
        assert self.core.end(rid, self.rows.names(request.rows))
        assert not self.core.end(rid)

    # ---- replaying the oracle

    def replay(self) -> None:
        trace = {}
        for r in self.core.take_trace():
            key = (r["step"], r["id"], r["layer"], r["head"])
            assert key not in trace, f"two records of {key}"
            trace[key] = r
        for step in self.log:
            row = 0
            for g in step.groups:
                self.replay_group(step, g, row, trace)
                row += g.rows
            assert row == len(step.qkv[0])
        self.log.clear()
        assert not trace, f"records of nothing that predicts: {list(trace)[:4]}"
        for rid, request in self.live.items():
            self.compare_stats(rid, request)

    def replay_group(self, step: Step, g, row: int, trace: dict) -> None:
        request, where = self.live[g.id], f"step {step.number} request {g.id} {g.kind}"
        ref = request.reference
        if ref.committed == 0 and g.start > 0:
            self.replay_reused(step, g, request)
        assert g.start == ref.committed, where
        if ref.sparsify_pending and step.number - request.last_step > 1:
            self.totals.preempted_before_sparsify += 1
        request.last_step = step.number
        assert ref.begin_step(step.number, g.rows, g.drafts) == g.kind, where
        for layer in range(self.s.layers):
            rows = slice(row, row + g.rows)
            expected = ref.forward(layer, step.qkv[layer][rows]).reshape(g.rows, -1, self.s.dim)
            got = step.out[layer][rows].reshape(expected.shape)
            error = np.abs(got - expected).max(axis=-1) / np.abs(expected).max(axis=-1).clip(1e-3)
            assert error.max() <= OUTPUT_TOLERANCE, f"{where} layer {layer}: output differs by {error.max():.2e}"
        self.compare_selection(step, g, ref, trace, where)
        new = step.new_tokens.get(g.id, 0)
        ref.commit(new if g.kind != "prefill" else 0)
        if g.kind == "prefill":
            self.totals.chunks += g.logits_rows == 0
        else:
            self.totals.accepted_drafts += new - 1
            self.totals.rejected_drafts += g.rows - new

    def replay_reused(self, step: Step, g, request: Request) -> None:
        """What it began with, as a chunk of its prompt: that is how it came into the cache."""
        assert g.kind == "prefill" and g.start % BLOCK == 0
        ref = request.reference
        ref.begin_step(step.number, g.start, 0)
        for layer in range(self.s.layers):
            ref.forward(layer, request.rows[layer, : g.start])
        ref.commit(0)

    def compare_selection(self, step: Step, g, ref: ReferenceSequence, trace: dict, where: str) -> None:
        got, adopt = {}, {}
        for layer, head in ref.predicting():
            r = trace.pop((step.number, g.id, layer, head), None)
            assert r is not None, f"{where}: no record of layer {layer} head {head}"
            got[layer, head] = r
            self.compare_predicted(r["predicted"], ref, layer, head, adopt, where)
        t = self.totals
        for want in ref.finish_selection(adopt):
            r = got[want.layer, want.head]
            at = f"{where} layer {want.layer} head {want.head}"
            for name in ("first", "predicted", "admitted", "capped", "fill", "map", "last_selected"):
                assert r[name] == getattr(want, name), f"{at}: {name}"
            t.records += 1
            t.firsts += want.first
            t.firsts_below_complete += want.first and len(want.predicted) < len(want.scores)
            t.admitted += len(want.admitted)
            t.capped += want.capped
            if want.fill is not None:
                t.grown += want.fill[1] < 0
                t.evicted_by_fill += want.fill[1] >= 0
            t.sparse_steps += not want.first

    def compare_predicted(self, got: list[int], ref: ReferenceSequence, layer: int, head: int, adopt: dict, where: str) -> None:
        scores, bound = ref.scores(layer, head)
        want = top_k(scores, self.s.top_k)
        if got == want:
            return
        at = f"{where} layer {layer} head {head}: predicted {got}, oracle {want}"
        assert not self.exact(), at
        assert len(set(got)) == len(want) == len(got) and all(0 <= b < len(scores) for b in got), at
        differing = {b for pair in zip(got, want, strict=True) if pair[0] != pair[1] for b in pair}
        allowed = 2 * max(bound[b] for b in differing)
        excess = ranking_excess(scores, got)
        assert excess <= allowed, f"{at}: off by {excess:.3e}, rounding explains {allowed:.3e}"
        self.totals.ties += 1
        adopt[layer, head] = got

    def exact(self) -> bool:
        """Integer scores are exact in float32. softmax_sum of one query orders them as they are; of several it sums rounded values."""
        return self.s.integer and (self.s.combine != "softmax_sum" or self.s.group == 1)

    def compare_stats(self, rid: int, request: Request) -> None:
        got = self.core.stats(rid)
        for key in STAT_KEYS:
            assert got[key] == request.reference.stats[key], f"request {rid}: {key} is {got[key]}, oracle {request.reference.stats[key]}"
        assert got["preemptions"] >= request.preemptions
        request.preemptions = got["preemptions"]


def random_shape(rng: np.random.Generator, **fixed) -> Shape:
    top = int(rng.integers(2, 13))
    group = int(rng.choice([1, 3, 4, 7]))
    s = Shape(
        layers=int(rng.integers(1, 3)),
        heads=int(rng.integers(1, 3 if group == 7 else 4)),
        group=group,
        dim=int(rng.choice([64, 128])),
        top_k=top,
        cap=int(rng.integers(1, int(rng.integers(1, top + 1)) + 1)),
        sinks=int(rng.choice([0, 0, 1, 2])),
        drafts=int(rng.integers(1, 4)),
        sparse_from=int(rng.choice([16, 37, (top + 1) * BLOCK, max(16, (top - 1) * BLOCK + 5), (top + 3) * BLOCK + 1])),
        requests=int(rng.integers(1, 4)),
        accept=bool(rng.random() < 0.7),
        max_num_tokens=int(rng.choice([16, 33, 80, 512])),
        delay_us=int(rng.choice([0, 0, 300])),
    )
    for name, value in fixed.items():
        setattr(s, name, value)
    s.cap, s.sinks = min(s.cap, s.top_k), min(s.sinks, s.top_k)
    return s


def run_cases(seeds: range, **fixed) -> Totals:
    totals = Totals()
    for seed in seeds:
        shape = random_shape(np.random.default_rng([seed, 1]), **fixed)
        try:
            Case(shape, seed, totals).run()
        except AssertionError as e:
            raise AssertionError(f"seed {seed}, {shape}: {e}") from e
    return totals


@pytest.mark.parametrize(("summary", "combine"), itertools.product(SUMMARIES, COMBINES))
@pytest.mark.parametrize("integer", [True, False], ids=["integer", "real"])
def test_core_matches_oracle(summary: str, combine: str, integer: bool) -> None:
    kind = 10 * SUMMARIES.index(summary) + 100 * COMBINES.index(combine)
    t = run_cases(range(kind, kind + 12), summary=summary, combine=combine, integer=integer)
    assert min(t.firsts_below_complete, t.admitted, t.capped, t.evicted_by_fill, t.rejected_drafts, t.chunks) > 0, t
    if integer and combine != "softmax_sum":
        assert t.ties == 0
    assert t.ties <= 2 + t.records // 500, t


def test_growing_working_set() -> None:
    """sparse_from far below K blocks: every slot holds its own block, new blocks take new slots, nothing is ever fetched until K."""
    t = run_cases(range(8), sparse_from=16, top_k=8, cap=3, prompts=(1, 60), new_tokens=(100, 160), requests=2)
    assert t.grown > 0 and t.evicted_by_fill > 0 and t.firsts > t.firsts_below_complete, t


@pytest.mark.parametrize("integer", [True, False], ids=["integer", "real"])
def test_preemption(integer: bool) -> None:
    t = run_cases(range(100, 112), integer=integer, requests=4, spare_pages=1, prompts=(17, 150), new_tokens=(20, 90), layers=1, heads=1)
    assert t.preemptions > 3 and t.admitted > 0, t


def test_preemption_when_several_turn_sparse_together() -> None:
    """Same lengths, so that requests select first in the same step and the older one's SPARSIFY preempts the younger before its own."""
    totals = Totals()
    for seed in range(60):
        rng = np.random.default_rng([seed, 2])
        prompt = int(rng.integers(40, 120))
        shape = random_shape(
            rng,
            requests=int(rng.integers(2, 5)),
            prompts=(prompt, prompt),
            new_tokens=(30, 60),
            sparse_from=prompt + int(rng.integers(0, 20)),
            layers=1,
            heads=1,
            group=1,
            dim=64,
            spare_pages=int(rng.integers(0, 8)),
            max_num_tokens=512,
            accept=False,
            draft_chance=0.2,
        )
        case = Case(shape, seed, totals)
        case.arrivals = [(0, *a[1:]) for a in case.arrivals]
        try:
            case.run()
        except AssertionError as e:
            raise AssertionError(f"seed {seed}, {shape}: {e}") from e
    assert totals.preemptions > 30 and totals.preempted_before_sparsify > 5 and totals.sparse_steps > 0, totals


def test_cancels_and_delayed_transfers() -> None:
    t = run_cases(range(200, 208), requests=5, spare_pages=6, cancel=0.04, delay_us=1500, prompts=(17, 120), layers=2, heads=2, group=1)
    assert t.sparse_steps > 0, t


def test_long_draft_rows() -> None:
    """m = 15 draft rows, so that drafts spill into another local page and a step completes a block at any offset."""
    t = run_cases(
        range(300, 306), drafts=15, accept=True, new_tokens=(60, 120), prompts=(40, 100), sparse_from=48, top_k=3, max_num_tokens=128
    )
    assert t.accepted_drafts > 50 and t.rejected_drafts > 50 and t.evicted_by_fill > 0, t


def test_dense_only() -> None:
    t = run_cases(range(400, 404), sparse=False, integer=False)
    assert t.records == 0 and t.chunks > 0, t


def test_sparse_mode_with_k_over_everything_never_fetches() -> None:
    t = run_cases(range(500, 504), top_k=32, cap=32, sparse_from=16, prompts=(16, 200), new_tokens=(20, 60))
    assert t.firsts > 0 and t.sparse_steps > 0 and t.admitted == 0 and t.capped == 0 and t.firsts_below_complete == 0, t


def test_threads() -> None:
    t = run_cases(range(600, 602), threads=2, integer=False)
    assert t.sparse_steps > 0, t


# ---------------------------------------------------------------- the comparison itself must be able to fail


@pytest.mark.parametrize("broken", ["victim order", "cap", "bytes", "stale draft", "late write"])
def test_harness_notices(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change of one rule in the oracle must make the comparison fail."""
    import reference.lookahead as ref

    if broken == "victim order":
        right = ref.victims
        monkeypatch.setattr(ref, "victims", lambda w, keep: sorted(right(w, keep), key=lambda s: (w[s].last_selected, -w[s].block)))
    elif broken == "cap":
        right_select = ref.select
        monkeypatch.setattr(ref, "select", lambda w, p, cap, step, host: right_select(w, p, cap + 1, step, host))
    elif broken == "bytes":
        monkeypatch.setattr(ref, "BYTES", 2)
    elif broken == "stale draft":
        # The oracle's rejected rows of the previous step stay: rows already written are not overwritten.
        right_append = ref.ReferenceSequence._append

        def append(self, layer, position, keys, values):
            place, token = self._place(position // BLOCK), position % BLOCK
            data = self._open[layer].get(place)
            if data is None or np.isnan(data[0, 0, token, 0]):
                right_append(self, layer, position, keys, values)

        monkeypatch.setattr(ref.ReferenceSequence, "_append", append)
    else:
        right_select = ref.select

        def select(working, predicted, cap, step, host):
            before = {s: (w.keys, w.values) for s, w in working.items()}
            out = right_select(working, predicted, cap, step, host)
            for _, slot, _ in out.admitted:
                working[slot].keys, working[slot].values = before[slot]
            return out

        monkeypatch.setattr(ref, "select", select)
    with pytest.raises(AssertionError):
        run_cases(range(3), prompts=(120, 200), new_tokens=(40, 60), sparse_from=100, top_k=4, cap=1, drafts=3, accept=True)
