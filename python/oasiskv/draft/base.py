"""The interface of all drafters."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass
class DraftRequest:
    """A request that wants up to `count` guesses after `tokens`: prompt and output so far, which only grow from call to call.

    The list is the engine's own: a drafter reads it and does not keep it.
    """

    id: int
    tokens: list[int]
    count: int


class Drafter(ABC):
    """State is kept per request id until `forget`."""

    @abstractmethod
    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        """For each request 0..count token ids; fewer or none where there is no guess."""

    def forget(self, request_id: int) -> None:  # noqa: B027 - most drafters keep nothing
        """The request has ended."""
