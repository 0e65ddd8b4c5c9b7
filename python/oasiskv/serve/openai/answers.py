"""Outputs of the executor -> OpenAI's objects, whole and in chunks."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, field
from typing import Any

from oasiskv.executor.protocol import Output
from oasiskv.serve.openai.translate import finish_reason

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

    text: str = ""
    reason: str = ""
    parts: list[str] = field(default_factory=list)

    def take(self, output: Output) -> None:
        self.parts.append(output.text)
        if output.finished:
            self.text, self.reason = "".join(self.parts), finish_reason(output.finish_reason or "")


class ChatAnswers:
    """Of /v1/chat/completions."""

    object, chunk_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def openings(self, count: int) -> list[Choice]:
        """The first chunk of each sequence."""
        return [_delta(i, {"role": "assistant", "content": ""}) for i in range(count)]

    def pieces(self, index: int, output: Output) -> list[Choice]:
        found = [_delta(index, {"content": output.text})] if output.text else []
        return [*found, _delta(index, {}, finish_reason(output.finish_reason or ""))] if output.finished else found

    def choice(self, index: int, whole: Whole) -> Choice:
        message = {"role": "assistant", "content": whole.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": None, "finish_reason": whole.reason}


class CompletionAnswers:
    """Of /v1/completions."""

    object, chunk_object, prefix = "text_completion", "text_completion", "cmpl-"

    def openings(self, count: int) -> list[Choice]:
        return []

    def pieces(self, index: int, output: Output) -> list[Choice]:
        reason = finish_reason(output.finish_reason or "") if output.finished else None
        return [_text(index, output.text, reason)] if output.text or reason else []

    def choice(self, index: int, whole: Whole) -> Choice:
        return _text(index, whole.text, whole.reason)


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


def _delta(index: int, delta: dict[str, str], reason: str | None = None) -> Choice:
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}


def _text(index: int, text: str, reason: str | None) -> Choice:
    return {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
