"""The bodies that the front takes. What is not declared here is refused by name; what a value may be is SamplingParams's to say."""

from __future__ import annotations

import reprlib
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

MAX_SEQUENCES = 128  # a request: prompts times n
MAX_BIASES = 1024  # a request, as OpenAI has it
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's for completions

# A body may hold millions of elements: the first that is wrong ends the check, else each would become an error of its own.
_Texts = Annotated[list[str], Field(fail_fast=True)]
_Ids = Annotated[list[int], Field(fail_fast=True)]


class _Strict(BaseModel):
    """Types are not converted, null is as good as left out, and the first undeclared field is refused."""

    model_config = ConfigDict(strict=True)

    @model_validator(mode="before")
    @classmethod
    def _only_declared(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        declared = {field.alias or name for name, field in cls.model_fields.items()}
        for name in given:
            if name not in declared:
                field = name if len(name) < 64 else reprlib.repr(name)
                raise PydanticCustomError("undeclared", "{field}: not supported by this server, leave it out", {"field": field})
        return given


class StreamOptions(_Strict):
    include_usage: bool = False


class _Request(_Strict):
    """Fields of both endpoints; those after `user` are ours (`extra_body` of OpenAI's clients)."""

    model: str
    n: int = Field(1, ge=1, le=MAX_SEQUENCES)
    max_tokens: int | None = None
    temperature: float = 1.0
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None  # token id in decimal -> added to its logit
    stop: str | _Texts | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)  # None: another one each time
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None  # the client's name for its end user: changes no answer
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: _Ids | None = None
    cache_salt: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: _Texts | None = None
    guided_grammar: str | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _few(cls, value: Any) -> Any:
        if isinstance(value, dict) and len(value) > MAX_BIASES:
            raise PydanticCustomError("too_many", "{count} tokens: at most {most}", {"count": len(value), "most": MAX_BIASES})
        return value

    @model_validator(mode="after")
    def _consistent(self) -> _Request:
        if self.stream_options and not self.stream:
            raise PydanticCustomError("alone", "{field}: only with stream = true", {"field": "stream_options"})
        return self


class CompletionRequest(_Request):
    prompt: str | _Texts | _Ids | Annotated[list[_Ids], Field(fail_fast=True)]
    max_tokens: int = DEFAULT_COMPLETION_TOKENS
    logprobs: int | None = None  # alternatives a token
    echo: Literal[False] = False


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]


class JsonSchema(_Strict):
    """`name` labels the schema, and `strict` asks for what a guide always does: neither changes an answer."""

    name: str
    strict: bool = True
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("alone", "json_schema: goes with type = json_schema", {})
        return self


class ChatRequest(_Request):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_completion_tokens: int | None = None  # what OpenAI calls max_tokens by now
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: ResponseFormat | None = None

    @model_validator(mode="after")
    def _consistent_chat(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("alone", "{field}: only with logprobs = true", {"field": "top_logprobs"})
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError("both", "{field}: the old name of max_completion_tokens, give one of them", {"field": "max_tokens"})
        return self
