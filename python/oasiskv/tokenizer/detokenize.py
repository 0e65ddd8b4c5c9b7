"""Tokens to text as they come, never half a character."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oasiskv.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_LONGEST_WAIT = 8  # tokens: bytes that are no UTF-8 by then never will be


class IncrementalDetokenizer:
    """Joined, the pieces of `push` and `flush` equal `decode` of all ids.

    Decodes a short window of tokens behind the newest, so that a token's text may depend on the one before it (a leading space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._window = 0  # first id of the window
        self._shown = 0  # ids whose text is out

    @property
    def complete(self) -> bool:
        """Whether the text of every pushed token is out."""
        return self._shown == len(self._ids)

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is incomplete."""
        self._ids.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._shown < _LONGEST_WAIT:
            return ""
        return self._advance(text)

    def flush(self) -> str:
        """What is left, with U+FFFD for an incomplete character."""
        return self._advance(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[self._window : self._shown])
        return self._tokenizer.decode(self._ids[self._window :])[len(before) :]

    def _advance(self, text: str) -> str:
        self._window, self._shown = self._shown, len(self._ids)
        return text
