"""The CUDA operations on tokens against plain indexing, NgramDrafter and Sampler's draw."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
import torch

from oasiskv import _core
from oasiskv.draft import DraftRequest
from oasiskv.draft.ngram import NgramDrafter
from oasiskv.engine.sampler import draw
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.token_table import TokenTable
from reference.cuda import DTYPES, NAN, SMALL, ints, needs_gpu, stream

pytestmark = needs_gpu

LOWEST = float(np.finfo(np.float32).min)
WIDE = 20_001 if SMALL else 151_936  # several parts of a row for the greedy kernel


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("dim", [8, 576, 4096])
def test_embed_and_take_rows(dtype: str, dim: int) -> None:
    rng = random.Random(dim)
    torch.manual_seed(dim)
    vocab, requests, stride, count = 50, 5, 37, 33
    embedding = torch.randn(vocab, dim, device="cuda").to(DTYPES[dtype])
    table = TokenTable(requests, stride)
    table.tokens.copy_(torch.randint(vocab, table.tokens.shape))
    table.drafts.copy_(torch.randint(vocab, table.drafts.shape))
    rows = [(rng.randrange(stride), 0, -1, rng.randrange(requests), max(0, rng.randrange(-16, 17))) for _ in range(count)]
    rows[3] = rows[count - 1] = (-1, 0, -1, 0, 0)
    x = torch.full((count + 1, dim), NAN, dtype=DTYPES[dtype], device="cuda")
    row_bytes, keep = dim * x.element_size(), ints(rows)
    _core.cuda.embed(keep.data_ptr(), count, table.tables, embedding.data_ptr(), x.data_ptr(), row_bytes, stream())
    torch.cuda.synchronize()
    tokens, drafts = table.tokens.tolist(), table.drafts.tolist()
    for i, (position, _, _, request, draft) in enumerate(rows):
        if position < 0:
            assert (x[i] == 0).all()
        else:
            assert torch.equal(x[i], embedding[drafts[request][draft - 1] if draft else tokens[request][position]])
    assert torch.isnan(x[count]).all()

    taken = [(i, 0, 0) for i in (7, 0, -1, 32, 7, -1)]
    y = torch.full((len(taken) + 1, dim), NAN, dtype=DTYPES[dtype], device="cuda")
    keep = ints(taken)
    _core.cuda.take_rows(keep.data_ptr(), len(taken), x.data_ptr(), y.data_ptr(), row_bytes, stream())
    torch.cuda.synchronize()
    for i, (row, _, _) in enumerate(taken):
        assert torch.equal(y[i], x[row] if row >= 0 else torch.zeros_like(y[i]))
    assert torch.isnan(y[len(taken)]).all()


def test_admit() -> None:
    table = TokenTable(3, 10, max_logits=5)
    table.tokens.fill_(-1)
    table.draft_counts.fill_(9)
    params = SamplingParams(temperature=0.7, top_p=0.9, min_p=0.1, top_k=40, seed=2**64 - 1)
    prompt = [5, 6, 7]
    table.admit(2, prompt, params)
    prompt[:] = [8, 8, 8]  # what was admitted is a copy
    table.admit(0, list(range(10)))
    assert table.tokens.tolist() == [[*range(10), -1, -1], [-1] * 12, [5, 6, 7, *[-1] * 9]]
    assert table.lengths.tolist() == [10, 0, 3] and table.draft_counts.tolist() == [0, 9, 0]
    fields = np.dtype([("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("top_k", "<i4"), ("seed", "<u8")])
    assert fields.itemsize == _core.cuda.sampling_bytes == table.sampling.shape[1]
    sampling = table.sampling.cpu().numpy().view(fields)[:, 0]
    assert sampling[2] == np.array((0.7, 0.9, 0.1, 40, 2**64 - 1), dtype=fields)
    assert sampling[0]["temperature"] == 0
    for row, prompt in ((3, [1]), (-1, [1]), (0, []), (0, [1] * 13)):
        with pytest.raises(ValueError):
            table.admit(row, prompt)
    assert table.result_ptr(4) == table.result_ptr(6) != table.result_ptr(5)


class Sampled:
    """Rows of logits through one of the samplers: row i of the logits is request `requests[i]`'s at `positions[i]`; -1: padding."""

    def __init__(self, logits: np.ndarray, requests: list[int], positions: list[int], params: list[SamplingParams] | None = None) -> None:
        self.count, self.vocab = logits.shape
        self._logits = torch.from_numpy(logits).cuda()
        self._requests, self._positions = requests, positions
        self._rows = ints([(-1 if r < 0 else i, r, p) for i, (r, p) in enumerate(zip(requests, positions, strict=True))])
        self.table = TokenTable(self.count, max(positions) + 2)
        self._random = params is not None
        if params is not None:
            for request, p in enumerate(params):
                self.table.admit(request, [0], p)
        self._clear()

    def _clear(self) -> None:
        for tensor in (self.table.tokens, self.table.lengths, self.table.results):
            tensor.fill_(-5)

    def check(self, expected: list[int]) -> None:
        """Twice: the first call leaves its counters as it found them."""
        for step in range(2):
            arguments = (self._logits.data_ptr(), self.vocab, self._rows.data_ptr(), self.count, self.table.tables)
            rest = (self.table.work.data_ptr(), self.table.result_ptr(step), stream())
            if self._random:
                _core.cuda.sample_random(*arguments, self.table.sampling.data_ptr(), *rest)
            else:
                _core.cuda.sample_greedy(*arguments, *rest)
            torch.cuda.synchronize()
            assert self.table.result(step, self.count) == [-5 if r < 0 else e for r, e in zip(self._requests, expected, strict=True)]
            tokens, lengths = torch.full_like(self.table.tokens, -5), torch.full_like(self.table.lengths, -5)
            for request, position, token in zip(self._requests, self._positions, expected, strict=True):
                if request >= 0 and token >= 0:
                    tokens[request, position + 1] = token
                    lengths[request] = position + 2
            assert torch.equal(self.table.tokens, tokens) and torch.equal(self.table.lengths, lengths)
            assert not self.table.work.any()
            self._clear()


@pytest.mark.parametrize("vocab", [1, 3, 4, 1000, 8191, 8192, 8196, WIDE, WIDE + 1])
@pytest.mark.parametrize("sampler", ["greedy", "random"])  # the latter with every temperature 0
def test_greedy(vocab: int, sampler: str) -> None:
    rng = np.random.default_rng(vocab)
    n = 12
    logits = rng.standard_normal((n, vocab)).astype(np.float32)
    some = np.sort(rng.integers(vocab, size=(n, 4)), axis=1)
    logits[1, some[1]] = 50  # ties
    logits[2] = -7
    logits[3], logits[3, some[3, 0]] = -0.0, 0.0  # equal too
    logits[4] = LOWEST
    logits[5, vocab - 1] = -LOWEST
    for row, bad in ((6, np.nan), (7, np.inf), (8, -np.inf), (9, -np.nan)):
        logits[row, some[row, 1]] = bad
    requests = [int(r) for r in rng.permutation(n)]
    requests[10] = -1
    positions = [int(p) for p in rng.integers(0, 40, n)]
    expected = [int(logits[i].argmax()) if np.isfinite(logits[i]).all() else -1 for i in range(n)]
    assert expected[6:10] == [-1] * 4
    Sampled(logits, requests, positions, [SamplingParams()] * n if sampler == "random" else None).check(expected)


def in_float32(p: SamplingParams) -> SamplingParams:
    values = {name: float(np.float32(getattr(p, name))) for name in ("temperature", "top_p", "min_p")}
    return dataclasses.replace(p, **values)


def check_random(logits: np.ndarray, params: list[SamplingParams], seed: int) -> None:
    """Every request at a position of its own, against the CPU's sampler."""
    rng = np.random.default_rng(seed)
    n = len(params)
    params = [in_float32(dataclasses.replace(p, seed=int(rng.integers(2**64, dtype=np.uint64)))) for p in params]
    positions = [int(p) for p in rng.integers(0, 1000, n)]
    expected = []
    for x, p, position in zip(logits, params, positions, strict=True):
        x = x.astype(np.float64)
        expected.append(int(x.argmax()) if p.temperature == 0 else draw(x, p, position + 1))
    Sampled(logits, list(range(n)), positions, params).check(expected)


@pytest.mark.parametrize("vocab", [1, 2, 5, 100, 1000, 4099, WIDE])
@pytest.mark.parametrize("spread", [0.3, 3.0, 30.0])
def test_random(vocab: int, spread: float) -> None:
    rng = np.random.default_rng(vocab)
    choices = {
        "temperature": [0.3, 0.7, 1.0, 1.5, 4.0], "top_k": [0, 0, 1, 2, 17, 40, vocab, vocab + 1],
        "top_p": [1.0, 1.0, 0.01, 0.3, 0.9, 0.999], "min_p": [0.0, 0.0, 0.001, 0.05, 0.5],
    }  # fmt: skip
    n = 24
    params = [SamplingParams(**{name: rng.choice(values).item() for name, values in choices.items()}) for _ in range(n)]
    logits = (rng.standard_normal((n, vocab)) * spread).astype(np.float32)
    logits[n // 2 :] = logits[n // 2 :].round()  # many ties, at the cuts too
    check_random(logits, params, vocab + 1)


def test_random_borders() -> None:
    vocab = 256
    ids = np.arange(vocab)
    flat, steps = np.zeros(vocab), (ids % 4).astype(np.float64)
    huge = np.where(ids % 2, 3e38, -3e38)
    one = np.where(ids == 77, 200.0, 0.0)
    cases: list[tuple[np.ndarray, dict[str, float]]] = [
        (flat, {}), (flat, {"top_p": 0.5}), (flat, {"top_p": 0.25, "top_k": 64}), (flat, {"min_p": 1.0}), (flat, {"top_k": 5}),
        (-flat, {"top_k": 255}), (steps, {"min_p": 1.0}), (steps, {"top_k": 65}), (steps, {"top_k": 100, "top_p": 0.99}),
        (steps, {"top_p": 1e-6}), (steps, {"top_k": 1, "min_p": 1.0, "top_p": 1e-6}), (huge, {}), (huge, {"temperature": 1e38}),
        (huge, {"top_k": 200}), (one, {}), (one, {"temperature": 1e-38}), (one, {"temperature": 1e38}), (steps, {"temperature": 1e-38}),
        (one, {"top_k": 3}), (one, {"temperature": 0.0, "top_k": 3}), (-steps, {"min_p": 1e-30, "top_p": 0.75}),
    ]  # fmt: skip
    for seed in range(1 if SMALL else 8):
        logits = np.stack([x for x, _ in cases]).astype(np.float32)
        check_random(logits, [SamplingParams(**{"temperature": 1.0, **fields}) for _, fields in cases], seed)


def test_random_draws_by_position_and_seed() -> None:
    """Flat logits: the token says which uniform number was drawn."""
    n, vocab = 20 if SMALL else 300, 4096
    rng = np.random.default_rng(3)
    params = [SamplingParams(temperature=1.0, seed=s) for s in (0, 1, 2**64 - 1, *map(int, rng.integers(2**63, size=n - 3)))]
    positions = [int(p) for p in rng.integers(0, 5000, n)]
    expected = [int(_core.philox_uniform(p.seed, i + 1) * vocab) for p, i in zip(params, positions, strict=True)]
    Sampled(np.zeros((n, vocab), dtype=np.float32), list(range(n)), positions, params).check(expected)


def test_random_with_padding_and_bad_rows() -> None:
    rng = np.random.default_rng(8)
    logits = rng.standard_normal((6, 501)).astype(np.float32)
    logits[1, 500], logits[2, 3], logits[4, 100] = np.nan, np.inf, -np.inf
    params = [SamplingParams(temperature=t) for t in (1.0, 0.5, 0.5, 1.0, 0.0, 0.0)]
    positions = [4, 5, 6, 7, 8, 9]
    expected = [draw(logits[0].astype(np.float64), params[0], 5), -1, -1, 0, -1, int(logits[5].argmax())]
    Sampled(logits, [0, 1, 2, -1, 4, 5], positions, params).check(expected)


@pytest.mark.parametrize("alphabet", [1, 2, 3, 5, 50])
def test_propose_ngram(alphabet: int) -> None:
    rng = random.Random(alphabet)
    longest = 300 if SMALL else 20_000  # beyond what a CTA reads at once
    lengths = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 40, 100, longest - 1, longest]
    lengths += [rng.randrange(1, 60) for _ in range(30)]
    requests = len(lengths)
    table = TokenTable(requests + 1, longest)
    # Beyond its length a row holds tokens that would match.
    tokens = [[rng.randrange(alphabet) for _ in range(table.stride)] for _ in range(requests + 1)]
    table.tokens.copy_(torch.tensor(tokens))
    table.lengths.copy_(torch.tensor([*lengths, 5]))
    order = rng.sample(range(requests), requests)
    order[7:7] = [-1, -1]
    keep = ints(order)
    for count in (1, 3, 16):
        table.drafts.fill_(-7)
        table.draft_counts.fill_(-7)
        _core.cuda.propose_ngram(keep.data_ptr(), len(order), table.tables, count, stream())
        torch.cuda.synchronize()
        drafts, counts = table.drafts.tolist(), table.draft_counts.tolist()
        for r, length in enumerate(lengths):
            guess = NgramDrafter().propose([DraftRequest(0, tokens[r][:length], count)])[0] if length else []
            assert counts[r] == len(guess)
            assert drafts[r] == guess + [-7] * (16 - len(guess))
        assert counts[requests] == -7 and drafts[requests] == [-7] * 16


def test_what_no_kernel_has_is_refused() -> None:
    table = TokenTable(1, 4)
    with pytest.raises(ValueError, match="embed: row_bytes = 6"):
        _core.cuda.embed(0, 1, table.tables, 0, 0, 6, 0)
    with pytest.raises(ValueError, match="take_rows: row_bytes = 20"):
        _core.cuda.take_rows(0, 1, 0, 0, 20, 0)
    with pytest.raises(ValueError, match="propose_ngram: count = 17"):
        _core.cuda.propose_ngram(0, 1, table.tables, 17, 0)
    with pytest.raises(ValueError, match="sample: vocab = 524289"):
        _core.cuda.sample_greedy(0, 524289, 0, 1, table.tables, 0, 0, 0)
