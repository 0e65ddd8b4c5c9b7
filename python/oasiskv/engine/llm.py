"""The class most users meet: prompts in, answers out; blocking, streaming or async."""

from __future__ import annotations

import asyncio
import operator
import queue
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from oasiskv.config import EngineConfig
from oasiskv.engine.loop import EngineLoop
from oasiskv.engine.sampler import Sampled
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import ConfigError, RequestError

Prompt = str | list[int]


@dataclass
class GenerationResult:
    """One prompt's whole answer. `finish_reason` is stop, length, cancelled or error (then `error` says why).

    context_logits, generation_logits: float32 [tokens, vocab] once finished; None if not asked for, or there are none.
    """

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Sampled] = field(default_factory=list)
    context_logits: np.ndarray | None = field(default=None, compare=False)
    generation_logits: np.ndarray | None = field(default=None, compare=False)
    finish_reason: str | None = None
    error: str | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    _parts: dict[str, list[np.ndarray]] = field(default_factory=dict, repr=False)

    def take(self, output: RequestOutput) -> None:
        self.text += output.text
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        for name in ("context_logits", "generation_logits"):
            part = getattr(output, name)
            if part is not None:
                self._parts.setdefault(name, []).append(part)
            if output.finished and name in self._parts:
                setattr(self, name, np.concatenate(self._parts.pop(name)))
        if output.finished:
            self.finish_reason, self.error, self.stats = output.finish_reason, output.error, output.stats or {}


class LLM:
    """A model, loaded. Use as a context manager or call `close`.

    Raises ConfigError, CheckpointError on construction; RequestError or CapacityError for a prompt that can never run.
    """

    def __init__(self, config: EngineConfig | None = None, **options: Any) -> None:
        if config is not None and options:
            raise ConfigError(f"LLM(config, {next(iter(options))}=...): give a config or its fields, not both")
        self._loop = EngineLoop(config or EngineConfig(**options))
        self.tokenizer = self._loop.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[GenerationResult]:
        """Answer all prompts as one batch; results in prompt order. Nothing is submitted if one of them is refused.

        They may be more than `max_queue_size`: what finds no place waits here for one, as in `stream`.
        """
        many: list[Prompt] = [prompts] if isinstance(prompts, str) or _is_ids(prompts) else list(prompts)
        each = _spread(params, len(many))
        encoded = [self._encode(p) for p in many]
        for ids, one in zip(encoded, each, strict=True):
            self._loop.check(ids, one)
        results = [GenerationResult() for _ in many]
        outputs: queue.SimpleQueue[tuple[int, RequestOutput]] = queue.SimpleQueue()
        requests: list[int] = []
        try:
            for i, (ids, one) in enumerate(zip(encoded, each, strict=True)):
                requests.append(self._loop.submit(ids, one, lambda o, i=i: outputs.put((i, o)), wait=True))
            left = len(many)
            while left:
                i, output = outputs.get()
                results[i].take(output)
                left -= output.finished
        except BaseException:
            for request_id in requests:
                self._loop.cancel(request_id)
            raise
        return results

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield outputs as they come; closing the iterator cancels the request."""
        outputs: queue.SimpleQueue[RequestOutput] = queue.SimpleQueue()
        request_id = self._loop.submit(self._encode(prompt), params or SamplingParams(), outputs.put, wait=True)
        try:
            while True:
                output = outputs.get()
                yield output
                if output.finished:
                    return
        finally:
            self._loop.cancel(request_id)

    async def stream_async(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """The same for asyncio; cancelling the task cancels the request. Raises QueueFullError where `stream` waits for a place."""
        loop = asyncio.get_running_loop()
        outputs: asyncio.Queue[RequestOutput] = asyncio.Queue()

        def on_output(output: RequestOutput) -> None:
            try:
                loop.call_soon_threadsafe(outputs.put_nowait, output)
            except RuntimeError:  # the event loop is closed: nobody waits any more
                self._loop.cancel(output.request_id)

        request_id = self._loop.submit(self._encode(prompt), params or SamplingParams(), on_output)
        try:
            while True:
                output = await outputs.get()
                yield output
                if output.finished:
                    return
        finally:
            self._loop.cancel(request_id)

    async def generate_async(self, prompt: Prompt, params: SamplingParams | None = None) -> GenerationResult:
        """Answer one prompt; concurrent calls share the batch."""
        result = GenerationResult()
        async for output in self.stream_async(prompt, params):
            result.take(output)
        return result

    def cancel(self, request_id: int) -> None:
        """Cancel a request by the id in its outputs."""
        self._loop.cancel(request_id)

    def usage(self) -> dict[str, Any]:
        """Pool occupancy after the last step."""
        return self._loop.usage()

    @property
    def engine_loop(self) -> EngineLoop:
        """What it stands on: takes requests by callback (`submit`), and says how the engine gets on."""
        return self._loop

    def close(self) -> None:
        self._loop.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, max_tokens=self._loop.max_seq_len)
        try:
            return [operator.index(token) for token in prompt]
        except TypeError as error:
            raise RequestError(f"a prompt must be text or a list of token ids: {error}") from None


def _is_ids(prompts: Any) -> bool:
    return isinstance(prompts, list) and bool(prompts) and all(isinstance(t, int) for t in prompts)


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling params for {count} prompts: give one, or one a prompt")
    return list(params)
