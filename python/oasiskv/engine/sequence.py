"""One request on the token side: what was generated, what of it may be shown, and when it ends."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oasiskv.engine.guide import RowGuide
from oasiskv.engine.sampler import Sampled, SampleRow
from oasiskv.engine.sampling import SamplingParams
from oasiskv.tokenizer import IncrementalDetokenizer


@dataclass(slots=True)
class RequestOutput:
    """What a request yielded since its last output: whole tokens, with the text they stand for.

    Joined, the texts and token ids of all outputs are the answer. So are the logits, float32 [tokens, vocab]: the prompt's come in parts
    before the first token, a part as soon as it is computed.
    """

    request_id: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[Sampled] = field(default_factory=list)
    context_logits: np.ndarray | None = field(default=None, compare=False)
    generation_logits: np.ndarray | None = field(default=None, compare=False)
    finished: bool = False
    finish_reason: str | None = None  # stop, length, cancelled or error
    error: str | None = None
    stats: dict[str, Any] | None = None  # on the last output


class StopText:
    """Holds text back while it may be the beginning of a stop string; cuts at the stop string that is complete first.

    Of several that end together the longest counts: the cut does not depend on how the text is split into tokens.
    """

    def __init__(self, stop: tuple[str, ...], include: bool) -> None:
        self._stop = stop
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return (text that may be shown, whether a stop string was met)."""
        if not self._stop:
            return text, False
        self._held += text
        hits = [(at, s) for s in self._stop if (at := self._held.find(s)) >= 0]
        if hits:
            at, s = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            shown = self._held[: at + len(s) if self._include else at]
            self._held = ""
            return shown, True
        keep = max(self._overlap(s) for s in self._stop)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown, False

    def _overlap(self, stop: str) -> int:
        """Length of the longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    @property
    def holding(self) -> bool:
        return bool(self._held)

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class Sequence:
    """Prompt, output and end of one request. No token is appended after the one that ends it."""

    def __init__(
        self,
        request_id: int,
        prompt_ids: list[int],
        params: SamplingParams,
        detokenizer: IncrementalDetokenizer,
        eos_ids: frozenset[int],
        arrival_ns: int,
        guide: RowGuide | None = None,
    ) -> None:
        self.id = request_id
        self.token_ids = list(prompt_ids)  # the output follows; only ever appended to
        self.prompt_tokens = len(prompt_ids)
        self.params = params
        self.row = SampleRow(params, self.token_ids, self.prompt_tokens, guide)  # for the sampler
        self.finish_reason: str | None = None
        self.drafted = 0
        self.accepted = 0
        self._stops = params.end_ids(eos_ids)
        self._detokenizer = detokenizer
        self._stop_text = StopText(params.stop, params.include_stop_text)
        self._unread: list[int] = []  # tokens whose text is not looked at yet
        self._stop_met = False
        self._hidden_text = ""  # what was generated and not shown yet, because part of it may belong to a stop string
        self._hidden_ids: list[int] = []
        self._hidden_logprobs: list[Sampled] = []
        self._hidden_logits: list[np.ndarray] = []
        self._arrival_ns = arrival_ns
        self._first_scheduled_ns = self._first_token_ns = self._last_token_ns = 0

    @property
    def generated(self) -> int:
        return len(self.token_ids) - self.prompt_tokens

    def scheduled(self) -> None:
        """It is in the step that was planned just now."""
        self._first_scheduled_ns = self._first_scheduled_ns or time.monotonic_ns()

    def take(self, sampled: Sampled) -> None:
        """Take one token: whether it ends the request is known then. Its text waits for `show`, unless a stop string may be in it."""
        self._last_token_ns = time.monotonic_ns()
        self._first_token_ns = self._first_token_ns or self._last_token_ns
        token, params = sampled.token_id, self.params
        self.token_ids.append(token)
        self._hidden_ids.append(token)
        if sampled.logits is not None:
            self._hidden_logits.append(sampled.logits)
            sampled.logits = None
        if params.logprobs is not None:
            self._hidden_logprobs.append(sampled)
        generated = self.generated
        if token in self._stops and generated >= params.min_tokens:
            self.finish_reason = "stop"
            return
        self._unread.append(token)
        last, guide = generated >= params.max_tokens, self.row.guide
        if guide and (last or not self._stops) and guide.complete(self.token_ids):  # no token can follow but one that ends it
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "length"
        if params.stop:
            self._read()

    def _read(self) -> None:
        for token in self._unread:
            text, met = self._stop_text.push(self._detokenizer.push(token))
            self._hidden_text += text
            if met:
                self._stop_met, self.finish_reason = True, "stop"
        self._unread.clear()

    def show(self, output: RequestOutput) -> None:
        """Put what may be shown of what was taken into `output`."""
        self._read()
        if self.finish_reason and not self._stop_met:  # no token follows: nothing is held back any more
            text, met = self._stop_text.push(self._detokenizer.flush())
            self._hidden_text += text + ("" if met else self._stop_text.flush())
        elif not self.finish_reason and (self._stop_text.holding or not self._detokenizer.complete):
            return
        output.text += self._hidden_text
        output.token_ids += self._hidden_ids
        output.logprobs += self._hidden_logprobs
        if self._hidden_logits:
            output.generation_logits = np.stack(self._hidden_logits)
        self._hidden_text, self._hidden_ids, self._hidden_logprobs, self._hidden_logits = "", [], [], []

    def cut_short(self, reason: str, error: str | None, stats: dict[str, Any]) -> RequestOutput:
        """End it from outside; everything held back is shown."""
        self.finish_reason = reason
        output = RequestOutput(self.id, finished=True, finish_reason=reason, error=error, stats=stats)
        self.show(output)
        return output

    def timings(self) -> dict[str, float]:
        """When it came, was first in a step, and had its first and last token, of time.monotonic_ns()'s clock, 0 for what did not happen;
        ttft_ms: arrival to first token; tpot_ms: mean time of each further token.
        """
        further = max(1, self.generated - 1)
        return {
            "arrival_ns": self._arrival_ns,
            "first_scheduled_ns": self._first_scheduled_ns,
            "first_token_ns": self._first_token_ns,
            "last_token_ns": self._last_token_ns,
            "ttft_ms": max(0, self._first_token_ns - self._arrival_ns) / 1e6,
            "tpot_ms": (self._last_token_ns - self._first_token_ns) / 1e6 / further,
        }
