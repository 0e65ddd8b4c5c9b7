"""NVIDIA's tensors <-> our parameters. Pure functions of numpy arrays, so that the Triton models stay thin."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from oasiskv.engine.sampling import MAX_STOP_CHARS, MAX_STOPS
from oasiskv.errors import RequestError

GetTensor = Callable[[str], np.ndarray | None]  # an input by name; None where the client left it out


def scalar(get: GetTensor, name: str) -> Any:
    """The single element of an input as a Python value, or None. Raises RequestError."""
    array = get(name)
    if array is None:
        return None
    if array.size != 1:
        raise RequestError(f"{name}: need one element, got shape {list(array.shape)}; send one request a batch row")
    return array.reshape(-1)[0].item() if array.dtype != np.object_ else array.reshape(-1)[0]


def text(get: GetTensor, name: str) -> str | None:
    """A BYTES input as text. Raises RequestError naming the offset for bytes that are not UTF-8."""
    value = scalar(get, name)
    return None if value is None else _utf8(value, name)


def stop_words(get: GetTensor, name: str) -> list[str]:
    """All non-empty strings of a BYTES input. Raises RequestError, also for more or longer ones than the engine takes."""
    array = get(name)
    if array is None:
        return []
    words = [w for v in array.reshape(-1)[: MAX_STOPS + 1] if (w := _utf8(v, name))]
    if array.size > MAX_STOPS or any(len(w) > MAX_STOP_CHARS for w in words):
        raise RequestError(f"{name}: at most {MAX_STOPS} words of at most {MAX_STOP_CHARS} characters")
    return words


def pack_words(words: list[list[int]]) -> np.ndarray:
    """Token lists -> NVIDIA's word list, I32 [2, n]: the ids, then where each word ends; padded with 0 and -1."""
    ids = [t for word in words for t in word]
    ends = np.cumsum([len(w) for w in words]).tolist() if words else []
    n = max(1, len(ids))
    return np.array([ids + [0] * (n - len(ids)), ends + [-1] * (n - len(ends))], dtype=np.int32)


def unpack_words(array: np.ndarray | None, name: str) -> list[list[int]]:
    """The inverse of pack_words. Raises RequestError."""
    if array is None or array.size == 0:
        return []
    if array.ndim >= 2 and array.shape[-2] == 2 and array.size == 2 * array.shape[-1]:
        ids, ends = array.reshape(2, -1).tolist()
        words, begin = [], 0
        for end in (e for e in ends if e > 0):
            if not begin < end <= len(ids):
                break
            words.append(ids[begin:end])
            begin = end
        else:
            return words
    raise RequestError(f"{name}: need ids and rising end offsets as [2, n], got shape {list(array.shape)}: {reprlib.repr(array.tolist())}")


def sampling(get: GetTensor) -> dict[str, Any]:
    """The core model's inputs -> the executor's parameters (executor/params.py). Raises RequestError.

    As in TensorRT-LLM, top_k 0 and top_p 0 are off. Greedy unless one of temperature, top_k and top_p is given, or top_k is 1.
    """
    params: dict[str, Any] = {"max_tokens": scalar(get, "request_output_len")}
    top_k, top_p = scalar(get, "runtime_top_k"), scalar(get, "runtime_top_p")
    temperature, seed, end_id = scalar(get, "temperature"), scalar(get, "seed"), scalar(get, "end_id")
    params["top_k"] = top_k or 0
    params["top_p"] = top_p or 1.0
    if top_k == 1:
        params["temperature"] = 0.0
    elif temperature is not None:
        params["temperature"] = temperature
    else:
        params["temperature"] = 1.0 if top_k or top_p else 0.0
    params["seed"] = seed or 0
    if end_id is not None:
        params["end_id"] = end_id
    params["stop_word_ids"] = unpack_words(get("stop_words_list"), "stop_words_list")
    return params


def prompt(get: GetTensor) -> list[int]:
    """input_ids cut to input_lengths. Raises RequestError."""
    ids, length = get("input_ids"), scalar(get, "input_lengths")
    if ids is None or length is None:
        raise RequestError("input_ids and input_lengths: both are needed")
    if ids.ndim > 1 and ids.shape[0] != 1:
        raise RequestError(f"input_ids: shape {list(ids.shape)}; send one request a batch row")
    if not 0 <= length <= ids.size:
        raise RequestError(f"input_lengths = {length}: input_ids has {ids.size} elements")
    return ids.reshape(-1)[:length].tolist()


def _utf8(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 at byte {error.start}: {error.reason}") from None
