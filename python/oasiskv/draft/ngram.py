"""Prompt lookup: what followed the latest earlier occurrence of the last few tokens."""

from __future__ import annotations

import numpy as np

from oasiskv.draft.base import Drafter, DraftRequest

_LONGEST = 4


class _History:
    """A request's tokens, 4 bytes each. A guess reads them once: about 0.1 ms at 100,000 tokens."""

    def __init__(self) -> None:
        self._buffer = np.empty(0, dtype=np.int32)
        self._length = 0

    def guess(self, tokens: list[int], count: int) -> list[int]:
        known = self._take(tokens)
        ends = np.flatnonzero(known[:-1] == known[-1])  # earlier occurrences of the last token, of the last two, ...
        for n in range(1, min(_LONGEST, len(known) - 1)):
            longer = ends[ends >= n]
            longer = longer[known[longer - n] == known[-1 - n]]
            if not longer.size:
                break
            ends = longer
        if not ends.size:
            return []
        start = int(ends[-1]) + 1
        found = known[start : start + count].tolist()
        while len(found) < count:  # the match runs into the end: what repeats goes on repeating
            found += found[: count - len(found)]
        return found

    def _take(self, tokens: list[int]) -> np.ndarray:
        if len(tokens) > len(self._buffer):
            grown = np.empty(len(tokens) * 5 // 4 + 64, dtype=np.int32)
            grown[: self._length] = self._buffer[: self._length]
            self._buffer = grown
        self._buffer[self._length : len(tokens)] = tokens[self._length :]
        self._length = len(tokens)
        return self._buffer[: self._length]


class NgramDrafter(Drafter):
    def __init__(self) -> None:
        self._histories: dict[int, _History] = {}

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        return [self._histories.setdefault(r.id, _History()).guess(r.tokens, r.count) for r in requests]

    def forget(self, request_id: int) -> None:
        self._histories.pop(request_id, None)
