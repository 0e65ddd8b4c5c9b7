"""The sampler as it is defined: the whole vocabulary in order, then one filter after the other."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np

from oasiskv.engine.sampler import Sampled, SampleRow
from oasiskv.engine.sampling import SamplingParams

_LIMIT = 1e300


def philox(p: SamplingParams, row: SampleRow) -> float:
    return np.random.Generator(np.random.Philox(key=p.seed, counter=len(row.token_ids))).random()


def adjusted(logits: np.ndarray, row: SampleRow, eos_ids: list[int]) -> np.ndarray:
    """Logits [vocab] after bias and penalties, and with what may not come masked, in float64."""
    p, x = row.params, logits.astype(np.float64)
    for token, bias in p.logit_bias:
        x[token] += bias
    if p.repetition_penalty != 1:
        seen = np.unique(np.array(row.token_ids, dtype=np.int64))
        with np.errstate(over="ignore"):
            x[seen] = np.where(x[seen] > 0, x[seen] / p.repetition_penalty, x[seen] * p.repetition_penalty)
    if row.generated and (p.presence_penalty or p.frequency_penalty):
        seen, counts = np.unique(np.array(row.token_ids[row.prompt_tokens :], dtype=np.int64), return_counts=True)
        x[seen] -= p.presence_penalty + p.frequency_penalty * counts
    x = np.clip(x, -_LIMIT, _LIMIT)
    if row.generated < p.min_tokens:
        x[[t for t in (*eos_ids, *p.stop_token_ids) if t < len(x)]] = -np.inf
    for token in range(len(x)):
        followed = [*row.token_ids, token]
        if any(followed[-len(word) :] == list(word) for word in p.bad_words):
            x[token] = -np.inf
    return x


def token_at(x: np.ndarray, p: SamplingParams, uniform: float) -> int:
    """One token by inverse CDF over the filtered distribution, candidates by (probability descending, id ascending)."""
    return pick(*candidates(x, p), uniform)


def pick(order: np.ndarray, cdf: np.ndarray, uniform: float) -> int:
    return int(order[min(int(np.searchsorted(cdf, uniform * cdf[-1], side="right")), len(cdf) - 1)])


def candidates(x: np.ndarray, p: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Ids in order, and the running sum of the probabilities of those that the filters leave."""
    with np.errstate(over="ignore"):
        x = (x - x.max()) / p.temperature
    order = np.argsort(-x, kind="stable")
    if p.top_k:
        order = order[: p.top_k]
    probs = np.exp(x[order])
    probs /= probs.sum()
    keep = len(order)
    if p.top_p < 1:
        keep = int(np.searchsorted(np.cumsum(probs), p.top_p)) + 1
    if p.min_p > 0:
        keep = min(keep, int(np.count_nonzero(probs >= p.min_p * probs[0])))
    return order, np.cumsum(probs[:keep])


def logprobs_of(x: np.ndarray, token: int, count: int) -> Sampled:
    logprobs = x - x.max()
    logprobs -= np.log(np.exp(logprobs).sum())
    top = [t for t in np.lexsort((np.arange(len(x)), -x))[:count] if x[t] > -np.inf]
    return Sampled(token, float(logprobs[token]), [(int(t), float(logprobs[t])) for t in top])


def rounding(vocab: int) -> float:
    """What one order of sums may differ by from another, relatively.

    A running sum of n terms is right to n * 2**-53, a weight exp(s) to |s| * 2**-53 (0 if s < -745); quotients of such are compared.
    """
    return 4 * (vocab + 745) * 2.0**-53


def beside_a_border(x: np.ndarray, p: SamplingParams, uniform: float) -> set[int]:
    """The tokens that this reference has where the uniform number, top_p and min_p are each off by no more than rounding."""
    moves = (1 - rounding(len(x)), 1.0, 1 + rounding(len(x)))
    found = set()
    for u, top, low in itertools.product(moves, moves, moves):
        moved = dataclasses.replace(p, top_p=min(1.0, p.top_p * top) if p.top_p < 1 else 1.0, min_p=min(1.0, p.min_p * low))
        found.add(token_at(x, moved, min(uniform * u, 1 - 2.0**-53)))
    return found
