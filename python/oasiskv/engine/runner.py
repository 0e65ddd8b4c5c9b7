"""What runs a planned step: a model with its core. The engine decides what runs and keeps the tokens."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.engine.loaded import LoadedModel
from oasiskv.engine.sequence import Sequence
from oasiskv.errors import ConfigError
from oasiskv.models.decoder import DecoderModel
from oasiskv.models.rope import rope_tables

Groups = Seq[_core.RowGroup]
Drafts = Mapping[int, list[int]]


def make_core(config: _core.CoreConfig, model: LoadedModel) -> _core.Core:
    """Raises ConfigError."""
    cos, sin = rope_tables(model.config, config.max_seq_len)
    try:
        return _core.Core(config, cos.data_ptr(), sin.data_ptr())
    except (ValueError, RuntimeError) as error:
        raise ConfigError(str(error)) from None


class Runner(ABC):
    """One step at a time: after core.plan() exactly one of `logits` and, where `pipelined`, `launch`."""

    core: _core.Core
    pipelined = False  # it has `launch`: it can draft, run and sample a step without the host

    @abstractmethod
    def logits(self, groups: Groups, drafts: Drafts, sequences: Mapping[int, Sequence]) -> torch.Tensor:
        """Run the step: float32 [sum of the groups' logits_rows, vocab] in host memory."""

    def launch(self, groups: Groups, sequences: Mapping[int, Sequence]) -> None:
        """Enqueue the step with the device's own drafts and sampling."""
        raise NotImplementedError

    def results(self, step: int, count: int) -> list[int]:
        """Wait for a launched step, one of the last two: a token for each group with logits; -1 where they were not finite."""
        raise NotImplementedError

    def logits_rows(self, rows: list[int], requests: list[Sequence]) -> torch.Tensor:
        """Of the step whose results were read last, before the next is launched: float32 [len(rows), vocab] in host memory. `requests`,
        a row each, get their tokens from the host: what was sampled for them does not count.
        """
        raise NotImplementedError

    @abstractmethod
    def context_logits(self, first: int, count: int) -> torch.Tensor:
        """Of rows of the last step, in plan order, after all else that is read of it and before the next: float32 [count, vocab] in host
        memory.
        """

    def drafts_used(self, step: int, count: int) -> list[int]:
        """Of a step whose results are there: drafts of each group that was planned with some."""
        raise NotImplementedError

    def usage(self) -> dict[str, int]:
        """What it has made so far and keeps, besides the core's pools."""
        return {}

    def forget(self, request_id: int) -> None:  # noqa: B027 - not every runner keeps something
        """The request has ended."""


class CpuRunner(Runner):
    def __init__(self, config: EngineConfig, model: LoadedModel, core_config: _core.CoreConfig) -> None:
        self._config = core_config
        self._model = DecoderModel(model.config, model.weights)
        self.core = make_core(core_config, model)

    def logits(self, groups: Groups, drafts: Drafts, sequences: Mapping[int, Sequence]) -> torch.Tensor:
        tokens: list[int] = []
        wanted: list[int] = []
        for g in groups:
            first = len(tokens)
            tokens += sequences[g.id].token_ids[g.start : g.start + g.rows - g.drafts]
            tokens += drafts.get(g.id, [])[: g.drafts]
            if g.kind == "prefill":
                wanted += range(len(tokens) - g.logits_rows, len(tokens))
            else:
                wanted += range(first, first + g.logits_rows)

        def attend(layer: int, qkv: torch.Tensor) -> torch.Tensor:
            out = torch.empty(qkv.shape[0], self._config.num_q_heads * self._config.head_dim)
            self.core.forward(layer, qkv.data_ptr(), out.data_ptr())
            return out

        _core.set_num_threads(self._config.num_threads)  # of this thread, which may drive other engines too
        torch.set_num_threads(self._config.num_threads)
        with torch.inference_mode():
            return self._model.forward(torch.tensor(tokens), attend, torch.tensor(wanted, dtype=torch.int64))

    def context_logits(self, first: int, count: int) -> torch.Tensor:
        with torch.inference_mode():
            return self._model.logits(torch.arange(first, first + count))
