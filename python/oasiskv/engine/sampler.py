"""Logits to tokens, each row by itself: a row's token never depends on its batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from oasiskv.engine.sampling import SamplingParams

_LIMIT = 1e300  # an extreme repetition penalty must not overflow


@dataclass
class SampleRow:
    """A row of logits: whose it is and the tokens before it, prompt first; not to be changed."""

    params: SamplingParams
    token_ids: list[int]
    prompt_tokens: int

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens


@dataclass(slots=True)
class Sampled:
    """logprob and top_logprobs [(id, logprob)] are of the distribution after penalties, before temperature; only if asked for."""

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)


class Sampler:
    """`eos_ids` are masked, like a request's stop ids, until it has its min_tokens."""

    def __init__(self, eos_ids: Iterable[int]) -> None:
        self._eos_ids = sorted(eos_ids)

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """logits: float32 [len(rows), vocab], finite."""
        plain = [i for i, r in enumerate(rows) if r.params.plain_greedy]
        best = dict(zip(plain, logits[plain].argmax(dim=1).tolist(), strict=True)) if plain else {}
        return [Sampled(best[i]) if i in best else self._sample_row(logits[i].numpy(), r) for i, r in enumerate(rows)]

    def _sample_row(self, logits: np.ndarray, row: SampleRow) -> Sampled:
        p = row.params
        x = penalise(logits.astype(np.float64), row)
        if row.generated < p.min_tokens:
            x[[t for t in (*self._eos_ids, *p.stop_token_ids) if t < len(x)]] = -np.inf
        token = int(x.argmax()) if p.temperature == 0 else draw(x, p, len(row.token_ids))
        if p.logprobs is None:
            return Sampled(token)
        logprobs = x - x.max()
        logprobs -= np.log(np.exp(logprobs).sum())
        top = np.lexsort((np.arange(len(x)), -x))[: p.logprobs]
        return Sampled(token, float(logprobs[token]), [(int(t), float(logprobs[t])) for t in top])


def penalise(x: np.ndarray, row: SampleRow) -> np.ndarray:
    """Repetition (over prompt and output: divides positive logits, multiplies negative), presence and frequency (over output)."""
    p = row.params
    if p.repetition_penalty != 1:
        seen = np.unique(np.array(row.token_ids, dtype=np.int64))
        with np.errstate(over="ignore"):
            x[seen] = np.where(x[seen] > 0, x[seen] / p.repetition_penalty, x[seen] * p.repetition_penalty)
    if row.generated and (p.presence_penalty or p.frequency_penalty):
        seen, counts = np.unique(np.array(row.token_ids[row.prompt_tokens :], dtype=np.int64), return_counts=True)
        x[seen] -= p.presence_penalty + p.frequency_penalty * counts
    return np.clip(x, -_LIMIT, _LIMIT, out=x)


def draw(x: np.ndarray, p: SamplingParams, position: int) -> int:
    """One token by inverse CDF over the filtered distribution, candidates by (probability descending, id ascending)."""
    with np.errstate(over="ignore"):
        x = (x - x.max()) / p.temperature  # shifted first: a tiny temperature must not make infinity of the best
    order = np.argsort(-x, kind="stable")
    if p.top_k:
        order = order[: p.top_k]
    probs = np.exp(x[order] - x[order[0]])
    probs /= probs.sum()
    keep = len(order)
    if p.top_p < 1:
        keep = int(np.searchsorted(np.cumsum(probs), p.top_p)) + 1
    if p.min_p > 0:
        keep = min(keep, int(np.count_nonzero(probs >= p.min_p * probs[0])))
    cdf = np.cumsum(probs[: max(1, keep)])
    uniform = np.random.Generator(np.random.Philox(key=p.seed, counter=position)).random()
    return int(order[min(int(np.searchsorted(cdf, uniform * cdf[-1], side="right")), len(cdf) - 1)])
