"""No draft: the current token's own query predicts the next step's blocks."""

from __future__ import annotations

from oasiskv.draft.base import Drafter, DraftRequest


class PreviousDrafter(Drafter):
    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]
