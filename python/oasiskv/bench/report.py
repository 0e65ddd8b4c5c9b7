"""How benchmarks tell what they measure: lines for people on standard error, rows of JSON for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path

MIB, GIB = 2**20, 2**30


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def append_row(path: str | Path, row: Mapping[str, object]) -> None:
    """Add a JSON object as a line to a file."""
    with Path(path).open("a") as out:
        out.write(json.dumps(row) + "\n")
