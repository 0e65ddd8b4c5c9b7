"""OpenAI's fields -> the executor's parameters (executor/params.py). Pure functions; what values may be, the executor says."""

from __future__ import annotations

import json
from typing import Any

from oasiskv.errors import RequestError
from oasiskv.serve.openai.schema import MAX_SEQUENCES, ChatRequest, CompletionRequest

_SAME = {
    "temperature", "top_p", "presence_penalty", "frequency_penalty", "stop", "top_k", "min_p", "repetition_penalty", "min_tokens",
    "ignore_eos", "stop_token_ids", "cache_salt",
}  # fmt: skip
_SEEDS = 2**64
_JSON_OBJECT = '{"type": "object"}'
_GUIDES = {"guided_json": "json_schema", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "ebnf_grammar"}


def prompts(request: CompletionRequest) -> list[str | list[int]]:
    """One or many -> many. Raises RequestError for none, and for more sequences than one request may ask for."""
    prompt = request.prompt
    single = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
    many: list[Any] = [prompt] if single else list(prompt)
    if not many:
        raise RequestError("prompt: give at least one")
    if len(many) * request.n > MAX_SEQUENCES:
        raise RequestError(f"prompt: {len(many)} prompts with n = {request.n}: at most {MAX_SEQUENCES} sequences a request")
    return many


def messages(request: ChatRequest) -> list[dict[str, str]]:
    """For the chat template: text alone. A developer's message is what templates call the system's."""
    return [
        {
            "role": "system" if message.role == "developer" else message.role,
            "content": message.content if isinstance(message.content, str) else "".join(part.text for part in message.content),
        }
        for message in request.messages
    ]


def completion_params(request: CompletionRequest) -> dict[str, Any]:
    """Raises RequestError."""
    params = _common(request)
    params["max_tokens"] = request.max_tokens
    if request.logprobs is not None:
        params["logprobs"] = request.logprobs
    return params


def chat_params(request: ChatRequest, prompt_tokens: int, max_seq_len: int) -> dict[str, Any]:
    """Without max_tokens an answer may take what the context leaves. Raises RequestError."""
    params = _common(request)
    limit = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    # A prompt that fills the context leaves nothing: the executor refuses it, with its size.
    params["max_tokens"] = max(1, max_seq_len - prompt_tokens) if limit is None else limit
    if request.logprobs:
        params["logprobs"] = request.top_logprobs or 0
    return params


def sequences(params: dict[str, Any], count: int, n: int, seed: int | None, fresh_seeds: list[int]) -> list[dict[str, Any]]:
    """The parameters of n sequences of each of `count` prompts, prompt by prompt: sequence i of a prompt has seed + i.

    fresh_seeds: one a prompt, used where the client gave none.
    """
    firsts = fresh_seeds if seed is None else [seed] * count
    return [{**params, "seed": (first + i) % _SEEDS} for first in firsts for i in range(n)]


def finish_reason(reason: str) -> str:
    """The engine's `stop` and `length` are OpenAI's."""
    if reason not in ("stop", "length"):
        raise ValueError(f"finish_reason = {reason!r}: not the end of an answer")
    return reason


def _common(request: CompletionRequest | ChatRequest) -> dict[str, Any]:
    params = request.model_dump(include=_SAME, exclude_none=True)
    if request.logit_bias is not None:
        params["logit_bias"] = _logit_bias(request.logit_bias)
    guide = _guide(request)
    if guide is not None:
        params["guide"] = guide
    return params


def _logit_bias(bias: dict[str, float]) -> list[list[float]]:
    try:
        return [[int(token), value] for token, value in bias.items()]
    except ValueError:
        raise RequestError("logit_bias: its keys must be token ids in decimal") from None


def _guide(request: CompletionRequest | ChatRequest) -> dict[str, str] | None:
    """At most one may be given, response_format included."""
    found: list[tuple[str, dict[str, str]]] = []
    for name, kind in _GUIDES.items():
        value = getattr(request, name)
        if value is not None:
            found.append((name, {"kind": kind, "text": value if isinstance(value, str) else json.dumps(value)}))
    form = request.response_format if isinstance(request, ChatRequest) else None
    if form and form.type == "json_object":
        found.append(("response_format", {"kind": "json_schema", "text": _JSON_OBJECT}))
    elif form and form.json_schema:
        found.append(("response_format", {"kind": "json_schema", "text": json.dumps(form.json_schema.schema_)}))
    if len(found) > 1:
        raise RequestError(f"{found[1][0]}: {found[0][0]} is given too, and one guide is all that a request can have")
    return found[0][1] if found else None
