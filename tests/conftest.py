"""Shared by all tests: the embedded model and long real text."""

from __future__ import annotations

import pytest

from oasiskv.bench.text import prose
from oasiskv.checkpoint import resolve_model
from oasiskv.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(resolve_model("smollm2-135m"))


@pytest.fixture(scope="session")
def prose_ids(tokenizer: Tokenizer) -> list[int]:
    """About a hundred thousand tokens of essays."""
    return tokenizer.encode(prose()[:600_000])
