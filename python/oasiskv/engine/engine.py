"""One step for the whole batch: draft, plan, forward, sample, commit.

A pipelined step is launched before the tokens of the one before are read: lengths are all that planning needs. A request that has
stopped is then in one step more, whose token of it is dropped.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.draft import DraftRequest, make_drafter
from oasiskv.engine.core_config import core_config
from oasiskv.engine.cuda_runner import CudaRunner, require_cuda
from oasiskv.engine.guide import Guides, RowGuide
from oasiskv.engine.loaded import LoadedModel, load_model
from oasiskv.engine.machine import check_pools_fit
from oasiskv.engine.metrics import EngineMetrics
from oasiskv.engine.prefix import BlockNames
from oasiskv.engine.request_check import check_request
from oasiskv.engine.runner import CpuRunner, Runner
from oasiskv.engine.sampler import Sampled, Sampler, Unsampled
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput, Sequence
from oasiskv.errors import CapacityError, EngineError
from oasiskv.tokenizer import IncrementalDetokenizer

_NOT_FINITE = Unsampled("the model returned logits that are not finite")
_log = logging.getLogger(__name__)


class _ContextRows(NamedTuple):
    """Rows of a step that are a prompt whose logits a request wants."""

    request_id: int
    first: int
    count: int


@dataclass
class _Launched:
    """A step whose tokens are not read yet: the requests that get one, and those that were planned with drafts, in the runner's order."""

    step: int
    sampling: list[int]
    drafting: list[int]
    context: list[_ContextRows]


@dataclass
class _Taken:
    """Requests that have taken a step's tokens, whose text is not read yet; statistics of those that ended by them, which the core has
    forgotten already; the outputs of those that failed; and those of prompts' logits."""

    sequences: list[Sequence]
    stats: dict[int, dict[str, Any]]
    errors: list[RequestOutput]
    context: list[RequestOutput]


class Engine:
    """Owns the model, the core and every request's tokens. Driven by one thread; `check`, `start_guide` and `next_id` are safe from
    others.
    """

    def __init__(
        self,
        config: EngineConfig,
        sampler: Sampler | None = None,
        model: LoadedModel | None = None,
        runner: type[Runner] | None = None,
    ) -> None:
        """`sampler`: anything with Sampler's `sample`, instead of the requests' own parameters (evaluation). `model`: already loaded; its
        weights are used up. `runner`: another than the backend's.
        """
        if config.backend == "cuda":
            require_cuda()
        model = model or load_model(config)
        self.config, self.model_config, self.tokenizer = config, model.config, model.tokenizer
        self.core_config = core_config(config, model.config)
        check_pools_fit(config, self.core_config)
        runner = runner or (CudaRunner if config.backend == "cuda" else CpuRunner)
        self._runner = runner(config, model, self.core_config)
        self._core = self._runner.core
        self._drafter = make_drafter(config.drafter, self.tokenizer)
        self._on_host = sampler is not None  # that sampler sees every token
        self._sampler = sampler or Sampler(self.tokenizer.eos_ids)
        self._guides = Guides(self.tokenizer, model.config.vocab_size)
        self._sequences: dict[int, Sequence] = {}
        self._block_names: dict[int, BlockNames] = {}  # of requests that may use the prefix cache
        self._launched: deque[_Launched] = deque()  # oldest first; two while the tokens of one are waited for
        self._error: Exception | None = None  # of a launch, for the next step to raise
        self._ids = itertools.count(1)
        self.metrics = EngineMetrics()

    # ------------------------------------------------------------ requests

    def check(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Raise RequestError or CapacityError for what can never run here."""
        check_request(prompt_ids, params, self.model_config.vocab_size)
        try:
            self._core.check(len(prompt_ids), params.max_tokens)
        except ValueError as error:
            raise CapacityError(str(error)) from None
        self.start_guide(prompt_ids, params)

    def start_guide(self, prompt_ids: list[int], params: SamplingParams) -> RowGuide | None:
        """What follows the request's guide, None without one; compiling takes milliseconds, up to seconds. Raises RequestError."""
        if params.guide is None:
            return None
        return self._guides.start(params.guide, params.end_ids(self.tokenizer.eos_ids), len(prompt_ids))

    def next_id(self) -> int:
        return next(self._ids)

    def add(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        arrival_ns: int | None = None,
        guide: RowGuide | None = None,
    ) -> None:
        """Queue a checked request; `arrival_ns`: time.monotonic_ns() when its client asked, now if left out; `guide`: from start_guide,
        made here if left out.
        """
        guide = guide or self.start_guide(prompt_ids, params)
        cached = self.config.enable_prefix_caching and params.use_cache and not params.return_context_logits
        block_names = BlockNames(params.cache_salt) if cached else None
        self._core.submit(request_id, len(prompt_ids), params.max_tokens, block_names.of(prompt_ids) if block_names else b"")
        if block_names:
            self._block_names[request_id] = block_names
        detokenizer, eos_ids = IncrementalDetokenizer(self.tokenizer), self.tokenizer.eos_ids
        arrival_ns = time.monotonic_ns() if arrival_ns is None else arrival_ns
        self._sequences[request_id] = Sequence(request_id, prompt_ids, params, detokenizer, eos_ids, arrival_ns, guide)

    def stop(self, request_id: int, reason: str, error: str | None = None, spoiled: bool = False) -> RequestOutput | None:
        """End a request from outside, in any state; None if it is not known (any more). `spoiled`: its blocks leave the prefix cache."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        if spoiled:
            self._block_names.pop(request_id, None)
            self._core.forget(request_id)
        stats = self._end(sequence)
        return sequence.cut_short(reason, error, stats)

    def _end(self, sequence: Sequence, step: int = 0) -> dict[str, Any]:
        """`step`: the last that it had a part in; 0: the last of all."""
        try:
            stats = self._stats(sequence, step)
        except Exception:  # of a device that is lost: the request ends all the same
            _log.exception("request %d: its statistics are lost", sequence.id)
            stats = {}
        block_names = self._block_names.pop(sequence.id, None)
        self._core.end(sequence.id, block_names.of(sequence.token_ids) if block_names else b"")
        self._runner.forget(sequence.id)
        self._drafter.forget(sequence.id)
        del self._sequences[sequence.id]
        if self._error and not self._sequences:  # else whoever comes next would end by it
            _log.error("a launch failed for requests that have all ended since", exc_info=self._error)
            self._error = None
        return stats

    def _stats(self, sequence: Sequence, step: int) -> dict[str, Any]:
        core = self._core.stats(sequence.id, step)
        return {
            "prompt_tokens": sequence.prompt_tokens,
            "generated_tokens": sequence.generated,
            "top_k_blocks": self.config.top_k_blocks,
            "fetch_cap_blocks": self.config.fetch_cap_blocks,
            "draft_tokens": sequence.drafted,
            "draft_accepted": sequence.accepted,
            **sequence.timings(),
            **core,
        }

    # ------------------------------------------------------------ the step

    def step(self) -> list[RequestOutput]:
        """Run one step; the outputs of every request that yielded something. [] when nothing can run, or its tokens come next time.

        Raises what a step raised, when the tokens of those before it are told. Those whose caches a step that broke off may have changed
        run no more: steps raise who they are until they are ended. EngineLoop ends all.
        """
        if not self._launched and self._error:
            error, self._error = self._error, None
            raise error
        if not self._runner.pipelined or self._on_host:
            return self._whole_step()
        # The device has a step to run while the oldest one's tokens are read; the next is launched before they become text. While the host
        # samples for somebody, the next step needs that token: it is launched between.
        depth = 1 if any(s.params.sampled_on_host for s in self._sequences.values()) else 2
        if len(self._launched) < depth and self._launch() and len(self._launched) < depth:
            return []
        if not self._launched:
            return []
        step = self._launched[0].step
        taken = self._collect()
        self._tell_progress([sequence.id for sequence in taken.sequences], step)
        if len(self._launched) < depth:
            self._launch()
        return self._outputs(taken)

    def _launch(self) -> bool:
        """False when nothing can run. An error is kept, for step() to raise when the tokens of what was launched before are read."""
        if self._error:
            return False
        try:
            return self._launch_next()
        except Exception as error:
            self._error = error
            return False

    def _launch_next(self) -> bool:
        groups = self._plan(dict(self._core.begin_step()))
        if not groups:
            return False
        try:
            self._runner.launch(groups, self._sequences)
            sampling = [g.id for g in groups if g.logits_rows]
            self._core.commit(dict.fromkeys(sampling, 1))
        finally:
            self._core.abort_step()  # does nothing once the step is committed
        drafting = [g.id for g in groups if g.drafts]
        self._launched.append(_Launched(self._core.last_step, sampling, drafting, self._context_rows(groups)))
        return True

    def _collect(self) -> _Taken:
        """Waits for the tokens of the oldest launched step. A failure before they are all there takes none: the next call has them."""
        launched, sequences = self._launched[0], self._sequences
        tokens = self._runner.results(launched.step, len(launched.sampling))
        drafts_used = self._runner.drafts_used(launched.step, len(launched.drafting))
        sampled: dict[int, Sampled | Unsampled] = {}
        on_host: dict[int, Sequence] = {}  # by logits row
        for row, (i, token) in enumerate(zip(launched.sampling, tokens, strict=True)):
            sequence = sequences.get(i)
            if sequence is None:  # it has ended since
                continue
            if token < 0:
                sampled[i] = _NOT_FINITE
            elif sequence.params.sampled_on_host:
                on_host[row] = sequence
            else:
                sampled[i] = Sampled(token)
        if on_host:
            requests = list(on_host.values())
            logits = self._runner.logits_rows(list(on_host), requests)
            sampled.update(zip([s.id for s in requests], self._sampler.sample(logits, [s.row for s in requests]), strict=True))
        context = self._read_context(launched.context)
        self._launched.popleft()
        for i, used in zip(launched.drafting, drafts_used, strict=True):
            if i in sequences:
                sequences[i].drafted += used
        taken: dict[int, Sequence] = {}
        failed: dict[int, str] = {}
        for i in launched.sampling:
            self._take(i, sampled.get(i), taken, failed)
        return self._end_finished(taken, failed, context, launched.step)

    def _take(self, request_id: int, token: Sampled | Unsampled | None, taken: dict[int, Sequence], failed: dict[int, str]) -> None:
        """Sort a request into `taken` with its token, or into `failed`; nothing for one that has ended since."""
        if isinstance(token, Unsampled):
            failed[request_id] = token.error
        elif token is not None:
            taken[request_id] = self._sequences[request_id]
            taken[request_id].take(token)

    def _whole_step(self) -> list[RequestOutput]:
        drafts = self._propose()
        groups = self._plan({i: len(d) for i, d in drafts.items()})
        if not groups:
            return []
        try:
            logits = self._runner.logits(groups, drafts, self._sequences)
            outputs = self._finish_step(groups, drafts, logits, self._read_context(self._context_rows(groups)))
        finally:
            self._core.abort_step()  # does nothing once the step is committed
        self._tell_progress([g.id for g in groups if g.logits_rows])
        return outputs

    def _plan(self, drafts: dict[int, int]) -> list[_core.RowGroup]:
        groups = self._core.plan(drafts)
        for g in groups:
            self._sequences[g.id].scheduled()
        return groups

    def _context_rows(self, groups: list[_core.RowGroup]) -> list[_ContextRows]:
        found, first = [], 0
        for g in groups:
            if g.kind == "prefill" and self._sequences[g.id].params.return_context_logits:
                found.append(_ContextRows(g.id, first, g.rows))
            first += g.rows
        return found

    def _read_context(self, rows: list[_ContextRows]) -> list[RequestOutput]:
        """Of the runner's last step, after all else that is read of it."""
        wanted = [r for r in rows if r.request_id in self._sequences]
        return [RequestOutput(r.request_id, context_logits=self._runner.context_logits(r.first, r.count).numpy()) for r in wanted]

    def _propose(self) -> dict[int, list[int]]:
        wanted = self._core.begin_step()
        if not wanted:
            return {}
        requests = [DraftRequest(i, self._sequences[i].token_ids, n) for i, n in wanted]
        try:
            proposals = self._drafter.propose(requests)
        except Exception:  # drafts only help: without them the step is right too
            _log.exception("the drafter failed: this step has no drafts")
            return {}
        return {r.id: d[: r.count] for r, d in zip(requests, proposals, strict=True) if d}

    def _finish_step(
        self, groups: list[_core.RowGroup], drafts: dict[int, list[int]], logits: torch.Tensor, context: list[RequestOutput]
    ) -> list[RequestOutput]:
        yielded: dict[int, int] = {}
        taken: dict[int, Sequence] = {}
        failed: dict[int, str] = {}
        first_row = 0
        pending: list[tuple[_core.RowGroup, int]] = []  # group, its first logits row
        for g in groups:
            if g.logits_rows:
                pending.append((g, first_row))
                first_row += g.logits_rows
        # Round r samples row r of every group whose first r drafts were all right; rows of one group depend on each other.
        round_ = 0
        while pending:
            rows = [row0 + round_ for _, row0 in pending]
            try:
                sampled = self._sample(pending, logits[rows])
            except Exception:
                if round_ == 0:
                    raise
                _log.exception("what follows accepted drafts could not be sampled: the step ends with the tokens it has")
                break
            further = []
            for (g, row0), token in zip(pending, sampled, strict=True):
                yielded[g.id] = round_ + 1
                self._take(g.id, token, taken, failed)
                if g.id in failed:
                    continue
                draft = drafts.get(g.id, [])
                if round_ + 1 < g.logits_rows and not taken[g.id].finish_reason and draft[round_] == token.token_id:
                    further.append((g, row0))
            pending = further
            round_ += 1
        for g in groups:
            if g.drafts:
                self._sequences[g.id].drafted += g.drafts
                self._sequences[g.id].accepted += yielded[g.id] - 1
        self._core.commit(yielded)
        return self._outputs(self._end_finished(taken, failed, context))

    def _sample(self, pending: list[tuple[_core.RowGroup, int]], logits: torch.Tensor) -> list[Sampled | Unsampled]:
        rows = [self._sequences[g.id].row for g, _ in pending]
        good = torch.isfinite(logits).all(dim=1).tolist()
        if all(good):
            return list(self._sampler.sample(logits, rows))
        kept = [i for i, ok in enumerate(good) if ok]
        sampled = iter(self._sampler.sample(logits[kept], [rows[i] for i in kept]) if kept else [])
        return [next(sampled) if ok else _NOT_FINITE for ok in good]

    def _end_finished(self, taken: dict[int, Sequence], failed: dict[int, str], context: list[RequestOutput], step: int = 0) -> _Taken:
        stats = {i: self._end(sequence, step) for i, sequence in taken.items() if sequence.finish_reason and i not in failed}
        # What made logits not finite may be in the cache: whoever comes with the same prefix computes it anew.
        errors = [output for i, error in failed.items() if (output := self.stop(i, "error", error, spoiled=error == _NOT_FINITE.error))]
        return _Taken([sequence for i, sequence in taken.items() if i not in failed], stats, errors, context)

    def _outputs(self, taken: _Taken) -> list[RequestOutput]:
        outputs = []
        for sequence in taken.sequences:
            output = RequestOutput(sequence.id)
            sequence.show(output)
            if sequence.finish_reason:
                output.finished, output.finish_reason, output.stats = True, sequence.finish_reason, taken.stats[sequence.id]
            if output.token_ids or output.finished:
                outputs.append(output)
        return taken.context + outputs + taken.errors

    def _tell_progress(self, request_ids: list[int], step: int = 0) -> None:
        """Of those that a step gave tokens, now and then: what a long request does is counted before its end."""
        if not self.metrics.wants_progress():
            return
        try:
            for i in request_ids:
                if sequence := self._sequences.get(i):
                    self.metrics.progress(i, self._stats(sequence, step))
        except Exception:  # of a device that is lost: the step's tokens are told all the same
            _log.exception("the statistics of running requests are lost")

    @property
    def steps(self) -> int:
        """Planned so far."""
        return self._core.last_step

    @property
    def runner(self) -> Runner:
        """What runs its steps: for benchmarks."""
        return self._runner

    def request_ids(self) -> list[int]:
        """Requests that have not ended."""
        return list(self._sequences)

    def stats(self, request_id: int) -> dict[str, Any]:
        """Of a request that has not ended, as of the last step; waits for its background."""
        return self._stats(self._sequences[request_id], 0)

    def usage(self) -> dict[str, int]:
        """Occupancy of the pools, where what is only cached counts as free; counts of requests by state; blocks of the prefix cache: those
        that it has, and in all those that were reused and evicted; and on CUDA captured steps (two a size).
        """
        return self._core.usage() | self._runner.usage()

    def take_trace(self) -> list[dict[str, Any]]:
        """Decisions since the last call, with `trace=True`; see docs/design.md, section 5."""
        return self._core.take_trace()

    def close(self) -> None:
        """Wait for what is under way: weights and buffers that it reads may go then."""
        with contextlib.suppress(Exception):  # a device that is lost runs nothing any more
            self._core.drain()

    def drain(self) -> None:
        """Wait for the background. Raises EngineError when a worker failed: this engine is then unusable."""
        try:
            self._core.drain()
        except Exception as error:
            raise EngineError(f"the background pipeline failed: {error}") from error
