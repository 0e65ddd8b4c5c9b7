"""A drafter by its name."""

from __future__ import annotations

from oasiskv.draft.base import Drafter
from oasiskv.draft.model import ModelDrafter
from oasiskv.draft.ngram import NgramDrafter
from oasiskv.draft.previous import PreviousDrafter
from oasiskv.errors import ConfigError
from oasiskv.tokenizer import Tokenizer


def make_drafter(spec: str, tokenizer: Tokenizer) -> Drafter:
    """`ngram`, `previous` or `model:<path>`. Raises ConfigError."""
    if spec == "ngram":
        return NgramDrafter()
    if spec == "previous":
        return PreviousDrafter()
    if spec.startswith("model:"):
        return ModelDrafter(spec.removeprefix("model:"), tokenizer)
    raise ConfigError(f"drafter = {spec!r}: use ngram, previous or model:<path>")
