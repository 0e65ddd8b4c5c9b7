"""Who of a soak is in flight, and what became of the others. From any thread."""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from oasiskv.bench.soak_traffic import Request
from oasiskv.engine.llm import GenerationResult

# A minute: a soak that saw less of them has tested nothing.
LEAST = {
    "cpu": {"done": 20, "cancelled": 5, "preemptions": 3, "sparse_steps": 60, "canaries": 2},
    "cuda": {"done": 200, "cancelled": 50, "preemptions": 50, "sparse_steps": 5000, "canaries": 4},
}
COUNTS = (
    "done", "cancelled", "given_up", "refused", "preempted", "preemptions", "canaries", "canary_mismatches", "canary_preemptions",
    "sparse_steps", "host_sampled", "tokens",
)  # fmt: skip


@dataclass(eq=False)
class Live:
    """A request in flight, as its client sees it."""

    request: Request
    client: str
    heard: float  # time.monotonic() of its submission, then of its last output
    request_id: int | None = None  # once its client knows it
    given_up: bool = False  # cancelled by the soak itself, at its end
    result: GenerationResult = field(default_factory=GenerationResult)
    outputs: int = 0


class Ledger:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._live: set[Live] = set()
        self._counts: Counter[str] = Counter()
        self._longest_wait_s = 0.0

    def begin(self, request: Request, client: str) -> Live:
        live = Live(request, client, time.monotonic())
        with self._lock:
            self._live.add(live)
        return live

    def hear(self, live: Live, tokens: int) -> None:
        """It had an output."""
        now = time.monotonic()
        with self._lock:
            self._longest_wait_s = max(self._longest_wait_s, now - live.heard)
            self._counts["tokens"] += tokens
        live.heard = now

    def end(self, live: Live, how: str) -> None:
        """`how`: done, cancelled (by its client), given_up or refused."""
        with self._lock:
            self._live.discard(live)
            self._counts[how] += 1
            self._counts["host_sampled"] += live.request.params.sampled_on_host and how == "done"
            self._counts["preempted"] += live.result.stats.get("preemptions", 0) > 0
            for name in ("preemptions", "sparse_steps"):
                self._counts[name] += live.result.stats.get(name, 0)

    def end_canary(self, live: Live, differs: bool) -> None:
        with self._lock:
            self._live.discard(live)
            self._counts["canaries"] += 1
            self._counts["canary_mismatches"] += differs
            self._counts["canary_preemptions"] += live.result.stats.get("preemptions", 0)

    def in_flight(self) -> list[Live]:
        """Who has waited longest comes first."""
        with self._lock:
            return sorted(self._live, key=lambda live: live.heard)

    def counts(self) -> dict[str, int]:
        with self._lock:
            return {name: self._counts[name] for name in COUNTS}

    def too_few(self, backend: str, minutes: float, dense: bool) -> list[str]:
        """What there was less of than LEAST asks for."""
        counts = self.counts()
        return [
            f"only {counts[name]} {name}, at least {a_minute} a minute are needed: this run has tested too little; "
            "look at --rate and the sizes of the pools"
            for name, a_minute in LEAST[backend].items()
            if counts[name] < max(1, a_minute * minutes) and not (dense and name == "sparse_steps")
        ]

    @property
    def longest_wait_s(self) -> float:
        """Between two outputs of a request, or from its submission to its first."""
        return self._longest_wait_s
