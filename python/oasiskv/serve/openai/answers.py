"""Outputs of the executor -> OpenAI's objects, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from oasiskv.executor.protocol import Output
from oasiskv.serve.openai import logprobs
from oasiskv.serve.openai.translate import finish_reason
from oasiskv.tokenizer import Tokenizer

Choice = dict[str, Any]


@dataclass
class Usage:
    """Tokens of the prompts, each counted once whatever n is, and of all answers."""

    prompt_tokens: int
    completion_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        total = self.prompt_tokens + self.completion_tokens
        return {"prompt_tokens": self.prompt_tokens, "completion_tokens": self.completion_tokens, "total_tokens": total}


@dataclass
class Whole:
    """A sequence's outputs put together."""

    parts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[list[Any]] = field(default_factory=list)
    reason: str = ""

    def take(self, output: Output) -> None:
        self.parts.append(output.text)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        if output.finished:
            self.reason = finish_reason(output.finish_reason or "")

    @property
    def text(self) -> str:
        return "".join(self.parts)


class ChatAnswers:
    """Of /v1/chat/completions."""

    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def openings(self, count: int) -> list[Choice]:
        """The first chunk of each sequence."""
        return [_delta(i, {"role": "assistant", "content": ""}) for i in range(count)]

    def pieces(self, index: int, output: Output) -> list[Choice]:
        found = []
        if output.text or output.logprobs:
            found.append(_delta(index, {"content": output.text}, self._logprobs(output)))
        if output.finished:
            found.append(_delta(index, {}, reason=finish_reason(output.finish_reason or "")))
        return found

    def choice(self, index: int, whole: Whole) -> Choice:
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": self._logprobs(whole), "finish_reason": whole.reason}

    def _logprobs(self, what: Output | Whole) -> dict[str, Any] | None:
        """None where they were not asked for."""
        return logprobs.of_chat(self._tokenizer, what.token_ids, what.logprobs) if what.logprobs else None


class CompletionAnswers:
    """Of /v1/completions."""

    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offsets: dict[int, int] = {}  # sequence -> characters of its tokens so far

    def openings(self, count: int) -> list[Choice]:
        return []

    def pieces(self, index: int, output: Output) -> list[Choice]:
        reason = finish_reason(output.finish_reason or "") if output.finished else None
        return [_text(index, output.text, self._logprobs(index, output), reason)] if output.text or output.logprobs or reason else []

    def choice(self, index: int, whole: Whole) -> Choice:
        return _text(index, whole.text, self._logprobs(index, whole), whole.reason)

    def _logprobs(self, index: int, what: Output | Whole) -> dict[str, Any] | None:
        if not what.logprobs:
            return None
        offset = self._offsets.get(index, 0)
        found, self._offsets[index] = logprobs.of_completion(self._tokenizer, what.token_ids, what.logprobs, offset)
        return found


class Envelope:
    """What all objects of one answer have in common."""

    def __init__(self, model: str, answers: ChatAnswers | CompletionAnswers, include_usage: bool) -> None:
        self._common = {"id": f"{answers.prefix}{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._answers = answers
        self._include_usage = include_usage

    def chunk(self, choice: Choice) -> dict[str, Any]:
        return self._chunk([choice], None)

    def last_chunks(self, usage: Usage) -> list[dict[str, Any]]:
        """The chunk without choices that has the usage, if it was asked for."""
        return [self._chunk([], usage.as_dict())] if self._include_usage else []

    def whole(self, choices: list[Choice], usage: Usage) -> dict[str, Any]:
        return {**self._common, "object": self._answers.object, "choices": choices, "usage": usage.as_dict()}

    def _chunk(self, choices: list[Choice], usage: dict[str, int] | None) -> dict[str, Any]:
        chunk = {**self._common, "object": self._answers.chunk_object, "choices": choices}
        return {**chunk, "usage": usage} if self._include_usage else chunk


def _delta(index: int, delta: dict[str, str], found: dict[str, Any] | None = None, reason: str | None = None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": found, "finish_reason": reason}


def _text(index: int, text: str, found: dict[str, Any] | None, reason: str | None) -> Choice:
    return {"index": index, "text": text, "logprobs": found, "finish_reason": reason}
