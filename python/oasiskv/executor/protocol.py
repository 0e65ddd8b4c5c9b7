"""Frames between executor and clients, checked on arrival because neither side trusts the other.

A frame is a JSON object in one line. An output may have arrays: it names them, `"arrays": [[name, "float32", [rows, columns]], ...]`, and
their little-endian bytes follow after a newline.

Requests `{"v": 2, "op": submit|cancel|ping|usage|metrics, "id": n, ...}`; ids are the client's own. Answers: any number of `output`s for a
submit, the last with `finished`; one `reply` for a ping, usage or metrics; a `fault` before the executor drops a connection.
"""

from __future__ import annotations

import json
import math
import reprlib
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from oasiskv.errors import OasisError

VERSION = 2
MAX_FRAME_BYTES = 32 << 20  # a prompt of a million tokens is about 8 MB
MAX_ARRAY_BYTES = 16 << 20  # of one array in a frame
MAX_ID = 2**63 - 1

INVALID = "invalid"  # the request can never be served
UNAVAILABLE = "unavailable"  # this executor cannot serve it now
INTERNAL = "internal"  # the engine failed
CODES = (INVALID, UNAVAILABLE, INTERNAL)
REASONS = ("stop", "length", "cancelled", "error")


ARRAYS = ("context_logits", "generation_logits")


class ProtocolError(OasisError):
    """A frame that breaks the protocol: the connection it came from cannot be used any more."""


@dataclass(frozen=True)
class Submit:
    """prompt: token ids, or text that the executor tokenizes. params: see executor/params.py."""

    id: int
    prompt: list[int] | str
    params: dict[str, Any]


@dataclass(frozen=True)
class Cancel:
    id: int


@dataclass(frozen=True)
class Ask:
    """what: ping, usage or metrics; since: of metrics, the observations to begin with (engine/metrics.py)."""

    id: int
    what: str
    since: int = 0


@dataclass(frozen=True)
class Output:
    """What a request yielded since its last output; `code` says of which kind an error is.

    context_logits, generation_logits, if asked for: float32 [tokens, vocab], to be joined over all outputs; they come in parts of at most
    MAX_ARRAY_BYTES, so not always with the tokens that they belong to.
    logprobs, if asked for: [logprob, [[id, logprob], ...]] a token, its own and those of the likeliest alternatives.
    """

    id: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finished: bool = False
    finish_reason: str | None = None
    error: str | None = None
    code: str | None = None
    stats: dict[str, Any] | None = None
    logprobs: list[list[Any]] = field(default_factory=list)
    context_logits: np.ndarray | None = field(default=None, compare=False)
    generation_logits: np.ndarray | None = field(default=None, compare=False)

    @property
    def array_bytes(self) -> int:
        return sum(array.nbytes for name in ARRAYS if (array := getattr(self, name)) is not None)


@dataclass(frozen=True)
class Reply:
    id: int
    value: dict[str, Any]


@dataclass(frozen=True)
class Fault:
    error: str


Request = Submit | Cancel | Ask
Answer = Output | Reply | Fault


def failed(request_id: int, code: str, error: str) -> Output:
    """The last output of a request that failed."""
    return Output(request_id, finished=True, finish_reason="error", error=error, code=code)


def encode(message: Request | Answer) -> bytes:
    """A frame. Raises ProtocolError when it would be too large."""
    body = dict(vars(message))  # not asdict, which copies every token id
    op = body.pop("what") if isinstance(message, Ask) else type(message).__name__.lower()
    arrays = {name: array for name in ARRAYS if (array := body.pop(name, None)) is not None}
    if arrays:
        body["arrays"] = [[name, "float32", list(array.shape)] for name, array in arrays.items()]
    frame = json.dumps({"v": VERSION, "op": op, **body}, separators=(",", ":"), ensure_ascii=True).encode()
    if arrays:
        frame = b"".join([frame, b"\n", *(np.ascontiguousarray(array, dtype="<f4").data for array in arrays.values())])
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {op} frame of {len(frame)} bytes is over the limit of {MAX_FRAME_BYTES}: send a shorter prompt")
    return frame


def decode_request(frame: bytes) -> Request:
    """Raises ProtocolError."""
    op, body = _open(frame)
    request_id = _id(body)
    if op == "cancel":
        return Cancel(request_id)
    if op in ("ping", "usage", "metrics"):
        return Ask(request_id, op, _count(body, "since") if op == "metrics" else 0)
    if op != "submit":
        raise ProtocolError(f"op = {reprlib.repr(op)}: use submit, cancel, ping, usage or metrics")
    prompt, params = body.get("prompt"), body.get("params")
    if not isinstance(prompt, str):
        prompt = _ids(prompt, "prompt")
    if not isinstance(params, dict):
        raise ProtocolError("params: must be an object")
    return Submit(request_id, prompt, params)


def decode_answer(frame: bytes) -> Answer:
    """Raises ProtocolError."""
    end = frame.find(b"\n")
    head, data = (frame, b"") if end < 0 else (frame[:end], memoryview(frame)[end + 1 :])
    op, body = _open(head)
    arrays = _arrays(body.pop("arrays", []), data)
    if op == "fault":
        return Fault(_typed(body, "error", str))
    request_id = _id(body)
    if op == "reply":
        return Reply(request_id, _typed(body, "value", dict))
    if op != "output":
        raise ProtocolError(f"op = {reprlib.repr(op)}: expected output, reply or fault")
    unknown = body.keys() - {f.name for f in fields(Output)} | body.keys() & set(ARRAYS)
    if unknown:
        raise ProtocolError(f"output has unknown fields: {', '.join(sorted(unknown))}")
    token_ids = _ids(body.get("token_ids"), "token_ids")
    output = Output(
        request_id,
        token_ids,
        _typed(body, "text", str),
        _typed(body, "finished", bool),
        _optional(body, "finish_reason", str),
        _optional(body, "error", str),
        _optional(body, "code", str),
        _optional(body, "stats", dict),
        _logprobs(body, len(token_ids)),
        **arrays,
    )
    if output.finished != (output.finish_reason in REASONS):
        raise ProtocolError(f"finished = {output.finished} with finish_reason = {output.finish_reason!r}")
    if (output.finish_reason == "error") != (output.code in CODES):
        raise ProtocolError(f"finish_reason = {output.finish_reason!r} with code = {output.code!r}")
    return output


def _open(frame: bytes) -> tuple[str, dict[str, Any]]:
    try:
        body = json.loads(frame)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a frame is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise ProtocolError("a frame is not a JSON object")
    version = body.pop("v", None)
    if version != VERSION:
        raise ProtocolError(f"protocol version {reprlib.repr(version)}: this side speaks {VERSION}; run both sides from one installation")
    return _typed(body, "op", str), {k: v for k, v in body.items() if k != "op"}


def _arrays(declared: Any, data: bytes | memoryview) -> dict[str, np.ndarray]:
    if not isinstance(declared, list):
        raise ProtocolError("arrays: must be a list")
    found: dict[str, np.ndarray] = {}
    at = 0
    for entry in declared:
        name, dtype, shape = entry if isinstance(entry, list) and len(entry) == 3 else (None, None, None)
        known = name in ARRAYS and name not in found and dtype == "float32" and isinstance(shape, list)
        if not known or len(shape) != 2 or not all(type(n) is int and 0 < n < 2**31 for n in shape):
            raise ProtocolError(f"arrays: {reprlib.repr(entry)}: must be [one of {', '.join(ARRAYS)}, float32, [rows, columns]]")
        count = shape[0] * shape[1]
        if 4 * count > len(data) - at:
            raise ProtocolError(f"arrays: {name} of shape {shape} is longer than the frame")
        found[name] = np.frombuffer(data, "<f4", count, at).reshape(shape).copy()
        at += 4 * count
    if at != len(data):
        raise ProtocolError(f"arrays: {len(data) - at} bytes of the frame belong to none")
    return found


def _typed(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if not isinstance(value, kind):
        raise ProtocolError(f"{name}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _optional(body: dict[str, Any], name: str, kind: type) -> Any:
    return None if body.get(name) is None else _typed(body, name, kind)


def _id(body: dict[str, Any]) -> int:
    return _count(body, "id")


def _count(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value <= MAX_ID:
        raise ProtocolError(f"{name} = {reprlib.repr(value)}: must be an integer in 0..2**63-1")
    return value


def _ids(value: Any, name: str) -> list[int]:
    if not isinstance(value, list) or not all(type(t) is int and -(2**31) <= t < 2**31 for t in value):
        raise ProtocolError(f"{name}: must be a list of 32-bit token ids")
    return value


def _logprobs(body: dict[str, Any], tokens: int) -> list[list[Any]]:
    value = _typed(body, "logprobs", list)
    if value and (len(value) != tokens or not all(_is_logprob(v) for v in value)):
        raise ProtocolError(f"logprobs: must be [logprob, [[id, logprob], ...]] for each of {tokens} tokens")
    return value


def _is_logprob(value: Any) -> bool:
    def pair(value: Any) -> bool:
        return isinstance(value, list) and len(value) == 2

    def number(value: Any) -> bool:
        return type(value) is float and math.isfinite(value)

    if not pair(value) or not number(value[0]) or not isinstance(value[1], list):
        return False
    return all(pair(v) and type(v[0]) is int and number(v[1]) for v in value[1])
