"""The CUDA runner: tokens, drafting and sampling on the device; decode steps as graphs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.engine.loaded import LoadedModel
from oasiskv.engine.runner import Drafts, Groups, Runner, make_core
from oasiskv.engine.sequence import Sequence
from oasiskv.engine.sm_share import SmShare, gather_shares, sm_shares
from oasiskv.engine.token_table import TokenTable
from oasiskv.errors import ConfigError
from oasiskv.models.cuda_decoder import CudaDecoder

_cuda = getattr(_core, "cuda", None)
_MOST_VOCAB = 1 << 19


def require_cuda() -> None:
    """Raise ConfigError where the backend cuda cannot run."""
    if _cuda is None:
        raise ConfigError("backend = 'cuda': this build has no CUDA; see docs/operations.md, `python3 build.py setup --cuda`")
    if not torch.cuda.is_available():
        raise ConfigError("backend = 'cuda': torch finds no GPU; use backend cpu, or see `oasiskv env`")


def max_logits_rows(core_config: _core.CoreConfig) -> int:
    return core_config.max_batch_size * (max(1, core_config.max_draft_len) if core_config.accept_drafts else 1)


def make_decoder(config: EngineConfig, model: LoadedModel, core_config: _core.CoreConfig) -> CudaDecoder:
    """Raises ConfigError for a model whose shapes the kernels do not serve."""
    m = model.config
    if m.vocab_size > _MOST_VOCAB:
        raise ConfigError(
            f"backend = 'cuda': the model's vocabulary of {m.vocab_size} is larger than the {_MOST_VOCAB} that sampling serves"
        )
    for name in ("hidden_size", "intermediate_size"):
        if getattr(m, name) % 8:
            raise ConfigError(f"backend = 'cuda': the model's {name} = {getattr(m, name)} must be a multiple of 8")
    sizes = (core_config.max_num_tokens, max_logits_rows(core_config))
    return CudaDecoder(model.config, model.weights, config.dtype, *sizes, batch_invariant=config.batch_invariant)


class CudaRunner(Runner):
    def __init__(self, config: EngineConfig, model: LoadedModel, core_config: _core.CoreConfig) -> None:
        batch, max_logits = core_config.max_batch_size, max_logits_rows(core_config)
        self._model = model.decoder or make_decoder(config, model, core_config)
        core_config.norm_eps = self._model.norm_eps
        if model.config.qk_layernorm:
            core_config.qk_norms = [self._model.qk_norm_pointers(i) for i in range(core_config.num_layers)]
        core_config.gather_shares = gather_shares(self._configured_shares(config))
        self.core = make_core(core_config, model)
        self._drafts = core_config.max_draft_len
        self._device_drafts = config.drafter == "ngram" and self._drafts > 0
        self.pipelined = not config.accept_drafts and (config.drafter in ("ngram", "previous") or self._drafts == 0)
        self._vocab = model.config.vocab_size
        self._stream = torch.cuda.ExternalStream(self.core.stream, device=torch.cuda.current_device())
        with torch.cuda.stream(self._stream):
            self._table = TokenTable(batch, core_config.max_seq_len, max_logits)
            self._used = torch.zeros(2, batch, dtype=torch.int32, pin_memory=True)  # drafts, by parity of the step
        self._tuned: set[tuple[int, int, int]] = set()
        self._last_view: _core.StepView | None = None  # of the last launched step
        self._admitted: set[int] = set()  # requests that the table has
        self._behind: dict[int, int] = {}  # of those whose tokens the host samples: how many the table has

    @staticmethod
    def _configured_shares(config: EngineConfig) -> list[SmShare]:
        if config.gather_ctas is None:
            return sm_shares(torch.cuda.get_device_name())
        return [SmShare(float("inf"), config.gather_ctas, config.foreground_sms, config.gather_in_flight)]

    def share_sms(self, shares: list[SmShare]) -> None:
        """In place of the configured ones, for measurements; 0 gather_ctas fetches nothing. Between steps."""
        self.core.share_sms(gather_shares(shares))
        self._tuned.clear()

    def sms_in_use(self) -> tuple[int, int, int]:
        """Of the last launched step: gather CTAs, SMs of products (0: all), and runs in flight a CTA."""
        view = self._last_view
        return (0, 0, 0) if view is None else (view.gather_ctas, view.foreground_sms, view.gather_in_flight)

    def logits(self, groups: Groups, drafts: Drafts, sequences: Mapping[int, Sequence]) -> torch.Tensor:
        view = self.core.view()
        with torch.cuda.stream(self._stream):
            self._send_tokens(groups, sequences)
            for g in groups:
                if g.logits_rows:
                    self._behind[g.id] = len(sequences[g.id].token_ids)
                if g.drafts:
                    self._table.set_drafts(g.table_row, drafts[g.id][: g.drafts])
            logits = self._forward(view)
            count = sum(g.logits_rows for g in groups)
            return logits[:count].cpu()

    def launch(self, groups: Groups, sequences: Mapping[int, Sequence]) -> None:
        random = any(sequences[g.id].params.temperature > 0 for g in groups if g.logits_rows)
        view = self._last_view = self.core.view(int(random))
        step = self.core.last_step
        with torch.cuda.stream(self._stream):
            self._send_tokens(groups, sequences)
        size = (view.rows, view.logits_rows, view.foreground_sms)
        if view.bucketed and size not in self._tuned:
            self._tuned.add(size)
            self._model.tune(view.rows, view.logits_rows, self.core.stream, view.foreground_sms)
        if view.captured or (view.capture and self._capture(view, step, random)):
            self.core.launch()
        else:
            self._enqueue(view, step, random)
            self.core.mark_foreground()

    def _capture(self, view: _core.StepView, step: int, random: bool) -> bool:
        self.core.begin_capture()
        self._enqueue(view, step, random)
        return self.core.end_capture()

    def _enqueue(self, view: _core.StepView, step: int, random: bool) -> None:
        table, stream = self._table, self.core.stream
        if self._device_drafts and view.drafted:
            _cuda.propose_ngram(view.drafted_requests_ptr, view.drafted, table.tables, self._drafts, stream)
            self.core.trim(table.draft_counts.data_ptr(), self._used[step % 2].data_ptr())
        logits = self._forward(view)
        rows = (logits.data_ptr(), self._vocab, view.logits_row_ptr, view.logits_rows, table.tables)
        work = (table.work.data_ptr(), table.result_ptr(step), stream)
        if random:
            _cuda.sample_random(*rows, table.sampling.data_ptr(), *work)
        else:
            _cuda.sample_greedy(*rows, *work)

    def _forward(self, view: _core.StepView) -> torch.Tensor:
        return self._model.forward(
            view.rows,
            view.logits_rows,
            view.row_ptr,
            view.logits_row_ptr,
            self._table,
            self.core.forward,
            self.core.stream,
            view.foreground_sms,
        )

    def _send_tokens(self, groups: Groups, sequences: Mapping[int, Sequence]) -> None:
        """What the host knows and the table does not: new requests, and tokens that were sampled on the host."""
        admitted, behind = self._admitted, self._behind
        for g in groups:
            request_id = g.id
            if request_id not in admitted:
                self._table.admit(g.table_row, sequences[request_id].token_ids, sequences[request_id].params)
                admitted.add(request_id)
            elif behind and (have := behind.get(request_id)) is not None:
                tokens = sequences[request_id].token_ids
                if have < len(tokens):
                    self._table.extend(g.table_row, have, tokens[have:])
                del behind[request_id]

    def results(self, step: int, count: int) -> list[int]:
        self.core.wait_foreground(step)
        return self._table.result(step, count)

    def logits_rows(self, rows: list[int], requests: list[Sequence]) -> torch.Tensor:
        for sequence in requests:
            self._behind[sequence.id] = len(sequence.token_ids)
        with torch.cuda.stream(self._stream):
            return self._model.last_logits(rows).cpu()

    def context_logits(self, first: int, count: int) -> torch.Tensor:
        with torch.cuda.stream(self._stream):
            return self._model.context_logits(first, count, self.core.stream)

    def drafts_used(self, step: int, count: int) -> list[int]:
        return self._used[step % 2, :count].tolist()

    def usage(self) -> dict[str, int]:
        return {"captured_steps": self.core.captured_steps}

    def forget(self, request_id: int) -> None:
        self._admitted.discard(request_id)
        self._behind.pop(request_id, None)
