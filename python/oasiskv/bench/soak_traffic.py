"""What the soak's clients ask for, drawn from seeds: requests, when they come, and when they are cancelled."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from oasiskv.engine.llm import GenerationResult
from oasiskv.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Limits:
    """What fits the engine: tokens of a prompt and of an answer, its context, its vocabulary; and seconds until the last cancels."""

    max_prompt: int
    max_output: int
    max_seq_len: int
    vocab_size: int
    cancel_within_s: float


@dataclass(frozen=True)
class Phase:
    name: str
    rate: float  # of the full rate
    host_sampling: bool = False  # while one such request runs, fewer steps overlap: only now and then


PHASES = (Phase("busy", 1.0), Phase("calm", 0.3), Phase("mixed", 0.6, host_sampling=True), Phase("pause", 0.0))
_WEIGHTS = (4, 2, 3, 2)
_PHASE_S = (1.5, 8.0)
_BURSTS = 0.3  # of the arrivals


class Schedule:
    """Phases of all clients together, the first of them busy."""

    def __init__(self, seed: int, seconds: float) -> None:
        rng = random.Random(f"{seed} phases")
        count = math.ceil(seconds / _PHASE_S[0]) + 1
        self._phases = [PHASES[0], *rng.choices(PHASES, _WEIGHTS, k=count)]
        self._ends = list(accumulate(rng.uniform(*_PHASE_S) for _ in self._phases))

    def at(self, seconds: float) -> Phase:
        return self._phases[min(bisect.bisect_right(self._ends, seconds), len(self._phases) - 1)]


@dataclass(frozen=True)
class Request:
    prompt_ids: list[int]
    params: SamplingParams
    cancel_after_s: tuple[float, ...] = ()  # after it was submitted; 0: at once, by its own thread
    cancel_after_outputs: int = 0  # 0: not by that
    refused: bool = False  # it can never run

    @property
    def cancels(self) -> bool:
        return bool(self.cancel_after_s) or self.cancel_after_outputs > 0

    def __str__(self) -> str:
        return f"a request of {len(self.prompt_ids)} tokens with {self.params}"


class Client:
    """One thread's endless requests; the same for the same seed and name."""

    def __init__(self, seed: int, name: str, text_ids: list[int], limits: Limits) -> None:
        self._rng = random.Random(f"{seed} {name}")
        self._text_ids, self._limits = text_ids, limits

    def delay(self, rate: float) -> float:
        """Seconds to the next arrival: a Poisson process of `rate` a second."""
        return self._rng.expovariate(rate)

    def arrivals(self, host_sampling: bool) -> Iterator[Request]:
        """What comes together: mostly one request, sometimes a burst of short prompts with long answers.

        Those all fit when they are admitted and no more once they have grown; else hardly anything would be preempted, as admission
        leaves each running request a page to grow by.
        """
        if self._rng.random() >= _BURSTS:
            yield self.request(host_sampling)
            return
        limits = self._limits
        for _ in range(self._rng.randint(4, 16)):
            longest = self._rng.randint(-(-limits.max_output // 2), limits.max_output)
            yield self._request(self._log_uniform(min(24, limits.max_prompt)), longest, host_sampling)

    def request(self, host_sampling: bool) -> Request:
        return self._request(self._log_uniform(self._limits.max_prompt), self._log_uniform(self._limits.max_output), host_sampling)

    def _request(self, prompt: int, output: int, host_sampling: bool) -> Request:
        rng = self._rng
        start = rng.randrange(len(self._text_ids) - prompt)
        ids = self._text_ids[start : start + prompt]
        params = self._params(output, host_sampling)
        if rng.random() < 0.01:
            return Request(self._never_fits(ids), params, refused=True)
        return Request(ids, params, *self._cancels())

    def _log_uniform(self, high: int) -> int:
        return int(math.exp(self._rng.uniform(0, math.log(high + 1))))

    def _params(self, max_tokens: int, host_sampling: bool) -> SamplingParams:
        rng = self._rng
        options: dict[str, object] = {"max_tokens": max_tokens, "ignore_eos": rng.random() < 0.7}
        kind = rng.random()
        if kind < 0.3:
            options |= {"temperature": rng.uniform(0.3, 1.2), "top_p": rng.choice([1.0, 0.95, 0.8]), "seed": rng.getrandbits(64)}
            options["top_k"] = rng.choice([0, 0, 40])
        # Drawn whether or not it is used: what is drawn afterwards stays the same.
        on_host = rng.choice([{"repetition_penalty": 1.2}, {"presence_penalty": 0.5, "frequency_penalty": 0.3}, {"logprobs": 3}])
        if rng.random() < 0.15 and host_sampling:
            options |= on_host
        if rng.random() < 0.2:
            options["stop_token_ids"] = tuple(rng.sample(self._text_ids, 8))
        if rng.random() < 0.1:
            options["stop"] = (" the", "\n\n")
        return SamplingParams(**options)  # type: ignore[arg-type]

    def _cancels(self) -> tuple[tuple[float, ...], int]:
        """(cancel_after_s, cancel_after_outputs)"""
        rng = self._rng
        if rng.random() >= 0.2:
            return (), 0
        later = math.exp(rng.uniform(math.log(1e-3), math.log(self._limits.cancel_within_s)))
        return rng.choice([((0.0,), 0), ((0.0, 0.0), 0), ((later,), 0), ((later, later * 1.5), 0), ((), rng.randint(1, 8))])

    def _never_fits(self, ids: list[int]) -> list[int]:
        longest = self._text_ids[: self._limits.max_seq_len]
        return self._rng.choice([[], [*ids, self._limits.vocab_size], [-1, *ids], longest])


def wrong(request: Request, result: GenerationResult, eos_ids: frozenset[int], given_up: bool = False) -> str | None:
    """What a finished request's answer breaks of what it asked for, or None. `given_up`: the soak has cancelled it."""
    params, ids, reason = request.params, result.token_ids, result.finish_reason
    if reason == "error":
        return f"it ended with the error {result.error!r}"
    if reason not in ("stop", "length", "cancelled"):
        return f"its finish_reason is {reason!r}"
    if reason == "cancelled" and not (request.cancels or given_up):
        return "it was cancelled, and nobody had asked for that"
    if len(ids) > params.max_tokens or (reason == "length" and len(ids) != params.max_tokens):
        return f"it has {len(ids)} tokens of {params.max_tokens} and ended by {reason}"
    stops = {*params.stop_token_ids} | (set() if params.ignore_eos else eos_ids)
    if reason == "stop" and not params.stop and (not ids or ids[-1] not in stops):
        return f"it was stopped by {ids[-1:]}, which is not one of its stop tokens"
    if early := [t for t in ids[:-1] if t in stops]:
        return f"it went on after its stop token {early[0]}"
    if params.logprobs is not None and len(result.logprobs) != len(ids):
        return f"it has {len(result.logprobs)} logprobs for {len(ids)} tokens"
    if not result.stats:
        return "it came without statistics"
    return None
