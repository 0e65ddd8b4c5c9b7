"""The sampler against a slow float64 reference that does one obvious thing at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oasiskv import _core
from oasiskv.engine.sampler import Sampler, SampleRow
from oasiskv.engine.sampling import SamplingParams

VOCAB = 12
EOS = 3


def reference(logits: list[float], row: SampleRow) -> tuple[int, list[float]]:
    """(token, log-probabilities after penalties) of one row, in plain Python."""
    p, x = row.params, [float(v) for v in logits]
    output_ids = row.token_ids[row.prompt_tokens :]
    for t in set(row.token_ids):
        x[t] = x[t] / p.repetition_penalty if x[t] > 0 else x[t] * p.repetition_penalty
    for t in set(output_ids):
        x[t] -= p.presence_penalty + p.frequency_penalty * output_ids.count(t)
    if len(output_ids) < p.min_tokens:
        for t in {EOS, *p.stop_token_ids}:
            x[t] = -math.inf
    peak = max(x)
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


ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
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
    )
    prompt, output = draw(ids), draw(ids)
    return SampleRow(params, prompt + output, len(prompt))


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(logit_rows, rows()), min_size=1, max_size=4))
def test_matches_reference_in_any_batch(batch):
    sampled = Sampler([EOS]).sample(torch.tensor([x for x, _ in batch]), [r for _, r in batch])
    for (x, row), got in zip(batch, sampled, strict=True):
        token, logprobs = reference(x, row)
        assert got.token_id == token
        if row.params.logprobs is None:
            assert got.logprob is None
            continue
        assert got.logprob == pytest.approx(logprobs[token], abs=1e-9)
        best = sorted(range(VOCAB), key=lambda t: (-logprobs[t], t))[: row.params.logprobs]
        assert [t for t, _ in got.top_logprobs] == best
        assert [q for _, q in got.top_logprobs] == pytest.approx([logprobs[t] for t in best], abs=1e-9)


def test_lowest_id_wins_a_tie():
    logits = torch.tensor([[0.0, 2.0, 2.0, 2.0] + [0.0] * 8])
    for params in (SamplingParams(), SamplingParams(logprobs=1), SamplingParams(temperature=1.0, top_k=1)):
        assert Sampler([]).sample(logits, [SampleRow(params, [0], 1)])[0].token_id == 1


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
