"""Text to tokens and back."""

from oasiskv.tokenizer.detokenize import IncrementalDetokenizer
from oasiskv.tokenizer.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer"]
