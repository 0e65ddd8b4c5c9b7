"""Health by a real request: a dead python backend leaves Triton's own readiness true."""

from __future__ import annotations

import queue

import numpy as np


def ask(port: int, text: str, max_tokens: int, deadline_s: float) -> str:
    """The ensemble's answer to one streamed request. Raises any error of tritonclient, or TimeoutError."""
    from tritonclient import grpc

    answers: queue.SimpleQueue[tuple[object, object]] = queue.SimpleQueue()
    inputs = [tensor("text_input", np.array([text.encode()], dtype=np.object_)), tensor("max_tokens", np.array([max_tokens], dtype=np.int32))]
    pieces = []
    with grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        client.start_stream(lambda result, error: answers.put((result, error)), stream_timeout=deadline_s)
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        while True:
            try:
                result, error = answers.get(timeout=deadline_s)
            except queue.Empty:
                raise TimeoutError(f"no answer within {deadline_s} s") from None
            if error is not None:
                raise error  # type: ignore[misc]
            output = result.as_numpy("text_output")
            if output is not None:
                pieces.append(output[0].decode())
            if result.get_response().parameters["triton_final_response"].bool_param:
                return "".join(pieces)


def tensor(name: str, value: np.ndarray) -> object:
    """A tritonclient input tensor."""
    from tritonclient import grpc
    from tritonclient.utils import np_to_triton_dtype

    made = grpc.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made
