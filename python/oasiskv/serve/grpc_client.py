"""A small streaming client of the ensemble, for the supervisor's probe, the demo and the tests."""

from __future__ import annotations

import json
import queue
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from oasiskv.errors import OasisError

_TYPES = {
    "max_tokens": ("INT32", np.int32),
    "end_id": ("INT32", np.int32),
    "top_k": ("INT32", np.int32),
    "top_p": ("FP32", np.float32),
    "temperature": ("FP32", np.float32),
    "seed": ("UINT64", np.uint64),
    "stream": ("BOOL", np.bool_),
}


class RemoteError(OasisError):
    """The server refused the request, or did not answer. `status`: of a connection that failed, such as StatusCode.UNAVAILABLE."""

    def __init__(self, message: str, status: str | None) -> None:
        super().__init__(message)
        self.status = status


@dataclass(frozen=True)
class Piece:
    """A response: new text; stats on the last one."""

    text: str
    stats: dict[str, Any] | None
    final: bool


def inputs(text: str, options: dict[str, Any]) -> list[grpcclient.InferInput]:
    """The ensemble's tensors. options: max_tokens, end_id, top_k, top_p, temperature, seed, stream, stop_words."""
    tensors = [_bytes_input("text_input", [text])]
    for name, value in options.items():
        if name == "stop_words":
            tensors.append(_bytes_input(name, value))
            continue
        kind, dtype = _TYPES[name]
        tensor = grpcclient.InferInput(name, [1, 1], kind)
        tensor.set_data_from_numpy(np.array([[value]], dtype=dtype))
        tensors.append(tensor)
    return tensors


def generate(
    url: str,
    text: str,
    *,
    deadline_s: float,
    request_id: str = "",
    give_up: Callable[[], bool] = lambda: False,
    **options: Any,
) -> Iterator[Piece]:
    """Pieces as they come. Raises RemoteError, also when `deadline_s` passes without an answer or `give_up` becomes true."""
    answers: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    end = time.monotonic() + deadline_s
    client = grpcclient.InferenceServerClient(url)
    final = False
    try:
        # Without the header triton_grpc_error, which gives errors a status: with it an ensemble's error can end this Triton (SIGSEGV).
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("ensemble", inputs(text, options), request_id=request_id)
        while not final:
            result, error = _next(answers, end, deadline_s, give_up)
            if error is not None:
                raise RemoteError(error.message(), error.status())
            final = result.get_response().parameters["triton_final_response"].bool_param
            if result.as_numpy("text_output") is None:
                yield Piece("", None, final)
                continue
            stats = result.as_numpy("oasis_stats")
            text = b"".join(result.as_numpy("text_output").reshape(-1)).decode()
            yield Piece(text, None if stats is None else json.loads(stats.reshape(-1)[0]), final)
    except InferenceServerException as error:
        # A stream that broke says only that it did; why it broke lies in the answers.
        broke = [e for _, e in _left(answers) if e is not None]
        cause = broke[0] if broke else error
        raise RemoteError(cause.message(), cause.status()) from None
    finally:
        # Cancelling a request that has ended makes Triton hold on to the ensemble until its exit timeout.
        client.stop_stream(cancel_requests=not final)
        client.close()


def _left(answers: queue.SimpleQueue[tuple[Any, Any]]) -> Iterator[tuple[Any, Any]]:
    while not answers.empty():
        yield answers.get()


def _next(answers: queue.SimpleQueue[tuple[Any, Any]], end: float, deadline_s: float, give_up: Callable[[], bool]) -> tuple[Any, Any]:
    while True:
        try:
            return answers.get(timeout=0.1)
        except queue.Empty:
            if give_up():
                raise RemoteError("given up", None) from None
            if time.monotonic() > end:
                raise RemoteError(f"no answer within {deadline_s:g} s", None) from None


def _bytes_input(name: str, values: list[str]) -> grpcclient.InferInput:
    tensor = grpcclient.InferInput(name, [1, len(values)], "BYTES")
    tensor.set_data_from_numpy(np.array([[v.encode() for v in values]], dtype=np.object_))
    return tensor
