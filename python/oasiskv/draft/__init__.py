"""Drafters: guesses at the next tokens, to predict which blocks they will read (and, if accepted, to skip steps)."""

from oasiskv.draft.base import Drafter, DraftRequest
from oasiskv.draft.make import make_drafter

__all__ = ["DraftRequest", "Drafter", "make_drafter"]
