"""Runners for tests of the engine on the CPU backend: a pipelined one, which promises what CUDA's does, and ones without a model."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping
from types import SimpleNamespace

import torch

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.engine.loaded import LoadedModel
from oasiskv.engine.runner import CpuRunner, Drafts, Groups, make_core
from oasiskv.engine.sequence import Sequence


class LateRunner(CpuRunner):
    """What a step samples (greedily) goes into its own lists at once; the engine learns of it when it asks."""

    pipelined = True

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.tokens: dict[int, list[int]] = {}
        self.sampled: dict[int, list[int]] = {}
        self.broken_at: int | None = None  # a step whose logits are not finite

    def launch(self, groups: Groups, sequences: Mapping[int, Sequence]) -> None:
        for g in groups:
            known, told = self.tokens.setdefault(g.id, []), sequences[g.id].token_ids
            known += told[len(known) :]  # sampled on the host, or a new request
        own = {g.id: SimpleNamespace(token_ids=self.tokens[g.id]) for g in groups}
        self.last = self.logits(groups, {}, own)
        best = self.last.argmax(dim=1).tolist()
        for g, token in zip([g for g in groups if g.logits_rows], best, strict=True):
            self.tokens[g.id].append(token)
        step = self.core.last_step
        self.sampled[step] = [-1] * len(best) if step == self.broken_at else best

    def results(self, step: int, count: int) -> list[int]:
        assert step >= self.core.last_step - 1, "only the last two steps' tokens are kept"
        assert len(self.sampled[step]) == count
        self.read = step
        return self.sampled[step]

    def logits_rows(self, rows: list[int], requests: list[Sequence]) -> torch.Tensor:
        assert self.read == self.core.last_step, "the logits are the next step's"
        for sequence in requests:
            del self.tokens[sequence.id][len(sequence.token_ids) :]
        return self.last[rows]

    def drafts_used(self, step: int, count: int) -> list[int]:
        return [0] * count

    def forget(self, request_id: int) -> None:
        self.tokens.pop(request_id, None)


class HashRunner(CpuRunner):
    """Logits by a hash of all tokens up to their row, above the others' for `likely` ones: a wrong, missing or doubled token changes all
    that follow. The cache is filled with zeros.
    """

    likely: tuple[int, ...] = ()

    def __init__(self, config: EngineConfig, model: LoadedModel, core_config: _core.CoreConfig) -> None:
        self._config, self._vocab = core_config, model.config.vocab_size
        heads, rows = core_config.num_q_heads + 2 * core_config.num_kv_heads, core_config.max_num_tokens
        self._qkv, self._out = torch.zeros(2, rows, heads * core_config.head_dim)
        self.core = make_core(core_config, model)

    def logits(self, groups: Groups, drafts: Drafts, sequences: Mapping[int, Sequence]) -> torch.Tensor:
        torch.set_num_threads(self._config.num_threads)
        for layer in range(self._config.num_layers):
            self.core.forward(layer, self._qkv.data_ptr(), self._out.data_ptr())
        rows = []
        for g in groups:
            tokens = sequences[g.id].token_ids[: g.start + g.rows - g.drafts] + drafts.get(g.id, [])[: g.drafts]
            assert len(tokens) == g.start + g.rows, "a step takes tokens that are not known"
            first = g.start + g.rows - g.logits_rows if g.kind == "prefill" else g.start
            for position in range(first, first + g.logits_rows):
                rng = random.Random(zlib.crc32(repr(tokens[: position + 1]).encode()))
                row = torch.full((self._vocab,), -10.0)
                for token in self.likely:
                    row[token] = rng.random()
                rows.append(row)
        return torch.stack(rows) if rows else torch.empty(0, self._vocab)


class LateHashRunner(LateRunner, HashRunner):
    pass
