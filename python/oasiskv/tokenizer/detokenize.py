"""Tokens to text as they come, never half a character."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oasiskv.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


class IncrementalDetokenizer:
    """Joined, the pieces of `push` and `flush` equal `decode` of all ids.

    Byte-level tokens go through an incremental UTF-8 decoder: exact, and each token costs the same. Other tokenizers decode a short
    window of tokens behind the newest, since a token's text may depend on the one before it (a leading space).
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = codecs.getincrementaldecoder("utf-8")("replace")
        self._partial = False  # it holds a part of a character
        self._ids: list[int] = []  # of the window and what is not out yet
        self._shown = 0  # of them, those whose text is out

    @property
    def complete(self) -> bool:
        """Whether the text of every pushed token is out."""
        return self._shown == len(self._ids) and not self._partial

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; empty while a character is incomplete."""
        piece = self._tokenizer.token_bytes(token_id)
        if piece is not None:
            if piece.isascii() and not self._partial:
                return piece.decode()
            text = self._bytes.decode(piece)
            self._partial = bool(self._bytes.getstate()[0])
            return text
        self._ids.append(token_id)
        text = self._new_text()
        return "" if text.endswith(_REPLACEMENT) else self._advance(text)

    def flush(self) -> str:
        """What is left, with U+FFFD for an incomplete character."""
        left = self._bytes.decode(b"", final=True)
        self._partial = False
        return left + self._advance(self._new_text())

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._ids[: self._shown])
        return self._tokenizer.decode(self._ids)[len(before) :]

    def _advance(self, text: str) -> str:
        self._ids = self._ids[self._shown :]
        self._shown = len(self._ids)
        return text
