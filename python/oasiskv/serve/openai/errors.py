"""Errors in OpenAI's form, {"error": {message, type, param, code}}."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from starlette.exceptions import HTTPException

from oasiskv.executor import protocol
from oasiskv.executor.protocol import Output
from oasiskv.serve.openai.schema import ChatRequest, CompletionRequest

INVALID, SERVER = "invalid_request_error", "server_error"
_STATUS = {protocol.INVALID: 400, protocol.UNAVAILABLE: 503, protocol.INTERNAL: 500}
_CONTEXT = re.compile(r"\bmax_seq_len\b")  # what texts of the engine and the tokenizer name when a prompt is too long
_FIELD = re.compile(r"[a-z_]+(?= = |: )")  # an error of ours begins with the field that it is about
_FIELDS = ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys()
_MAX_REASONS = 4


class ApiError(HTTPException):
    """An answer other than 200. The client of OpenAI's raises its BadRequestError, NotFoundError, ... by the status."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(status, message)
        self.body = body(status, message, param, code)


def body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = SERVER if status >= 500 else INVALID
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def from_output(output: Output) -> ApiError | None:
    """The error that an output stands for, None for a part of an answer."""
    if output.code is None:
        return None
    status, text = _STATUS[output.code], output.error or "the request failed"
    if status == 400:
        return refused(text)
    return ApiError(status, text, code="service_unavailable" if status == 503 else None)


def refused(text: str) -> ApiError:
    """What a RequestError says, here or in the executor."""
    field = _FIELD.match(text)
    param = field[0] if field and field[0] in _FIELDS else None
    return ApiError(400, text, param, "context_length_exceeded" if _CONTEXT.search(text) else None)


def from_validation(errors: Sequence[Any]) -> ApiError:
    """pydantic's errors, of which some may be one field's in several forms."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON at character {first['loc'][-1]}: {first['ctx']['error']}")
    reasons = [": ".join([*filter(None, [".".join(map(str, _place(error)))]), error["msg"]]) for error in errors[:_MAX_REASONS]]
    place = _place(first)
    return ApiError(400, "; ".join(reasons), str(place[0]) if place else first.get("ctx", {}).get("field"))


def _place(error: Any) -> tuple[str | int, ...]:
    """The path to the faulty value; pydantic's begins with "body"."""
    return error["loc"][1:]
