"""The sampler against slow references: one in plain Python, and one in numpy (reference/sampler.py) for vocabularies of every size."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oasiskv import _core
from oasiskv.engine import candidates, sampler
from oasiskv.engine.sampler import Sampled, Sampler, SampleRow, Unsampled
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import Sequence
from oasiskv.errors import RequestError
from reference import sampler as slow

VOCAB = 12
EOS = 3


def reference(logits: list[float], row: SampleRow) -> tuple[int, list[float]] | None:
    """(token, log-probabilities after penalties and masks) of one row, in plain Python; None where every token is masked."""
    p, x = row.params, [float(v) for v in logits]
    for t, bias in p.logit_bias:
        x[t] += bias
    output_ids = row.token_ids[row.prompt_tokens :]
    for t in set(row.token_ids):
        x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
    for t in set(output_ids):
        x[t] -= p.presence_penalty + p.frequency_penalty * output_ids.count(t)
    if len(output_ids) < p.min_tokens:
        for t in {EOS, *p.stop_token_ids}:
            x[t] = -math.inf
    for *before, last in p.bad_words:
        if row.token_ids[len(row.token_ids) - len(before) :] == before:
            x[last] = -math.inf
    peak = max(x)
    if peak == -math.inf:
        return None
    norm = peak + math.log(sum(math.exp(v - peak) for v in x))
    logprobs = [v - norm for v in x]
    if p.temperature == 0:
        return min(range(VOCAB), key=lambda t: (-x[t], t)), logprobs
    ranked = sorted(range(VOCAB), key=lambda t: (-x[t], t))
    if p.top_k:
        ranked = ranked[: p.top_k]
    weights = [math.exp((x[t] - peak) / p.temperature) for t in ranked]
    probs = [w / sum(weights) for w in weights]
    kept, mass = [], 0.0
    for t, q in zip(ranked, probs, strict=True):
        if kept and (mass >= p.top_p or q < p.min_p * probs[0]):
            break
        kept.append((t, q))
        mass += q
    uniform = np.random.Generator(np.random.Philox(key=p.seed, counter=len(row.token_ids))).random() * sum(q for _, q in kept)
    below = 0.0
    for t, q in kept:
        below += q
        if uniform < below:
            return t, logprobs
    return kept[-1][0], logprobs


tokens = st.integers(0, VOCAB - 1)
ids = st.lists(tokens, max_size=6)
bad_words = st.lists(st.lists(tokens, min_size=1, max_size=3).map(tuple), max_size=40).map(tuple)
logit_rows = st.lists(st.sampled_from([-4.0, -1.5, -0.25, 0.0, 0.5, 1.0, 1.0, 2.75, 6.0]), min_size=VOCAB, max_size=VOCAB)


@st.composite
def rows(draw):
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        top_k=draw(st.sampled_from([0, 1, 3, 50])),
        top_p=draw(st.sampled_from([1.0, 0.83, 0.31])),
        min_p=draw(st.sampled_from([0.0, 0.07, 1.0])),
        seed=draw(st.sampled_from([0, 1, 2**64 - 1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.7, 0.6])),
        presence_penalty=draw(st.sampled_from([0.0, 0.9, -1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.4])),
        stop_token_ids=draw(st.sampled_from([(), (5,)])),
        min_tokens=draw(st.sampled_from([0, 4])),
        logprobs=draw(st.sampled_from([None, 0, 4])),
        bad_words=draw(st.sampled_from([(), tuple((t,) for t in range(VOCAB)), tuple((t,) for t in range(9))]) | bad_words),
        logit_bias=draw(st.just(()) | st.lists(st.tuples(tokens, st.sampled_from([-3e38, -7.5, 0.0, 2.5, 40])), unique_by=lambda p: p[0])),
    )
    prompt, output = draw(ids), draw(ids)
    return SampleRow(params, prompt + output, len(prompt))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(logit_rows, rows()), min_size=1, max_size=4))
def test_matches_reference_in_any_batch(batch):
    sampled = Sampler([EOS]).sample(torch.tensor([x for x, _ in batch]), [r for _, r in batch])
    for (x, row), got in zip(batch, sampled, strict=True):
        expected = reference(x, row)
        if expected is None:
            assert isinstance(got, Unsampled) and "no token" in got.error
            continue
        token, logprobs = expected
        assert got.token_id == token
        if row.params.logprobs is None:
            assert got.logprob is None
            continue
        assert got.logprob == pytest.approx(logprobs[token], abs=1e-9)
        best = [t for t in sorted(range(VOCAB), key=lambda t: (-logprobs[t], t)) if logprobs[t] > -math.inf][: row.params.logprobs]
        assert [t for t, _ in got.top_logprobs] == best
        assert [q for _, q in got.top_logprobs] == pytest.approx([logprobs[t] for t in best], abs=1e-9)


def test_lowest_id_wins_a_tie():
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0] + [0.0] * 8])
    for params in (SamplingParams(), SamplingParams(logprobs=1), SamplingParams(temperature=1.0, top_k=1)):
        assert Sampler([]).sample(logits, [SampleRow(params, [0], 1)])[0].token_id == 1


def test_a_row_that_cannot_be_sampled_leaves_the_others_alone() -> None:
    """Whether nothing may come or something unforeseen happens."""
    good, none = SamplingParams(logprobs=1), SamplingParams(bad_words=tuple((t,) for t in range(VOCAB)))
    beyond = SamplingParams(logit_bias=((VOCAB, 1.0),))  # Engine.check refuses it
    rows = [SampleRow(p, [1, 2], 1) for p in (good, none, beyond, good)]
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1))
    got = Sampler([EOS]).sample(logits, rows)
    assert [got[0], got[3]] == [Sampler([EOS]).sample(logits[i : i + 1], rows[i : i + 1])[0] for i in (0, 3)]
    assert "no token can be sampled" in got[1].error and "IndexError" in got[2].error


@pytest.mark.parametrize(
    ("options", "named"),
    [({"bad_words": [[]]}, "bad_words"), ({"bad_words": [[-1]]}, "bad_words"), ({"bad_words": [1]}, "bad_words"),
     ({"bad_words": [[1]] * 1025}, "bad_words"), ({"bad_words": [[1] * 65]}, "bad_words"), ({"bad_words": "x"}, "bad_words"),
     ({"logit_bias": {1: 2.0}}, "logit_bias"), ({"logit_bias": [[1, math.nan]]}, "logit_bias"), ({"logit_bias": [[1, 1e39]]}, "logit_bias"),
     ({"logit_bias": [[1, 1], [1, 2]]}, "logit_bias"), ({"logit_bias": [["1", 1]]}, "logit_bias"), ({"logit_bias": [[1]]}, "logit_bias")],
)  # fmt: skip
def test_what_sampling_refuses(options: dict, named: str) -> None:
    with pytest.raises(RequestError, match=named):
        SamplingParams(**options)


def test_frequencies_follow_the_distribution():
    probs = torch.tensor([0.5, 0.3, 0.15, 0.05])
    rows = [SampleRow(SamplingParams(temperature=1.0, seed=11), [0] * position, position) for position in range(4000)]
    sampled = Sampler([]).sample(probs.log().expand(4000, 4), rows)
    counts = np.bincount([s.token_id for s in sampled], minlength=4) / 4000
    assert np.abs(counts - probs.numpy()).max() < 0.03


def test_extremes_stay_finite():
    logits = torch.tensor([[80.0, -80.0, 79.0, 0.0]])
    for params in (
        SamplingParams(temperature=1e-320, logprobs=2),
        SamplingParams(temperature=1.0, repetition_penalty=1e-320, logprobs=2),
        SamplingParams(temperature=1e30, top_p=1e-9),
    ):
        got = Sampler([]).sample(logits, [SampleRow(params, [0, 1], 2)])[0]
        assert got.token_id == 0
        assert got.logprob is None or math.isfinite(got.logprob)


@settings(max_examples=500, deadline=None)
@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
@example(0, 0)
@example(2**64 - 1, 2**64 - 1)
def test_uniform_numbers_of_the_core_are_numpys(seed, position):
    expected = np.random.Generator(np.random.Philox(key=seed, counter=position)).random()
    assert _core.philox_uniform(seed, position) == expected


VOCABS = st.sampled_from([1, 2, 7, 16, 17, 64, 100, 129, 513, 1000, 2500, 5000, 20_000])
KINDS = {
    "normal": lambda rng, n: rng.standard_normal(n) * 4,
    "peaked": lambda rng, n: rng.standard_normal(n) + 20 * (rng.random(n) < 5 / n),
    "flat": lambda rng, n: rng.standard_normal(n) * 1e-3,
    "equal": lambda rng, n: np.full(n, -2.5),
    "few values": lambda rng, n: rng.integers(-3, 4, n) * 1.5,
    "signed zeros": lambda rng, n: np.where(rng.random(n) < 0.5, 0.0, -0.0),
    "ascending": lambda rng, n: np.sort(rng.standard_normal(n) * 4),
    "descending": lambda rng, n: -np.sort(rng.standard_normal(n) * 4),
    "waves": lambda rng, n: 9.0 * (np.arange(n) % 8 == 3) + rng.standard_normal(n),  # the best all in one column, if it has 8
    "huge": lambda rng, n: rng.choice([-3e38, 3e38, 1.0, -1.0], n),
    "tiny": lambda rng, n: rng.standard_normal(n) * 1e-38,
    "round to the same": lambda rng, n: np.where(rng.random(n) < 3 / n, 4.0, rng.standard_normal(n) * 10.0 ** rng.integers(-17, -13)),
}


@st.composite
def wide_rows(draw):
    """(logits float32 [vocab], row) of any size and form, with any parameters."""
    vocab, rng = draw(VOCABS), np.random.default_rng(draw(st.integers(0, 2**32)))
    logits = KINDS[draw(st.sampled_from(sorted(KINDS)))](rng, vocab).astype(np.float32)
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.0, 1e-320, 1e-5, 0.3, 0.8, 1.0, 2.5, 1e30, 1.7e308])),
        top_k=draw(st.sampled_from([0, 0, 0, 1, 5, 40, 300, vocab - 1, vocab, vocab + 1, 2**31 - 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1 - 1e-16, 0.999, 0.95, 0.5, 1e-3, 1e-300])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-300, 1e-3, 0.05, 0.5, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3, 0.7, 1e-320, 1e308])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, 0.9, -2.0])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, 0.4, -1.1])),
        stop_token_ids=tuple(rng.integers(vocab // 2, size=draw(st.sampled_from([0, 0, 5]))).tolist() if vocab > 2 else ()),
        min_tokens=draw(st.sampled_from([0, 0, 3, 50])),
        logprobs=draw(st.sampled_from([None, 0, 1, 5, 20])),
    )
    prompt, output = draw(st.sampled_from([1, 3, 50, 3000])), draw(st.sampled_from([0, 1, 2, 40]))
    token_ids = (np.minimum(rng.zipf(1.2, prompt + output), vocab) - 1).tolist()  # some often, some once
    if vocab > 2 and draw(st.booleans()):
        best, biased = int(logits.argmax()), rng.permutation(vocab)[:20].tolist()
        words = ((best,), (*token_ids[-3:], best), (*token_ids[-2:], biased[0]), (vocab - 1, best, biased[1]))
        pairs = tuple((t, float(rng.standard_normal() * 10)) for t in biased)
        params = dataclasses.replace(params, bad_words=words[draw(st.integers(0, 3)) :], logit_bias=pairs)
    return logits, SampleRow(params, token_ids, prompt)


@pytest.fixture(scope="module", params=[False, True], ids=["as it is", "in small rounds"])
def rounds(request: pytest.FixtureRequest) -> Iterator[None]:
    """In small rounds, few candidates do what takes thousands otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setattr(candidates, "_MIN_COLUMNS", 8)
            for name, value in (("_FIRST_CANDIDATES", 2), ("_GROWTH", 2), ("_PIECE", 16)):
                patch.setattr(sampler, name, value)
        yield


@settings(max_examples=1500, deadline=None)
@given(wide_rows())
def test_same_as_the_whole_vocabulary_in_order(rounds: None, case: tuple[np.ndarray, SampleRow]) -> None:
    logits, row = case
    p, eos_ids = row.params, [len(logits) - 1, 1_000_000] if len(logits) > 1 else []
    kept = logits.copy()
    got = Sampler(eos_ids).sample(torch.from_numpy(logits)[None], [row])[0]
    assert np.array_equal(logits, kept)
    x = slow.adjusted(logits, row, eos_ids)
    if x.max() == -np.inf:
        assert isinstance(got, Unsampled)
        return
    if p.temperature == 0:
        assert got.token_id == int(x.argmax())
    else:
        uniform = slow.philox(p, row)
        assert got.token_id == slow.token_at(x, p, uniform) or got.token_id in slow.beside_a_border(x, p, uniform)
    assert got == (Sampled(got.token_id) if p.logprobs is None else slow.logprobs_of(x, got.token_id, p.logprobs))


@pytest.mark.parametrize("vocab", [300, 9000, 60_000])
def test_no_token_of_real_valued_rows_differs(rounds: None, vocab: int) -> None:
    """No uniform number falls within rounding of a border here."""
    rng = np.random.default_rng(vocab)
    choices = {"temperature": [0.5, 0.8, 1.0, 2.0], "top_k": [0, 0, 0, 40], "top_p": [1.0, 1.0, 0.95, 0.4], "min_p": [0.0, 0.0, 0.02]}
    for i in range(150):
        p = SamplingParams(seed=i, **{name: rng.choice(values).item() for name, values in choices.items()})
        x = rng.standard_normal(vocab).astype(np.float32) * rng.choice([0.2, 1, 3, 5])
        row = SampleRow(p, [0] * int(rng.integers(1, 1000)), 1)
        got = Sampler([]).sample(torch.from_numpy(x)[None], [row])[0].token_id
        assert got == slow.token_at(x.astype(np.float64), p, slow.philox(p, row)), p


@pytest.mark.parametrize("vocab", [128, 130, 1000, 5000])
@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.5}, {"top_p": 127 / 128}, {"top_p": 1 - 2**-53}, {"min_p": 1.0}, {"top_k": 64}, {"top_k": 128}, {"top_k": 500}],
)
def test_borders(rounds: None, vocab: int, options: dict) -> None:
    """Where every sum is exact, so is every border: 128 tokens of the same probability, among others of none or of equal logits."""
    rng = np.random.default_rng(vocab)
    p = SamplingParams(temperature=1.0, **options)
    for others in (-1000.0, -np.inf):
        x = np.full(vocab, others)
        x[rng.permutation(vocab)[:128]] = 3.0
        order, cdf = slow.candidates(x, p)
        for border in {0.0, *cdf.tolist(), 0.3}:
            for uniform in (border / cdf[-1], np.nextafter(border / cdf[-1], 0), np.nextafter(border / cdf[-1], 1)):
                if uniform < 1:
                    assert sampler.token_at(x, p, uniform) == slow.pick(order, cdf, uniform)
        assert sampler.token_at(x, p, 0.0) == order[0]


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"min_p": 0.01}, {"top_k": 50}, {"top_p": 0.9, "top_k": 3000}])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.9])
def test_beside_borders(rounds: None, temperature: float, options: dict) -> None:
    """As near to a border as sums in another order allow, on either side, the token is the reference's."""
    rng, p = np.random.default_rng(int(temperature * 10)), SamplingParams(temperature=temperature, **options)
    for vocab in (600, 5000, 40_000):
        x = (rng.standard_normal(vocab) * 3).astype(np.float32)
        x64, near = x.astype(np.float64), slow.rounding(vocab)
        order, cdf = slow.candidates(x64, p)
        wide = np.flatnonzero(np.diff(cdf, prepend=0, append=1)[:-1] > 10 * near)
        for border in cdf[rng.choice(wide, 12)] / cdf[-1]:
            for uniform in (border * (1 - near), border * (1 + near)):
                if uniform < 1:
                    assert sampler.token_at(x, p, uniform) == sampler.token_at(x64, p, uniform) == slow.pick(order, cdf, uniform)


@pytest.mark.parametrize("n", [1, 2, 20, 64, 1000])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_best_ids(rounds: None, kind: str, n: int) -> None:
    for vocab in (1, 5, 63, 64, 65, 1003, 30_011):
        for dtype in (np.float32, np.float64):
            x = KINDS[kind](np.random.default_rng(vocab), vocab).astype(dtype)
            got, order = candidates.best_ids(x, n), np.argsort(-x, kind="stable")
            assert len(got) >= min(n, vocab) and np.array_equal(got, order[: len(got)])


@pytest.mark.parametrize("temperature", [1e-320, 0.7, 1.0, 1e30, 1.7e308])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_most_likely(rounds: None, kind: str, temperature: float) -> None:
    for vocab in (1, 5, 65, 1003, 9000):
        for dtype in (np.float32, np.float64):
            x = KINDS[kind](np.random.default_rng(vocab), vocab).astype(dtype)
            with np.errstate(over="ignore"):
                s = (x.astype(np.float64) - x.max()) / temperature
            order = np.argsort(-s, kind="stable")
            for n in (1, 2, 20, 64, 500):
                got, shifted = candidates.most_likely(x, n, float(x.max()), temperature)
                assert len(got) >= min(n, vocab) and np.array_equal(got, order[: len(got)])
                assert np.array_equal(shifted, s[got])


def test_few_candidates_are_sorted() -> None:
    """What makes it fast, by counts: times would not be told apart on a busy machine."""
    x = np.random.default_rng(1).standard_normal(150_000) * 3
    for n in (1, 20, 64, 512):
        assert len(candidates.best_ids(x, n)) < 1.2 * n + 4
        ids, _ = candidates.most_likely(x, n, x.max(), 0.8)
        assert len(ids) < 1.2 * n + 4


@settings(max_examples=200, deadline=None)
@given(ids, st.lists(ids, max_size=6), logit_rows)
def test_a_row_that_lasts_counts_what_was_taken_since(prompt: list[int], taken: list[list[int]], logits: list[float]) -> None:
    """Tokens come singly, as accepted drafts do several at a time, or not at all between two samplings."""
    params = SamplingParams(repetition_penalty=1.7, presence_penalty=0.9, frequency_penalty=0.4, logprobs=12)
    sequence = Sequence(1, prompt, params, None, frozenset(), 0)
    for tokens in [[], *taken]:
        for token in tokens:
            sequence.take(Sampled(token))
        x = torch.tensor([logits])
        fresh = SampleRow(params, prompt + sequence.token_ids[len(prompt) :], len(prompt))
        assert Sampler([]).sample(x, [sequence.row]) == Sampler([]).sample(x, [fresh])
