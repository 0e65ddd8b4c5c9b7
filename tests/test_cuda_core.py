"""The CUDA core against the CPU core, in lockstep: the same requests, rows, drafts and accepted tokens, with preemption and cancels.

On integer inputs every score is exact in every dtype, so that maps and steps of last selection must match exactly. On real inputs
a set may differ where the scores at its border are within rounding; the case ends there, and such ends are counted.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from oasiskv import _core
from reference.cases import Rows, Shape, core_config, integer_rows, real_rows, rope_tables
from reference.cuda import DTYPES, NAN, SMALL, needs_gpu

pytestmark = needs_gpu

OUTPUT = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}  # of a row's and head's largest output


class Lockstep:
    def __init__(self, s: Shape, dtype: str, seed: int, host: bool = True) -> None:
        self.s, self.dtype, self.rng = s, dtype, np.random.default_rng(seed)
        wanted = [tuple(int(self.rng.integers(*r, endpoint=True)) for r in (s.prompts, s.new_tokens)) for _ in range(s.requests)]
        cfg = core_config(s, wanted, seed)
        cos, sin = rope_tables(s, cfg.max_seq_len)
        self.cpu = _core.Core(cfg, cos.ctypes.data, sin.ctypes.data)
        cfg.backend, cfg.dtype = "cuda", dtype
        cfg.gather_shares = [_core.GatherShare(1 << 62, 4)]
        if not host:
            cfg.host_blocks = 0
        self.gpu = _core.Core(cfg, cos.ctypes.data, sin.ctypes.data)
        self.cfg, self.tokens, self.rows = cfg, {}, {}
        self.sparse_steps = self.preemptions = self.resumed_sparse = self.admitted = self.records = self.steps = 0
        self.last_step: dict[int, int] = {}
        self.parted = False  # by a tie on real inputs
        self.make_rows = Rows(self.rng, s, cfg.max_seq_len)
        self.coming = [(i, *lengths) for i, lengths in enumerate(wanted)]
        while self.coming and not s.prefixes:  # else one after another: what the first leave the others find
            self.submit()

    def submit(self) -> None:
        i, prompt, new = self.coming.pop(0)
        self.rows[i], self.tokens[i] = self.rounded(self.make_rows(prompt + new)), [prompt, prompt + new]
        for core in (self.cpu, self.gpu):
            core.submit(i, prompt, new, self.make_rows.names(self.rows[i][:, :prompt]))

    def rounded(self, x: np.ndarray) -> np.ndarray:
        return torch.from_numpy(x).to(DTYPES[self.dtype]).float().numpy()

    def run(self) -> None:
        while (self.tokens or self.coming) and not self.parted:
            if self.coming and (not self.tokens or self.rng.random() < 0.1):
                self.submit()
            elif self.rng.random() < self.s.cancel:
                self.end(int(self.rng.choice(list(self.tokens))))
            else:
                self.step()
        for rid in list(self.tokens):
            self.end(rid)
        for core in (self.cpu, self.gpu):
            usage = core.usage()
            for pool in ("device_pages", "host_blocks", "summary_pages"):
                assert usage[pool + "_free"] == usage[pool]
        expected, got = ({n: u for n, u in core.usage().items() if n.startswith("prefix_")} for core in (self.cpu, self.gpu))
        assert expected == got
        self.reused, self.evicted = got["prefix_blocks_reused"], got["prefix_blocks_evicted"]

    def step(self) -> None:
        s, rng = self.s, self.rng
        wanted = dict(self.cpu.begin_step())
        assert dict(self.gpu.begin_step()) == wanted
        drafts = {i: int(rng.integers(0, n, endpoint=True)) for i, n in wanted.items() if rng.random() < s.draft_chance}
        groups = self.cpu.plan(drafts)
        same = [(g.id, g.kind, g.start, g.rows, g.drafts, g.logits_rows) for g in self.gpu.plan(drafts)]
        assert same == [(g.id, g.kind, g.start, g.rows, g.drafts, g.logits_rows) for g in groups]
        if not groups:
            return
        new, parts = {}, []
        self.steps += 1
        for g in groups:
            self.resumed_sparse += g.kind == "sparse" and self.last_step[g.id] < self.steps - 1
            self.last_step[g.id] = self.steps
            rows = self.rows[g.id][:, g.start : g.start + g.rows].copy()
            if g.logits_rows:
                most = max(1, g.drafts) if s.accept and g.kind != "prefill" else 1
                new[g.id] = int(rng.integers(1, most, endpoint=True))
                if g.kind != "prefill" and new[g.id] < g.rows:  # rejected drafts
                    make = integer_rows if s.integer else real_rows
                    rows[:, new[g.id] :] = self.rounded(make(rng, s, g.rows - new[g.id]))
            parts.append(rows)
        for layer in range(s.layers):
            qkv = np.ascontiguousarray(np.concatenate([p[layer] for p in parts]))
            expected = np.full((len(qkv), self.cfg.num_q_heads, s.dim), np.nan, np.float32)
            self.cpu.forward(layer, qkv.ctypes.data, expected.ctypes.data)
            given = torch.from_numpy(qkv).to("cuda", DTYPES[self.dtype])
            got = torch.full(expected.shape, NAN, dtype=DTYPES[self.dtype], device="cuda")
            torch.cuda.synchronize()
            self.gpu.forward(layer, given.data_ptr(), got.data_ptr())
            self.gpu.drain()
            error = np.abs(got.float().cpu().numpy() - expected).max(-1) / np.abs(expected).max(-1).clip(1e-3)
            assert error.max() <= OUTPUT[self.dtype], (layer, [(g.id, g.kind) for g in groups], error.max())
        for core in (self.cpu, self.gpu):
            core.commit(new)
        self.compare_traces()
        for rid, n in new.items():
            self.tokens[rid][0] += n
            if self.tokens[rid][0] >= self.tokens[rid][1]:
                self.end(rid)

    def compare_traces(self) -> None:
        key = lambda r: (r["step"], r["id"], r["layer"], r["head"])  # noqa: E731
        expected, got = ({key(r): r for r in core.take_trace()} for core in (self.cpu, self.gpu))
        assert expected.keys() == got.keys()
        for k, e in expected.items():
            g = got[k]
            assert e["first"] == g["first"]
            if e["first"]:
                same = sorted(e["predicted"]) == g["predicted"]
            else:
                same = e["map"] == g["map"] and e["last_selected"] == g["last_selected"]
                self.sparse_steps += 1
                self.admitted += len(e["admitted"])
            self.records += 1
            if not same:
                assert not self.s.integer, (k, e, g)
                self.parted = True

    def end(self, rid: int) -> None:
        del self.tokens[rid]
        expected, got = self.cpu.stats(rid), self.gpu.stats(rid)
        bytes_each = {"float32": 1, "float16": 2, "bfloat16": 2}[self.dtype]
        got["bytes_fetched"] *= bytes_each
        self.preemptions += got["preemptions"]
        for name in expected.keys() - {"stall_ms"}:
            assert expected[name] == got[name] or self.parted, name
        for core in (self.cpu, self.gpu):
            assert core.end(rid, self.make_rows.names(self.rows[rid])) and not core.end(rid)


def random_shape(rng: random.Random, **fixed: object) -> Shape:
    values = {
        "layers": rng.choice([1, 2, 5]), "heads": rng.choice([1, 2]), "group": rng.choice([1, 3, 4]), "dim": rng.choice([64, 128]),
        "top_k": rng.choice([2, 4, 9]), "drafts": rng.choice([0, 1, 3]), "sinks": rng.choice([0, 1]),
        "summary": rng.choice(["mean_std", "minmax", "halves"]), "combine": rng.choice(["max", "sum"]),
        "sparse_from": rng.choice([16, 32] if SMALL else [16, 64, 150]), "requests": 2 if SMALL else rng.choice([1, 2, 5]),
        "prompts": (20, 60) if SMALL else (1, 300), "new_tokens": (8, 24) if SMALL else (1, 90),
        "max_num_tokens": rng.choice([32, 64, 400]), "accept": rng.random() < 0.5,
    } | fixed  # fmt: skip
    return Shape(**{"cap": rng.randrange(1, values["top_k"] + 1), **values})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_integers_match_exactly(dtype: str) -> None:
    rng = random.Random(dtype)
    cases = [Lockstep(random_shape(rng), dtype, seed) for seed in range(3 if SMALL else 8)]
    for case in cases:
        case.run()
    assert sum(c.records for c in cases) > (20 if SMALL else 50)
    assert SMALL or sum(c.sparse_steps for c in cases) > 500
    assert SMALL or sum(c.admitted for c in cases) > 100


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_preemption_and_cancels(dtype: str) -> None:
    rng = random.Random(dtype + "tight")
    cases = [
        Lockstep(
            random_shape(
                rng,
                spare_pages=i % 4,
                requests=5,
                prompts=(20, 100),
                new_tokens=(60, 150),
                top_k=9,
                sparse_from=32 if i % 2 else 200,
                cancel=0.005,
            ),
            dtype,
            100 + i,
        )
        for i in range(2 if SMALL else 8)
    ]
    for case in cases:
        case.run()
    assert SMALL or sum(c.preemptions for c in cases) > 10
    assert SMALL or sum(c.resumed_sparse for c in cases) > 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_requests_that_begin_alike(dtype: str) -> None:
    """Blocks come back from the host into pages and summaries; tiny pools evict, preempt and cancel meanwhile."""
    rng = random.Random(dtype + "alike")
    cases = [
        Lockstep(
            random_shape(
                rng, prefixes=2, requests=3 if SMALL else 9, prompts=(20, 60) if SMALL else (20, 250), sparse_from=rng.choice([32, 100]),
                spare_blocks=25, spare_pages=None if i % 4 == 0 else 1, cancel=0.01, new_tokens=(8, 24) if SMALL else (30, 120),
            ),
            dtype,
            500 + i,
        )
        for i in range(2 if SMALL else 8)
    ]  # fmt: skip
    for case in cases:
        case.run()
    assert SMALL or min(sum(c.reused for c in cases), sum(c.evicted for c in cases)) > 30
    assert SMALL or (sum(c.sparse_steps for c in cases) > 300 and sum(c.admitted for c in cases) > 50)


def test_dense_requests_that_begin_alike() -> None:
    """Without summaries."""
    rng = random.Random(8)
    cases = [
        Lockstep(random_shape(rng, prefixes=2, requests=5, sparse=False, drafts=0, accept=False), "bfloat16", 600 + i) for i in range(2)
    ]
    for case in cases:
        case.run()
    assert SMALL or sum(c.reused for c in cases) > 5


def test_long_draft_rows() -> None:
    """15 of them: a step's last row may reach the second block after one that settles in it."""
    rng = random.Random(7)
    cases = []
    for seed in range(2 if SMALL else 6):
        shape = random_shape(
            rng, drafts=15, accept=True, sparse_from=32, top_k=4, max_num_tokens=128, new_tokens=(60, 120), prompts=(20, 100)
        )
        cases.append(Lockstep(shape, "bfloat16", 400 + seed))
        cases[-1].run()
    assert SMALL or sum(c.sparse_steps for c in cases) > 100


def test_real_inputs_part_only_at_ties() -> None:
    rng = random.Random(5)
    cases = []
    for seed in range(2 if SMALL else 8):
        case = Lockstep(random_shape(rng, integer=False, combine="softmax_sum", summary="mean_std"), "float32", 200 + seed)
        case.run()
        cases.append(case)
    assert sum(c.parted for c in cases) <= 1  # scores at a border within some 1e-6 of each other
    assert SMALL or sum(c.sparse_steps for c in cases) > 300


def test_dense_without_a_host_tier() -> None:
    rng = random.Random(6)
    for seed in range(3):
        shape = random_shape(rng, sparse=False, drafts=0, accept=False)
        Lockstep(shape, "bfloat16", 300 + seed, host=False).run()
