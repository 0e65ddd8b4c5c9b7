"""Names of blocks for the prefix cache: what two requests must have in common to share a block's keys and values."""

from __future__ import annotations

import array
import hashlib
import sys
from collections.abc import Sequence

from oasiskv.config import BLOCK_TOKENS

NAME_BYTES = 16
_TOKEN_BYTES = 4


class BlockNames:
    """Names of one request's complete blocks, 16 bytes each: blake2b of the parent's name and the block's 16 token ids, 32 bit and
    little-endian each. The first parent is the salt's, so that a name stands for the salt and all tokens up to the block's end.
    """

    def __init__(self, salt: str) -> None:
        self._names = bytearray()
        self._parent = hashlib.blake2b(salt.encode(), digest_size=NAME_BYTES, person=b"oasiskv salt").digest()

    def of(self, token_ids: Sequence[int]) -> bytes:
        """Names of all complete blocks of these tokens, which begin with those of the call before."""
        done = len(self._names) // NAME_BYTES * BLOCK_TOKENS
        tokens = array.array("I", token_ids[done : len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS])
        if sys.byteorder == "big":
            tokens.byteswap()
        data, size = tokens.tobytes(), BLOCK_TOKENS * _TOKEN_BYTES
        for at in range(0, len(data), size):
            self._parent = hashlib.blake2b(self._parent + data[at : at + size], digest_size=NAME_BYTES).digest()
            self._names += self._parent
        return bytes(self._names)
