"""The text side: what `preprocessing` and `postprocessing` compute, as functions of arrays and a tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from oasiskv.engine.sampling import MAX_BAD_WORDS, MAX_STOPS
from oasiskv.errors import RequestError
from oasiskv.serve.contract.tensors import GetTensor, pack_words, rows, scalar, strings, text
from oasiskv.tokenizer import Tokenizer

_REFUSED = ("DECODER_QUERY", "IMAGE_BYTES", "IMAGE_URL", "VIDEO_BYTES")


@dataclass(frozen=True)
class Preprocessor:
    """Text to token ids. max_tokens: a text that cannot be so short is refused unread."""

    tokenizer: Tokenizer
    add_special_tokens: bool
    max_tokens: int

    def __call__(self, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """NVIDIA's outputs, a row for each row of QUERY; ids are padded at the end. Raises RequestError naming the input."""
        views = rows(inputs, "QUERY")
        for get in views:
            _refuse(get)
        prompts = [
            self.tokenizer.encode(text(get, "QUERY") or "", bos=self.add_special_tokens, max_tokens=self.max_tokens) for get in views
        ]
        end_ids = [self._id(get, "END_ID", self.end_id) for get in views]
        pad_ids = [self._id(get, "PAD_ID", max(0, self.end_id)) for get in views]
        return {
            "INPUT_ID": _padded(prompts, pad_ids),
            "REQUEST_INPUT_LEN": _column([len(p) for p in prompts]),
            "DECODER_INPUT_ID": _column(pad_ids),
            "REQUEST_DECODER_INPUT_LEN": _column([1] * len(views)),
            "BAD_WORDS_IDS": self._words(views, "BAD_WORDS_DICT", MAX_BAD_WORDS),
            "STOP_WORDS_IDS": self._words(views, "STOP_WORDS_DICT", MAX_STOPS),
            "EMBEDDING_BIAS": self._bias(views),
            "REQUEST_OUTPUT_LEN": _column([scalar(get, "REQUEST_OUTPUT_LEN") for get in views]),
            "OUT_END_ID": _column(end_ids),
            "OUT_PAD_ID": _column(pad_ids),
        }

    @property
    def end_id(self) -> int:
        """The model's own; -1 for none."""
        return min(self.tokenizer.eos_ids, default=-1)

    def _id(self, get: GetTensor, name: str, default: int) -> int:
        value = scalar(get, name)
        return default if value is None else value

    def _words(self, views: list[GetTensor], name: str, most: int) -> np.ndarray:
        """I32 [rows, 2, n]. Each string is one word, whatever is in it; empty ones are left out, as in NVIDIA's."""
        words = [[self.tokenizer.encode(word, bos=False) for word in strings(get, name, most) if word] for get in views]
        width = max(1, max(sum(map(len, row)) for row in words))
        return np.stack([pack_words(row, width) for row in words])

    def _bias(self, views: list[GetTensor]) -> np.ndarray:
        """F32 [rows, vocab], [rows, 0] without any: a word's weight counts for each of its tokens, and adds up."""
        if all(get("EMBEDDING_BIAS_WORDS") is None and get("EMBEDDING_BIAS_WEIGHTS") is None for get in views):
            return np.zeros((len(views), 0), dtype=np.float32)
        bias = np.zeros((len(views), self.tokenizer.vocab_size), dtype=np.float32)
        for row, get in zip(bias, views, strict=True):
            words, weights = strings(get, "EMBEDDING_BIAS_WORDS", MAX_BAD_WORDS), get("EMBEDDING_BIAS_WEIGHTS")
            weights = [] if weights is None else weights.reshape(-1).tolist()
            if len(words) != len(weights):
                raise RequestError(f"EMBEDDING_BIAS_WEIGHTS: {len(weights)} for {len(words)} EMBEDDING_BIAS_WORDS: give one a word")
            for word, weight in zip(words, weights, strict=True):
                if not math.isfinite(weight):
                    raise RequestError(f"EMBEDDING_BIAS_WEIGHTS = {weight}: must be finite")
                for token in self.tokenizer.encode(word, bos=False):
                    row[token] += weight
        return bias


def _refuse(get: GetTensor) -> None:
    for name in _REFUSED:
        array = get(name)
        if array is not None and array.size and (array.dtype != np.object_ or any(array.reshape(-1))):
            raise RequestError(f"{name}: this model takes text alone; leave it out")
    if scalar(get, "PROMPT_TABLE_EXTRA_ID"):
        raise RequestError("PROMPT_TABLE_EXTRA_ID: prompt tables are not supported; leave it out")


def _column(values: list[int]) -> np.ndarray:
    return np.array([[v] for v in values], dtype=np.int32)


def _padded(prompts: list[list[int]], pad_ids: list[int]) -> np.ndarray:
    width = max(map(len, prompts))
    return np.array([p + [pad] * (width - len(p)) for p, pad in zip(prompts, pad_ids, strict=True)], dtype=np.int32)


def postprocess(tokenizer: Tokenizer, inputs: dict[str, np.ndarray], skip_special_tokens: bool) -> np.ndarray:
    """TOKENS_BATCH [rows, beams, n], SEQUENCE_LENGTH [rows, beams] -> UTF-8 [rows * beams], as NVIDIA's clients read it.

    OASIS_TEXT [rows, 1] is what the tokens after the first OASIS_PROMPT_LENGTH [rows, 1] stand for: unlike their text, it ends before
    a stop string. It has no special tokens, and is of no use where those are wanted. Raises RequestError.
    """
    tokens, lengths = inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"]
    if tokens.ndim != 3 or tokens.shape[:2] != lengths.shape:
        raise RequestError(
            f"TOKENS_BATCH, SEQUENCE_LENGTH: shapes {list(tokens.shape)} and {list(lengths.shape)}; need [rows, beams, n] and [rows, beams]"
        )
    exact = inputs.get("OASIS_TEXT") if skip_special_tokens else None
    if exact is not None and "OASIS_PROMPT_LENGTH" not in inputs:
        return exact.reshape(-1)
    if exact is not None:
        prompts = _decode(tokenizer, tokens, inputs["OASIS_PROMPT_LENGTH"], True)
        texts = [prompt + text for prompt, text in zip(prompts, exact.reshape(-1), strict=True)]
    else:
        texts = _decode(tokenizer, tokens, lengths, skip_special_tokens)
    return np.array(texts, dtype=np.object_)


def _decode(tokenizer: Tokenizer, tokens: np.ndarray, lengths: np.ndarray, skip_special_tokens: bool) -> list[bytes]:
    texts = []
    for beam, length in zip(tokens.reshape(-1, tokens.shape[2]), lengths.reshape(-1).tolist(), strict=True):
        ids = beam[: max(0, length)].tolist()
        if any(i < 0 for i in ids):
            raise RequestError(f"TOKENS_BATCH: {min(ids)} is not a token id")
        texts.append(tokenizer.decode(ids, skip_special_tokens).encode())
    return texts
