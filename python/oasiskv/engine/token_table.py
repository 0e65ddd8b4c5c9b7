"""The tokens of all running requests, on the device: a step reads and writes them without the host."""

from __future__ import annotations

import numpy as np
import torch

from oasiskv import _core
from oasiskv.engine.sampling import SamplingParams

_cuda = getattr(_core, "cuda", None)
# ops/cuda/tokens.h, Sampling
_SAMPLING = np.dtype([("temperature", "<f4"), ("top_p", "<f4"), ("min_p", "<f4"), ("top_k", "<i4"), ("seed", "<u8")])


class TokenTable:
    """A request has a row from admission to its end. Everything is enqueued on torch's current stream; nothing waits for it.

    tokens int32 [rows, stride]: prompt and generated tokens by position; lengths int32 [rows]: tokens known; drafts int32 [rows, 16] and
    draft_counts int32 [rows]; sampling uint8 [rows, 24]: each request's parameters. Entries that are not known are 0 or an earlier
    request's, so that a row which a step computes in vain still reads a valid token.
    """

    def __init__(self, rows: int, stride: int, max_logits: int | None = None) -> None:
        """`stride`: tokens a request may have; `max_logits`: logits rows of a step, `rows` if left out."""

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        self.rows, self.stride = rows, -(-stride // 4) * 4  # the drafter reads four at a time
        max_logits = rows if max_logits is None else max_logits
        self.tokens, self.lengths = zeros(rows, self.stride), zeros(rows)
        self.drafts, self.draft_counts = zeros(rows, _cuda.max_drafts), zeros(rows)
        self.sampling = zeros(rows, _SAMPLING.itemsize, dtype=torch.uint8)
        self.work = zeros(max_logits, _cuda.sample_work_bytes, dtype=torch.uint8)
        # Of the last two steps, in pinned memory, which the device writes into directly.
        self.results = torch.full((2, max_logits), -1, dtype=torch.int32, pin_memory=True)
        self.tables = _cuda.TokenTables(
            self.tokens.data_ptr(), self.stride, self.lengths.data_ptr(), self.drafts.data_ptr(), self.draft_counts.data_ptr()
        )

    def admit(self, row: int, prompt_ids: list[int], params: SamplingParams | None = None) -> None:
        """Give the row to a request with this prompt, of valid ids; without `params` it samples greedily.

        Raises ValueError for a row or a length that the table does not have.
        """
        if not 0 <= row < self.rows:
            raise ValueError(f"row = {row}: the table has rows 0..{self.rows - 1}")
        if not 0 < len(prompt_ids) <= self.stride:
            raise ValueError(f"a prompt of {len(prompt_ids)} tokens: the table holds 1..{self.stride} of a request")
        self._upload(np.array(prompt_ids, dtype=np.int32), self.tokens[row, : len(prompt_ids)])
        self.lengths[row].fill_(len(prompt_ids))
        self.draft_counts[row].fill_(0)
        p = params or SamplingParams()
        with np.errstate(over="ignore"):  # a temperature beyond float32 is infinite
            entry = np.array([(p.temperature, p.top_p, p.min_p, p.top_k, p.seed)], dtype=_SAMPLING)
        self._upload(entry.view(np.uint8), self.sampling[row])

    def extend(self, row: int, start: int, token_ids: list[int]) -> None:
        """Tokens of the row's request from position `start` on, which it has got elsewhere."""
        end = start + len(token_ids)
        self._upload(np.array(token_ids, dtype=np.int32), self.tokens[row, start:end])
        self.lengths[row].fill_(end)

    def set_drafts(self, row: int, token_ids: list[int]) -> None:
        self._upload(np.array(token_ids, dtype=np.int32), self.drafts[row, : len(token_ids)])
        self.draft_counts[row].fill_(len(token_ids))

    def _upload(self, values: np.ndarray, to: torch.Tensor) -> None:
        # From torch's cache of pinned memory, which hands a buffer on only when the copy out of it is done.
        staged = torch.empty(to.shape, dtype=to.dtype, pin_memory=True)
        staged.numpy()[:] = values
        to.copy_(staged, non_blocking=True)

    def result_ptr(self, step: int) -> int:
        """Where the step's sampled tokens go, int32 [max_logits]: the buffers take turns."""
        return self.results[step % len(self.results)].data_ptr()

    def result(self, step: int, count: int) -> list[int]:
        """The first `count` sampled tokens of a step that the caller knows to be done; -1: the logits were not finite."""
        return self.results[step % len(self.results), :count].tolist()
