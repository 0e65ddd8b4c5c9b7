"""Reading NVIDIA's input tensors. Pure functions of numpy arrays: every value may be hostile."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any

import numpy as np

from oasiskv.engine.sampling import MAX_STOP_CHARS
from oasiskv.errors import RequestError

GetTensor = Callable[[str], np.ndarray | None]  # one batch row of an input by name; None where the client left it out


def rows(inputs: dict[str, np.ndarray], first: str) -> list[GetTensor]:
    """One view a batch row, as many as the input `first` has. Raises RequestError for an input with another number of rows."""
    count = _rows_of(inputs, first)
    for name, array in inputs.items():
        if array.ndim == 0 or array.shape[0] != count:
            raise RequestError(f"{name}: shape {list(array.shape)}, but {first} has {count} batch rows")

    def row(index: int) -> GetTensor:
        return lambda name: inputs[name][index] if name in inputs else None

    return [row(i) for i in range(count)]


def _rows_of(inputs: dict[str, np.ndarray], name: str) -> int:
    array = inputs.get(name)
    if array is None or array.ndim == 0 or array.shape[0] == 0:
        raise RequestError(f"{name}: is needed, with at least one batch row")
    return int(array.shape[0])


def scalar(get: GetTensor, name: str) -> Any:
    """The single element of a row as a Python value, or None where the input is left out. Raises RequestError."""
    array = get(name)
    if array is None:
        return None
    array = np.asarray(array)
    if array.size != 1:
        raise RequestError(f"{name}: need one element a batch row, got shape {list(array.shape)}")
    value = array.reshape(-1)[0]
    return value if array.dtype == np.object_ else value.item()


def text(get: GetTensor, name: str) -> str | None:
    """A BYTES input as text. Raises RequestError naming the offset for bytes that are not UTF-8."""
    value = scalar(get, name)
    return None if value is None else _utf8(value, name)


def strings(get: GetTensor, name: str, most: int) -> list[str]:
    """All strings of a BYTES input. Raises RequestError, also for more than `most` and for longer ones than the engine takes."""
    array = get(name)
    if array is None:
        return []
    words = [_utf8(v, name) for v in array.reshape(-1)[: most + 1]]
    if array.size > most or any(len(w) > MAX_STOP_CHARS for w in words):
        raise RequestError(f"{name}: at most {most} words of at most {MAX_STOP_CHARS} characters")
    return words


def pack_words(words: list[list[int]], width: int = 1) -> np.ndarray:
    """Token lists -> NVIDIA's word list, I32 [2, n >= width]: the ids, then where each word ends; padded with 0 and -1."""
    ids = [t for word in words for t in word]
    ends = np.cumsum([len(w) for w in words]).tolist() if words else []
    n = max(width, len(ids))
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


def _utf8(value: Any, name: str) -> str:
    if isinstance(value, str):
        return value
    try:
        return bytes(value).decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: not UTF-8 at byte {error.start}: {error.reason}") from None
