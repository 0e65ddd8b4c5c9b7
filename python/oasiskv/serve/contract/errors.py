"""An error's code on its way through a BLS, whose requests get the message of an error alone (Triton 2.51)."""

from __future__ import annotations

import re

_MARK = re.compile(r"\[oasis:([A-Z_]+)\] ")


def marked(code: str, message: str) -> str:
    """The message with its code in front, for a BLS to read. code: a name of TritonError's."""
    return f"[oasis:{code}] {message}"


def unmarked(message: str) -> tuple[str, str]:
    """(code, message without it); INTERNAL for one without."""
    found = _MARK.search(message)
    if found is None:
        return "INTERNAL", message
    return found[1], message[: found.start()] + message[found.end() :]
