"""The prefix cache of the core: against the oracle of decoding, whatever is reused, evicted, preempted and cancelled; and its registry
against a model in plain Python.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv import _core
from reference.cases import Shape, core_config, rope_tables
from reference.lookahead import BLOCK
from test_core_oracle import run_cases

ALIKE = {"prefixes": 2, "requests": 7, "prompts": (20, 150), "new_tokens": (1, 60)}


@pytest.mark.parametrize("integer", [True, False], ids=["integer", "real"])
def test_requests_that_begin_alike_match_the_oracle(integer: bool) -> None:
    t = run_cases(range(600, 616), integer=integer, spare_blocks=14, **ALIKE)
    assert t.reused_blocks > 50 and t.sparse_steps > 200 and t.admitted > 50, t
    assert t.ties <= 2 + t.records // 500, t


def test_tiny_pools_evict_preempt_and_cancel() -> None:
    t = run_cases(range(700, 724), spare_blocks=4, spare_pages=2, cancel=0.03, layers=2, heads=1, **ALIKE)
    assert min(t.reused_blocks, t.evicted_blocks) > 50 and t.preemptions > 3 and t.sparse_steps > 200, t


def test_dense_requests_reuse_too() -> None:
    t = run_cases(range(800, 806), sparse=False, drafts=0, accept=False, spare_blocks=8, **ALIKE)
    assert t.reused_blocks > 20, t


# ---------------------------------------------------------------- the registry

LAYERS, MOST_BLOCKS, HOST_BLOCKS, MOST_REQUESTS = 2, 6, 9, 8  # blocks: of a request, of the pool
Name = tuple[int, ...]  # a letter a block, of all up to it


def encoded(names: list[Name]) -> bytes:
    return b"".join(hashlib.blake2b(bytes(name), digest_size=16).digest() for name in names)


@dataclass
class Kept:
    users: int = 1


@dataclass
class Live:
    letters: Name  # one for each block that it may complete
    prompt: int
    max_new: int
    cached: bool
    committed: int = 0
    settled: int = 0
    reused: int = 0
    kept: dict[int, Kept] = field(default_factory=dict)  # by block

    @property
    def blocks(self) -> int:
        return -(-(self.prompt + self.max_new) // BLOCK)

    def names(self, tokens: int) -> list[Name]:
        return [self.letters[: b + 1] for b in range(tokens // BLOCK)] if self.cached else []

    def all_names(self) -> list[Name]:
        return self.names(self.prompt + self.max_new)


class Model:
    """What the host pool must hold, in blocks."""

    def __init__(self) -> None:
        self.free, self.evicted, self.reused, self.touched = HOST_BLOCKS, 0, 0, 0
        self.named: dict[Name, Kept] = {}
        self.unused: OrderedDict[Name, Kept] = OrderedDict()  # in the order in which they go

    def available(self) -> int:
        return self.free + len(self.unused)

    def admit(self, r: Live) -> bool:
        run = list(itertools.takewhile(self.named.__contains__, r.names(r.prompt)[: (r.prompt - 1) // BLOCK]))
        need = r.blocks - len(run)
        if self.available() - sum(name in self.unused for name in run) < need:
            return False
        for b, name in enumerate(run):
            self.unused.pop(name, None)
            r.kept[b] = self.named[name]
            r.kept[b].users += 1
        while self.free < need:
            self.evict()
        self.free -= need
        self.reused += len(run)
        r.reused = r.settled = len(run)
        r.committed = len(run) * BLOCK
        return True

    def evict(self) -> None:
        name, _ = self.unused.popitem(last=False)
        assert not any(other[:-1] == name for other in self.unused), "a parent goes before its child"
        del self.named[name]
        self.free += 1
        self.evicted += 1

    def keep(self, r: Live, names: list[Name], begin: int, end: int) -> None:
        for b in range(begin, min(end, len(names))):
            if b not in r.kept and names[b] not in self.named:
                r.kept[b] = self.named[names[b]] = Kept()

    def forget(self, r: Live) -> None:
        for b, kept in r.kept.items():
            if self.named.get(r.letters[: b + 1]) is kept:
                del self.named[r.letters[: b + 1]]

    def end(self, r: Live, names: list[Name]) -> None:
        self.keep(r, names, 0, r.committed // BLOCK)
        for b in reversed(range(r.blocks)):
            name, kept = r.letters[: b + 1], r.kept.get(b)
            if kept:
                kept.users -= 1
            if kept and kept.users == 0 and self.named.get(name) is kept:
                self.unused[name] = kept
            elif not kept or kept.users == 0:
                self.free += 1
            if b < len(names) and name in self.unused:
                self.touched += self.unused[name] is not kept
                self.unused.move_to_end(name)


class Registry:
    """One core and the model, of the same requests."""

    def __init__(self) -> None:
        shape = Shape(layers=LAYERS, dim=64, sparse=False, drafts=0, accept=False, requests=MOST_REQUESTS, max_num_tokens=40)
        cfg = core_config(shape, [(MOST_BLOCKS * BLOCK - 1, 1)] * MOST_REQUESTS, 0)
        cfg.host_blocks, cfg.trace = HOST_BLOCKS * LAYERS, False
        self.tables = rope_tables(shape, cfg.max_seq_len)
        self.core = _core.Core(cfg, *(t.ctypes.data for t in self.tables))
        self.model, self.next = Model(), 1
        self.waiting: dict[int, Live] = {}
        self.running: dict[int, Live] = {}

    def submit(self, letters: Name, prompt: int, max_new: int, cached: bool) -> None:
        if len(self.waiting) + len(self.running) == MOST_REQUESTS:
            return
        r = self.waiting[self.next] = Live(letters, prompt, min(max_new, MOST_BLOCKS * BLOCK - prompt), cached)
        self.core.submit(self.next, r.prompt, r.max_new, encoded(r.names(r.prompt)))
        self.next += 1

    def step(self) -> None:
        self.core.begin_step()
        groups = self.core.plan({})
        for i in list(self.waiting):
            if not self.model.admit(self.waiting[i]):
                break
            self.running[i] = self.waiting.pop(i)
        if groups:
            rows = sum(g.rows for g in groups)
            qkv, out = np.zeros((rows, 3 * 64), np.float32), np.zeros((rows, 64), np.float32)
            for layer in range(LAYERS):
                self.core.forward(layer, qkv.ctypes.data, out.ctypes.data)
            self.core.commit({g.id: 1 for g in groups if g.logits_rows})
        for g in groups:
            r = self.running[g.id]
            assert g.start == r.committed
            complete = r.committed // BLOCK
            self.model.keep(r, r.names(r.prompt), r.settled, complete)
            r.settled, r.committed = complete, r.committed + g.rows
        self.check()

    def end(self, which: int, forget: bool = False) -> None:
        live = sorted(self.waiting | self.running)
        if not live:
            return
        i = live[which % len(live)]
        r = (self.waiting | self.running)[i]
        names = [] if forget else r.all_names()
        if forget:
            self.core.forget(i)
            self.model.forget(r)
        assert self.core.end(i, encoded(names))
        if self.waiting.pop(i, None) is None:
            del self.running[i]
            self.model.end(r, names)
        self.check()

    def end_all(self) -> None:
        while self.waiting or self.running:
            self.end(0)

    def check(self) -> None:
        usage, model = self.core.usage(), self.model
        assert usage["waiting"] == len(self.waiting)
        assert usage["host_blocks_free"] == model.available() * LAYERS
        assert usage["prefix_blocks_cached"] == len(model.named)
        assert (usage["prefix_blocks_reused"], usage["prefix_blocks_evicted"]) == (model.reused, model.evicted)
        for i, r in self.running.items():
            stats = self.core.stats(i)
            assert (stats["kv_blocks_reused"], stats["kv_blocks_total"]) == (r.reused, -(-r.committed // BLOCK))


LETTERS = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=MOST_BLOCKS, max_size=MOST_BLOCKS).map(tuple)
PROMPTS = st.integers(1, 5).flatmap(lambda blocks: st.sampled_from([16 * blocks, 16 * blocks - 15, 16 * blocks + 9]))
SUBMITS = st.tuples(st.just("submit"), LETTERS, PROMPTS, st.integers(1, 40), st.integers(0, 9).map(bool))
STEPS = st.tuples(st.just("step"), st.integers(1, 20))
ENDS = st.tuples(st.just("end"), st.integers(0, MOST_REQUESTS - 1), st.sampled_from([False] * 7 + [True]))


@settings(max_examples=250, deadline=None)
@given(st.lists(st.one_of(SUBMITS, SUBMITS, STEPS, STEPS, ENDS), min_size=8, max_size=80))
def test_the_registry_is_that_of_the_model(actions: list[tuple]) -> None:
    r = Registry()
    for what, *args in actions:
        if what == "step":
            for _ in range(args[0]):
                r.step()
        else:
            getattr(r, what)(*args)
    r.end_all()
    assert_whole(r)


def test_long_lives_of_the_registry() -> None:
    """Long enough for what is rare: blocks that two compute at once, of which one goes on without the other."""
    evicted = reused = touched = 0
    for seed in range(40):
        rng, r = random.Random(seed), Registry()
        for _ in range(250):
            if rng.random() < 0.4:
                letters = tuple(int(rng.random() < 0.2) for _ in range(MOST_BLOCKS))
                r.submit(letters, rng.randint(1, 5 * BLOCK), rng.randint(1, 40), cached=rng.random() < 0.95)
            elif rng.random() < 0.5:
                r.end(rng.randrange(MOST_REQUESTS), forget=rng.random() < 0.1)
            for _ in range(rng.randint(0, 6)):
                r.step()
        evicted, reused, touched = evicted + r.model.evicted, reused + r.model.reused, touched + r.model.touched
        r.end_all()
        assert_whole(r)
    assert min(evicted, reused) > 1000 and touched > 20, (evicted, reused, touched)


def assert_whole(r: Registry) -> None:
    """Nothing is lost: requests can have the whole pool, whatever was cached."""
    for blocks in (MOST_BLOCKS, HOST_BLOCKS - MOST_BLOCKS):
        r.submit((1,) * MOST_BLOCKS, 1, blocks * BLOCK - 1, cached=False)
    r.step()
    usage = r.core.usage()
    assert usage["host_blocks_free"] == usage["prefix_blocks_cached"] == 0
    r.end_all()
    assert r.core.usage()["host_blocks_free"] == HOST_BLOCKS * LAYERS


def test_names_that_cannot_be_are_refused() -> None:
    core = Registry().core
    with pytest.raises(ValueError, match="names of 15 bytes: must be 16 bytes each"):
        core.submit(1, 100, 1, bytes(15))
    with pytest.raises(ValueError, match="2 names for a prompt of 31 tokens"):
        core.submit(1, 31, 1, bytes(32))
    core.submit(1, 32, 1, bytes(32))
