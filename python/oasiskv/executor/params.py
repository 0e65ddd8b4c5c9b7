"""A client's parameters -> SamplingParams."""

from __future__ import annotations

import reprlib
from dataclasses import fields
from typing import Any

from oasiskv.engine.sampling import MAX_BAD_WORDS, MAX_STOPS, Guide, SamplingParams
from oasiskv.errors import RequestError
from oasiskv.tokenizer import Tokenizer

_KNOWN = frozenset(f.name for f in fields(SamplingParams)) | {"stop_word_ids", "bad_word_ids", "end_id"}


def sampling_params(params: dict[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    """Besides the fields of SamplingParams:

    stop_word_ids, lists of token ids: each becomes a stop *string*, so that it is found however the model splits it into tokens;
    bad_word_ids, lists of token ids: further bad_words;
    guide: {"kind", "text"} of a Guide;
    end_id: the one id that ends the generation instead of the model's own; -1 for none. The model's own end id changes nothing.
    Raises RequestError naming the field.
    """
    unknown = params.keys() - _KNOWN
    if unknown:
        raise RequestError(f"unknown parameters: {reprlib.repr(sorted(unknown))}")
    options = dict(params)
    end_id = options.pop("end_id", None)
    if isinstance(options.get("stop"), str):
        options["stop"] = [options["stop"]]
    words, stop, stop_ids = (_list(options, name, MAX_STOPS) for name in ("stop_word_ids", "stop", "stop_token_ids"))
    bad_words = [word for name in ("bad_words", "bad_word_ids") for word in _list(options, name, MAX_BAD_WORDS)]
    for word in words:
        _stop_word(word, tokenizer, stop, stop_ids)
    if end_id is not None and (type(end_id) is not int or end_id >= tokenizer.vocab_size):
        raise RequestError(f"end_id = {reprlib.repr(end_id)}: must be a token id below {tokenizer.vocab_size}, or -1 for none")
    if end_id is not None and end_id not in tokenizer.eos_ids:
        options["ignore_eos"] = True
        stop_ids += [end_id] if end_id >= 0 else []
    if options.get("guide") is not None:
        options["guide"] = _guide(options["guide"])
    return SamplingParams(**options, stop=tuple(stop), stop_token_ids=tuple(stop_ids), bad_words=tuple(bad_words))


def _guide(value: Any) -> Guide:
    if not isinstance(value, dict) or "kind" not in value or value.keys() - {"kind", "text"}:
        raise RequestError(f"guide = {reprlib.repr(value)}: must be an object of kind and text")
    return Guide(**value)


def _list(options: dict[str, Any], name: str, most: int) -> list[Any]:
    value = options.pop(name, None)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or len(value) > most:
        raise RequestError(f"{name} = {reprlib.repr(value)}: must be a list of at most {most}")
    return list(value)


def _stop_word(word: Any, tokenizer: Tokenizer, stop: list[str], stop_ids: list[int]) -> None:
    if not isinstance(word, list) or not word or not all(type(t) is int and 0 <= t < tokenizer.vocab_size for t in word):
        raise RequestError(f"stop_word_ids: {reprlib.repr(word)} is not a list of token ids in 0..{tokenizer.vocab_size - 1}")
    text = tokenizer.decode(word)
    if "\ufffd" in text:
        raise RequestError(f"stop_word_ids: {reprlib.repr(word)} is part of a character: give whole characters")
    if text:
        stop.append(text)
    elif len(word) == 1:  # a special token has no text
        stop_ids.append(word[0])
    else:
        raise RequestError(f"stop_word_ids: {reprlib.repr(word)} has no text to look for")
