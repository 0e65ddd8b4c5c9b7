"""OpenAI's fields to the executor's parameters, and what is refused: pure functions, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError, RequestError
from oasiskv.executor import protocol
from oasiskv.executor.protocol import Output
from oasiskv.serve.openai import errors, logprobs, supervised, translate
from oasiskv.serve.openai.schema import ChatRequest, CompletionRequest
from oasiskv.serve.options import ServeOptions
from oasiskv.tokenizer import Tokenizer


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "Hi"}], **fields})


def completion(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"model": "m", "prompt": "Hi", **fields})


def refusal(request: Any, fields: dict[str, Any]) -> errors.ApiError:
    """As the endpoint sees it."""
    with pytest.raises(ValidationError) as caught:
        request(**fields)
    found = [{**e, "loc": ("body", *e["loc"])} for e in caught.value.errors()]
    return errors.from_validation(RequestValidationError(found).errors())


def test_defaults_are_openais() -> None:
    assert translate.chat_params(chat(), 10, 100) == {"temperature": 1.0, "max_tokens": 90}
    assert translate.completion_params(completion()) == {"temperature": 1.0, "max_tokens": 16}
    assert translate.chat_params(chat(), 100, 100)["max_tokens"] == 1, "a full context is the executor's to refuse"


def test_null_is_left_out() -> None:
    given = {"top_p": None, "stop": None, "tools": None, "seed": None, "logit_bias": None, "response_format": None}
    assert translate.chat_params(chat(**given), 10, 100) == translate.chat_params(chat(), 10, 100)


@pytest.mark.parametrize(
    ("fields", "params"),
    [
        ({"max_tokens": 5}, {"max_tokens": 5}),
        ({"max_completion_tokens": 5}, {"max_tokens": 5}),
        ({"temperature": 0, "top_p": 0.5}, {"temperature": 0.0, "top_p": 0.5}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0, "frequency_penalty": -1.0}),
        ({"stop": "a"}, {"stop": "a"}),
        ({"stop": ["a", "b"], "stop_token_ids": [3]}, {"stop": ["a", "b"], "stop_token_ids": [3]}),
        ({"logit_bias": {"5": -100, "7": 0.5}}, {"logit_bias": [[5, -100.0], [7, 0.5]]}),
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 4}, {"logprobs": 4}),
        ({"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}, {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2}),
        ({"min_tokens": 3, "ignore_eos": True, "cache_salt": "s"}, {"min_tokens": 3, "ignore_eos": True, "cache_salt": "s"}),
        ({"response_format": {"type": "text"}}, {}),
        ({"response_format": {"type": "json_object"}}, {"guide": {"kind": "json_schema", "text": '{"type": "object"}'}}),
        ({"guided_json": {"type": "null"}}, {"guide": {"kind": "json_schema", "text": '{"type": "null"}'}}),
        ({"guided_json": '{"type": "null"}'}, {"guide": {"kind": "json_schema", "text": '{"type": "null"}'}}),
        ({"guided_regex": "a+"}, {"guide": {"kind": "regex", "text": "a+"}}),
        ({"guided_choice": ["a", "b"]}, {"guide": {"kind": "choice", "text": '["a", "b"]'}}),
        ({"guided_grammar": "root ::= x"}, {"guide": {"kind": "ebnf_grammar", "text": "root ::= x"}}),
        ({"user": "someone"}, {}),
    ],
)
def test_fields_become_the_executors_parameters(fields: dict[str, Any], params: dict[str, Any]) -> None:
    plain = translate.chat_params(chat(), 10, 100)
    assert translate.chat_params(chat(**fields), 10, 100) == {**plain, **params}


def test_a_json_schema_goes_through_unchanged() -> None:
    schema = {"type": "object", "properties": {"a": {"default": None}}}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    guide = translate.chat_params(chat(response_format=form), 10, 100)["guide"]
    assert guide["kind"] == "json_schema" and json.loads(guide["text"]) == schema


@pytest.mark.parametrize(
    ("request_of", "fields", "param", "message"),
    [
        (chat, {"tools": []}, "tools", "not supported"),
        (chat, {"best_of": 2}, "best_of", "not supported"),
        (chat, {"temperature": "1"}, "temperature", "valid number"),
        (chat, {"stream": 1}, "stream", "valid boolean"),
        (chat, {"n": 0}, "n", "greater"),
        (chat, {"n": 129}, "n", "less"),
        (chat, {"messages": []}, "messages", "at least 1"),
        (chat, {"messages": [{"role": "tool", "content": "x"}]}, "messages", "role"),
        (chat, {"messages": [{"role": "user", "content": "x", "name": "y"}]}, "messages", "name: not supported"),
        (chat, {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages", "image_url"),
        (chat, {"top_logprobs": 2}, "top_logprobs", "only with logprobs"),
        (chat, {"stream_options": {"include_usage": True}}, "stream_options", "only with stream"),
        (chat, {"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "old name"),
        (chat, {"response_format": {"type": "json_schema"}}, "response_format", "goes with"),
        (chat, {"logit_bias": {str(i): 0.0 for i in range(1025)}}, "logit_bias", "at most 1024"),
        (completion, {"echo": True}, "echo", "False"),
        (completion, {"suffix": "x"}, "suffix", "not supported"),
        (completion, {"prompt": [[1], "a"]}, "prompt", "valid list"),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(request_of: Any, fields: dict[str, Any], param: str, message: str) -> None:
    error = refusal(request_of, fields)
    assert error.status_code == 400 and message in error.body["error"]["message"]
    assert error.body["error"]["param"] == param and error.body["error"]["type"] == "invalid_request_error"


def test_many_faults_make_one_short_error() -> None:
    """A body may hold millions of wrong elements."""
    error = refusal(completion, {"prompt": [0.5] * 100_000})
    assert len(error.body["error"]["message"]) < 500
    error = refusal(chat, {f"x{i}": i for i in range(100_000)})
    assert len(error.body["error"]["message"]) < 100


@pytest.mark.parametrize(
    ("prompt", "many"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])],
)
def test_prompts_come_in_four_forms(prompt: Any, many: list[Any]) -> None:
    assert translate.prompts(completion(prompt=prompt)) == many


@pytest.mark.parametrize(("prompt", "n", "message"), [([], 1, "at least one"), (["a"] * 65, 2, "65 prompts with n = 2: at most 128")])
def test_sequences_are_bounded(prompt: Any, n: int, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        translate.prompts(completion(prompt=prompt, n=n))


def test_sequence_i_has_seed_plus_i() -> None:
    def seeds(seed: int | None) -> list[int]:
        return [p["seed"] for p in translate.sequences({"max_tokens": 1}, 2, 3, seed, [100, 200])]

    assert seeds(7) == [7, 8, 9, 7, 8, 9]
    assert seeds(None) == [100, 101, 102, 200, 201, 202]
    assert seeds(-1) == [2**64 - 1, 0, 1] * 2, "OpenAI's seeds are signed, the engine's unsigned"


@pytest.mark.parametrize(
    ("fields", "message"),
    [({"logit_bias": {"a": 1}}, "logit_bias: its keys"),
     ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format: guided_regex is given too")],
)  # fmt: skip
def test_values_without_a_translation_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        translate.chat_params(chat(**fields), 10, 100)


def test_messages_are_text_for_the_template() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(messages=[{"role": "developer", "content": "s"}, {"role": "user", "content": parts}])
    assert translate.messages(request) == [{"role": "system", "content": "s"}, {"role": "user", "content": "ab"}]


@pytest.mark.parametrize(
    ("code", "text", "status", "openai_code", "param"),
    [
        (protocol.INVALID, "top_p = 3: must be in (0, 1]", 400, None, "top_p"),
        (protocol.INVALID, "a prompt of 9 tokens with max_tokens 9 exceeds max_seq_len 8: ...", 400, "context_length_exceeded", None),
        (protocol.INVALID, "guide: does not compile", 400, None, None),
        (protocol.UNAVAILABLE, "the executor is shutting down", 503, "service_unavailable", None),
        (protocol.INTERNAL, "engine step failed: ...", 500, None, None),
    ],
)
def test_a_failed_output_becomes_its_status(code: str, text: str, status: int, openai_code: str | None, param: str | None) -> None:
    error = errors.from_output(protocol.failed(1, code, text))
    assert error is not None and error.status_code == status
    assert error.body["error"] | {"type": None} == {"message": text, "type": None, "param": param, "code": openai_code}
    assert error.body["error"]["type"] == ("invalid_request_error" if status < 500 else "server_error")


def test_only_answers_are_no_errors() -> None:
    assert errors.from_output(Output(1, finished=True, finish_reason="stop")) is None
    for reason in ("cancelled", "error"):
        with pytest.raises(ValueError, match="not the end of an answer"):
            translate.finish_reason(reason)


def test_a_model_is_known_by_a_name_not_by_its_path() -> None:
    names = {"smollm2-135m": "smollm2-135m", "/models/Qwen3-8B/": "Qwen3-8B", "x/model.Q4.gguf": "model.Q4"}
    assert {model: supervised.model_name(model) for model in names} == names


def test_its_port_is_checked_with_the_others() -> None:
    with pytest.raises(ConfigError, match=r"--openai-port: must differ"):
        ServeOptions(EngineConfig(), openai_port=8001)
    with pytest.raises(ConfigError, match=r"--openai-port 0"):
        ServeOptions(EngineConfig(), openai_port=0)


def test_logprobs_have_text_and_bytes(tokenizer: Tokenizer) -> None:
    (end,) = tokenizer.eos_ids
    half, rest = tokenizer.encode("\u2602")[:2], tokenizer.encode("Hi")[0]
    given = [[-0.5, [[half[0], -0.5], [rest, -2.0]]], [-1.0, []], [-0.1, [[rest, -3.0]]]]
    ids = [half[0], rest, end]
    first, second, last = logprobs.of_chat(tokenizer, ids, given)["content"]
    assert bytes(first["bytes"]) == tokenizer.token_bytes(half[0]) and first["token"] == "\ufffd", "part of a character"
    assert [(t["token"], t["logprob"]) for t in first["top_logprobs"]] == [("\ufffd", -0.5), ("Hi", -2.0)]
    assert (second["token"], second["logprob"], second["bytes"], second["top_logprobs"]) == ("Hi", -1.0, [72, 105], [])
    assert last["token"] == "<|im_end|>", "a token without text has its name"
    legacy, offset = logprobs.of_completion(tokenizer, ids, given, 10)
    assert legacy["tokens"] == ["\ufffd", "Hi", "<|im_end|>"] and legacy["token_logprobs"] == [-0.5, -1.0, -0.1]
    assert legacy["text_offset"] == [10, 11, 13] and offset == 23
    assert legacy["top_logprobs"] == [{"\ufffd": -0.5, "Hi": -2.0}, {"Hi": -1.0}, {"Hi": -3.0, "<|im_end|>": -0.1}]
