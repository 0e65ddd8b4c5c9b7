"""Engines whose prompts cost seconds instead of minutes: the tiers are filled with random keys and values, the layers do not run.

Decoding then runs for real, over KV that means nothing: the selections of successive steps have little in common, so that every head
fetches as much as its cap allows. That is the most that the link can be asked for.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.engine.cuda_runner import CudaRunner
from oasiskv.engine.loaded import LoadedModel
from oasiskv.engine.runner import Groups
from oasiskv.engine.sequence import Sequence


class SyntheticRunner(CudaRunner):
    """Rows of a step with prompts in it are random; no attention is computed for them, and their token is 0."""

    def __init__(self, config: EngineConfig, model: LoadedModel, core_config: _core.CoreConfig) -> None:
        super().__init__(config, model, core_config)
        width = (core_config.num_q_heads + 2 * core_config.num_kv_heads) * core_config.head_dim
        rows = torch.randn(core_config.max_num_tokens, width, device="cuda", generator=torch.Generator("cuda").manual_seed(1))
        self._random = rows.to(getattr(torch, config.dtype))
        self._zeros = torch.zeros(core_config.max_batch_size, model.config.vocab_size, device="cuda")
        self._layers = core_config.num_layers
        self._filling = False

    def launch(self, groups: Groups, sequences: Mapping[int, Sequence]) -> None:
        self._filling = any(g.kind == "prefill" for g in groups)
        super().launch(groups, sequences)

    def _forward(self, view: _core.StepView) -> torch.Tensor:
        if not self._filling:
            return super()._forward(view)
        for layer in range(self._layers):
            self.core.forward(layer, self._random.data_ptr(), 0)
        return self._zeros[: view.logits_rows]
