"""The canary of a soak: one long greedy request, asked again and again, two at a time, whose answer must stay the same."""

from __future__ import annotations

import random

from oasiskv.bench.soak_ledger import Ledger
from oasiskv.bench.soak_report import Report
from oasiskv.bench.soak_traffic import Request, wrong
from oasiskv.engine.llm import LLM, GenerationResult

_STATS = ("dense_steps", "sparse_steps", "preemptions", "draft_tokens", "blocks_predicted", "blocks_admitted", "bytes_fetched")


class Canary:
    """`exact`: an answer that differs fails the soak; else it is counted."""

    def __init__(self, request: Request, exact: bool, llm: LLM, ledger: Ledger, report: Report) -> None:
        self.reference: GenerationResult | None = None  # the first answer, of an engine that has nothing else to do
        self._request, self._exact, self._llm, self._ledger, self._report = request, exact, llm, ledger, report

    def ask(self) -> None:
        live = self._ledger.begin(self._request, "canary")
        live.result = result = self._llm.generate([self._request.prompt_ids], self._request.params)[0]
        self._ledger.hear(live, 0)
        differs = False
        if why := wrong(self._request, result, frozenset()):
            self._report.fail(f"the canary, {why}: look at the engine's log above")
        elif self.reference is None:
            self.reference = result
        else:
            differs = result.token_ids != self.reference.token_ids
            if differs and self._exact:
                self._report.fail(self._difference(self.reference, result))
        self._ledger.end_canary(live, differs)

    def ask_again_and_again(self, name: str, seed: int, every_s: float) -> None:
        """Until the clients stop; on several threads, so that how many answers there are depends less on how long one waits."""
        rng = random.Random(f"{seed} {name}")
        while not self._report.stop.wait(rng.uniform(0.5, 1.5) * every_s):
            self.ask()

    def _difference(self, expected: GenerationResult, got: GenerationResult) -> str:
        at = next((i for i, (a, b) in enumerate(zip(expected.token_ids, got.token_ids, strict=False)) if a != b), "the end")
        stats = ", ".join(f"{n} {expected.stats[n]} / {got.stats[n]}" for n in _STATS)
        return (
            f"the canary answered otherwise from token {at} on: {expected.token_ids} / {got.token_ids}. Alone at the start / now: {stats}. "
            "If the blocks differ, look at drafts, selection and preemption; if only tokens do, at what in a row's result depends on its "
            f"batch. Usage: {self._llm.usage()}"
        )
