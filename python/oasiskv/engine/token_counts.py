"""How often each token stands in a request, for its penalties."""

from __future__ import annotations

import numpy as np


class TokenCounts:
    """`ids` int64 [n]: the distinct tokens of prompt and output; `generated` int64 [n]: how often each stands in the output.

    `token_ids`, prompt first, is the request's own list and is only ever appended to: `update` reads what came since, whatever came.
    """

    def __init__(self, token_ids: list[int], prompt_tokens: int) -> None:
        self._token_ids = token_ids
        self._read = prompt_tokens
        self.ids = np.unique(np.array(token_ids[:prompt_tokens], dtype=np.int64))
        self.generated = np.zeros(len(self.ids), dtype=np.int64)
        self._places = {token: place for place, token in enumerate(self.ids.tolist())}

    def update(self) -> None:
        for token in self._token_ids[self._read :]:
            place = self._places.setdefault(token, len(self._places))
            if place == len(self.ids):
                self.ids = np.append(self.ids, token)
                self.generated = np.append(self.generated, 0)
            self.generated[place] += 1
        self._read = len(self._token_ids)
