"""Prompt lookup: what followed the latest earlier occurrence of the last few tokens."""

from __future__ import annotations

from oasiskv.draft.base import Drafter, DraftRequest

_LONGEST = 4


class _Index:
    """Where each n-gram (n = 1..4) last ended, grown with the tokens; a step costs the same whatever the context."""

    def __init__(self) -> None:
        self._indexed = 0
        self._after: list[dict[tuple[int, ...], int]] = [{} for _ in range(_LONGEST + 1)]

    def guess(self, tokens: list[int], count: int) -> list[int]:
        # Only n-grams that something follows: the last tokens themselves must not be found.
        for end in range(self._indexed + 1, len(tokens)):
            for n in range(1, min(_LONGEST, end) + 1):
                self._after[n][tuple(tokens[end - n : end])] = end
        self._indexed = max(self._indexed, len(tokens) - 1)
        for n in range(min(_LONGEST, len(tokens)), 0, -1):
            start = self._after[n].get(tuple(tokens[-n:]))
            if start is not None:
                found = tokens[start : start + count]
                while len(found) < count:  # the match runs into the end: what repeats goes on repeating
                    found += found[: count - len(found)]
                return found
        return []


class NgramDrafter(Drafter):
    def __init__(self) -> None:
        self._indexes: dict[int, _Index] = {}

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        return [self._indexes.setdefault(r.id, _Index()).guess(r.tokens, r.count) for r in requests]

    def forget(self, request_id: int) -> None:
        self._indexes.pop(request_id, None)
