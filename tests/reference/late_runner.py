"""A pipelined runner without a GPU: what CUDA's promises the engine, on the CPU backend."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace

from oasiskv.engine.runner import CpuRunner, Groups
from oasiskv.engine.sequence import Sequence


class LateRunner(CpuRunner):
    """What a step samples (greedily) goes into its own lists at once; the engine learns of it when it asks."""

    pipelined = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.tokens: dict[int, list[int]] = {}
        self.sampled: dict[int, list[int]] = {}
        self.broken_at: int | None = None  # a step whose logits are not finite

    def launch(self, groups: Groups, sequences: Mapping[int, Sequence]) -> None:
        for g in groups:
            known, told = self.tokens.setdefault(g.id, []), sequences[g.id].token_ids
            known += told[len(known) :]  # sampled on the host, or a new request
        own = {g.id: SimpleNamespace(token_ids=self.tokens[g.id]) for g in groups}
        best = self.logits(groups, {}, own).argmax(dim=1).tolist()
        for g, token in zip([g for g in groups if g.logits_rows], best, strict=True):
            self.tokens[g.id].append(token)
        step = self.core.last_step
        self.sampled[step] = [-1] * len(best) if step == self.broken_at else best

    def results(self, step: int, count: int) -> list[int]:
        assert step >= self.core.last_step - 1, "only the last two steps' tokens are kept"
        assert len(self.sampled[step]) == count
        return self.sampled[step]

    def drafts_used(self, step: int, count: int) -> list[int]:
        return [0] * count

    def forget(self, request_id: int) -> None:
        self.tokens.pop(request_id, None)
