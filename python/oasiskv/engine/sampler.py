"""Logits to tokens, each row by itself: a row's token never depends on its batch.

Every request of a step waits for these rows, so nothing here sorts a vocabulary whose order it does not need (`candidates`).
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from oasiskv import _core
from oasiskv.engine.candidates import best_ids, most_likely
from oasiskv.engine.guide import GuideError, RowGuide
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.token_counts import TokenCounts

_LIMIT = 1e300  # an extreme repetition penalty must not overflow
_FIRST_CANDIDATES, _GROWTH = 64, 8  # most draws look once
_PIECE = 32768  # values whose float64 stay in the L2 cache
_NO_TOKEN = "no token can be sampled: what the request asks (min_tokens, bad_words, a guide) forbids every one"
_log = logging.getLogger(__name__)


@dataclass
class SampleRow:
    """A request as its rows of logits need it, for as long as it lasts. `token_ids`, prompt first, are only ever appended to."""

    params: SamplingParams
    token_ids: list[int]
    prompt_tokens: int
    guide: RowGuide | None = None
    _counts: TokenCounts | None = field(default=None, init=False, repr=False, compare=False)
    _bias: tuple[np.ndarray, np.ndarray] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    def counts(self) -> TokenCounts:
        """Of all tokens there are now; made when first asked for."""
        if self._counts is None:
            self._counts = TokenCounts(self.token_ids, self.prompt_tokens)
        self._counts.update()
        return self._counts

    def bias(self) -> tuple[np.ndarray, np.ndarray]:
        """(ids int64 [n], values float64 [n]) of logit_bias."""
        if self._bias is None:
            pairs = self.params.logit_bias
            self._bias = np.array([t for t, _ in pairs], dtype=np.int64), np.array([b for _, b in pairs])
        return self._bias


@dataclass(slots=True)
class Sampled:
    """logprob and top_logprobs [(id, logprob)] are of the distribution after bias, penalties and masks, before temperature; only if asked
    for. Tokens that may not be sampled are no alternatives. logits: float32 [vocab], the model's, if asked for.
    """

    token_id: int
    logprob: float | None = None
    top_logprobs: list[tuple[int, float]] = field(default_factory=list)
    logits: np.ndarray | None = field(default=None, compare=False)


@dataclass(frozen=True)
class Unsampled:
    """Why a row has no token: its request fails, alone."""

    error: str


class Sampler:
    """`eos_ids` are masked, like a request's stop ids, until it has its min_tokens. For one thread."""

    def __init__(self, eos_ids: Iterable[int]) -> None:
        self._eos_ids = sorted(eos_ids)
        self._copy = np.empty(0)

    def sample(self, logits: torch.Tensor, rows: list[SampleRow]) -> list[Sampled | Unsampled]:
        """logits: float32 [len(rows), vocab], finite."""
        return [self._try_row(x, row) for x, row in zip(logits.numpy(), rows, strict=True)]

    def _try_row(self, x: np.ndarray, row: SampleRow) -> Sampled | Unsampled:
        try:
            sampled = self._sample_row(x, row)
        except GuideError as error:
            return Unsampled(str(error))
        except Exception as error:  # one request's fault must not end the others
            _log.exception("a request's token could not be sampled")
            return Unsampled(f"sampling failed: {type(error).__name__}: {error}")
        if row.params.return_generation_logits and isinstance(sampled, Sampled):
            sampled.logits = x.copy()
        return sampled

    def _sample_row(self, x: np.ndarray, row: SampleRow) -> Sampled | Unsampled:
        p, forbidden = row.params, self._forbidden(row)
        if p.logit_bias or p.penalised or forbidden:
            x = self._in_float64(x)
            add_bias(x, row)
            penalise(x, row)
        if forbidden:
            x[[t for t in forbidden if t < len(x)]] = -np.inf
        ids = None if row.guide is None else row.guide.allowed(row.token_ids)
        if ids is not None:  # often a few of them: the others are not looked at again
            x = x[ids].astype(np.float64)
        if (forbidden or ids is not None) and (len(x) == 0 or x.max() == -np.inf):
            return Unsampled(_NO_TOKEN)
        token = int(x.argmax()) if p.temperature == 0 else draw(x, p, len(row.token_ids))
        if p.logprobs is None:
            return Sampled(token if ids is None else int(ids[token]))
        top = best_ids(x, p.logprobs)[: p.logprobs] if p.logprobs else np.empty(0, np.int64)
        top = top[x[top] > -np.inf]
        if ids is None:
            x = self._in_float64(x)
        x -= x.max()
        shifted = x[[token, *top]]
        logprob, *top_logprobs = (shifted - np.log(np.exp(x, out=x).sum())).tolist()
        if ids is not None:
            token, top = int(ids[token]), ids[top]
        return Sampled(token, logprob, list(zip(top.tolist(), top_logprobs, strict=True)))

    def _forbidden(self, row: SampleRow) -> list[int]:
        """Ids that may not come next."""
        p = row.params
        ids = [*self._eos_ids, *p.stop_token_ids] if row.generated < p.min_tokens else []
        return ids + [word[-1] for word in p.bad_words if _ends_with(row.token_ids, word[:-1])]

    def _in_float64(self, x: np.ndarray) -> np.ndarray:
        """A copy to change, or x where it is that. It is the next row's too: fresh memory costs more than what is done with it."""
        if x is not self._copy:
            if len(self._copy) != len(x):
                self._copy = np.empty(len(x))
            self._copy[:] = x
        return self._copy


def _ends_with(token_ids: list[int], end: tuple[int, ...]) -> bool:
    return not end or (token_ids[-1:] == [end[-1]] and tuple(token_ids[-len(end) :]) == end)


def add_bias(x: np.ndarray, row: SampleRow) -> None:
    """x float64 [vocab], in place."""
    if row.params.logit_bias:
        ids, values = row.bias()
        x[ids] += values


def penalise(x: np.ndarray, row: SampleRow) -> None:
    """x float64 [vocab], in place: repetition (over prompt and output: divides positive, multiplies negative), presence and frequency
    (over output).
    """
    p = row.params
    if not p.penalised:
        return
    counts = row.counts()
    seen = x[counts.ids]
    with np.errstate(over="ignore"):
        seen = np.maximum(seen, 0) / p.repetition_penalty + np.minimum(seen, 0) * p.repetition_penalty
    seen -= p.presence_penalty * (counts.generated > 0) + p.frequency_penalty * counts.generated
    x[counts.ids] = np.minimum(np.maximum(seen, -_LIMIT), _LIMIT)


def draw(x: np.ndarray, p: SamplingParams, position: int) -> int:
    """One token by inverse CDF over the filtered distribution, candidates by (probability descending, id ascending).

    x: float32 or float64 [vocab]; -inf is never drawn.
    """
    return token_at(x, p, _core.philox_uniform(p.seed, position))


def token_at(x: np.ndarray, p: SamplingParams, uniform: float) -> int:
    """`draw`'s token for a uniform number in [0, 1)."""
    peak, count, total = float(x.max()), p.top_k or _FIRST_CANDIDATES, None
    while True:
        order, shifted = most_likely(x, count, peak, p.temperature)
        if p.top_k:
            order, shifted = order[: p.top_k], shifted[: p.top_k]
        weights, complete = np.exp(shifted), p.top_k > 0 or len(order) == len(x)
        if complete:
            total = weights.sum()
        elif total is None:
            total = _total_weight(x, peak, p.temperature)
        probs = weights / total
        at = _find(probs, p, uniform, complete)
        if at is not None:
            return int(order[at])
        count *= _GROWTH
        wanted = p.top_p if p.top_p < 1 else uniform
        if wanted - probs.sum() > count * probs[-1]:  # none that follows is likelier than the last: so many will not reach it
            count = len(x)


def _find(probs: np.ndarray, p: SamplingParams, uniform: float, complete: bool) -> int | None:
    """Which of probs [n], descending, is drawn after top_p and min_p. They are all candidates' if `complete`; else None is beyond them."""
    cdf, keep = np.cumsum(probs), len(probs)
    if p.top_p < 1:
        keep = min(keep, int(np.searchsorted(cdf, p.top_p)) + 1)
    if p.min_p > 0:
        keep = min(keep, int(np.count_nonzero(probs >= p.min_p * probs[0])))
    if complete or keep < len(probs):
        return min(int(np.searchsorted(cdf[:keep], uniform * cdf[keep - 1], side="right")), keep - 1)
    if p.top_p < 1 or p.min_p > 0:
        return None  # the cut may be further down, and with it the mass that is drawn from
    at = int(np.searchsorted(cdf, uniform, side="right"))
    return at if at < len(probs) else None


def _total_weight(x: np.ndarray, peak: float, temperature: float) -> float:
    """Sum of exp((x - peak) / temperature), piece by piece."""
    total, piece, factor = 0.0, np.empty(min(len(x), _PIECE)), 1 / max(temperature, sys.float_info.min)
    with np.errstate(over="ignore"):
        for at in range(0, len(x), _PIECE):
            part = x[at : at + _PIECE]
            part = np.subtract(part, peak, out=piece[: len(part)], dtype=np.float64)
            part *= factor
            total += float(np.exp(part, out=part).sum())
    return total
