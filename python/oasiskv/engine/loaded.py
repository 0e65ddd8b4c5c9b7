"""What an engine is built from: a model's configuration, weights and tokenizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from oasiskv.checkpoint import ModelConfig, load_checkpoint, resolve_model
from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError, RequestError
from oasiskv.models.presets import PRESETS, dummy_weights
from oasiskv.tokenizer import Tokenizer

if TYPE_CHECKING:
    from oasiskv.models.cuda_decoder import CudaDecoder


class NoTokenizer:
    """Of a model without text (dummy weights): requests are token ids, and every token's text is empty."""

    eos_ids: frozenset[int] = frozenset()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def token_bytes(self, token_id: int) -> bytes:
        return b""

    def encode(self, text: str) -> list[int]:
        raise ConfigError("this model has dummy weights and no tokenizer: give token ids")

    def definition(self) -> str:
        raise RequestError("this model has dummy weights and no tokenizer: nothing can follow a guide")

    def decode(self, ids: list[int]) -> str:
        return ""


@dataclass
class LoadedModel:
    config: ModelConfig
    weights: dict[str, Tensor]
    tokenizer: Tokenizer | NoTokenizer
    decoder: CudaDecoder | None = None  # of these weights, to be shared by engines that take turns


def load_model(config: EngineConfig) -> LoadedModel:
    """Raises CheckpointError, ConfigError."""
    if config.dummy_weights:
        if config.model not in PRESETS:
            raise ConfigError(f"model = {config.model!r} with dummy_weights: use one of {', '.join(PRESETS)}")
        model = PRESETS[config.model]
        return LoadedModel(model, dummy_weights(model, config.dtype, seed=0), NoTokenizer(model.vocab_size))
    folder = resolve_model(config.model, config.dtype)
    model, weights = load_checkpoint(folder)
    return LoadedModel(model, weights, Tokenizer.from_dir(folder))
