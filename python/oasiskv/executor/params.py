"""A client's parameters -> SamplingParams."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import RequestError
from oasiskv.tokenizer import Tokenizer

_KNOWN = frozenset(f.name for f in fields(SamplingParams)) | {"stop_word_ids", "end_id"}


def sampling_params(params: dict[str, Any], tokenizer: Tokenizer) -> SamplingParams:
    """Besides the fields of SamplingParams:

    stop_word_ids, lists of token ids: each becomes a stop *string*, so that it is found however the model splits it into tokens;
    end_id: the one id that ends the generation instead of the model's own; -1 for none. The model's own end id changes nothing.
    Raises RequestError naming the field.
    """
    unknown = params.keys() - _KNOWN
    if unknown:
        raise RequestError(f"unknown parameters: {', '.join(sorted(unknown))}")
    options = dict(params)
    words = options.pop("stop_word_ids", None) or []
    end_id = options.pop("end_id", None)
    stop = options.get("stop") or ()
    stop, stop_ids = [stop] if isinstance(stop, str) else list(stop), list(options.get("stop_token_ids") or ())
    if not isinstance(words, list):
        raise RequestError(f"stop_word_ids = {words!r}: must be a list of lists of token ids")
    for word in words:
        _stop_word(word, tokenizer, stop, stop_ids)
    if end_id is not None and type(end_id) is not int:
        raise RequestError(f"end_id = {end_id!r}: must be a token id")
    if end_id is not None and end_id not in tokenizer.eos_ids:
        options["ignore_eos"] = True
        stop_ids += [end_id] if end_id >= 0 else []
    return SamplingParams(**{**options, "stop": tuple(stop), "stop_token_ids": tuple(stop_ids)})


def _stop_word(word: Any, tokenizer: Tokenizer, stop: list[str], stop_ids: list[int]) -> None:
    if not isinstance(word, list) or not word or not all(type(t) is int and 0 <= t < tokenizer.vocab_size for t in word):
        raise RequestError(f"stop_word_ids: {word!r} is not a list of token ids in 0..{tokenizer.vocab_size - 1}")
    text = tokenizer.decode(word)
    if text:
        stop.append(text)
    elif len(word) == 1:  # a special token has no text
        stop_ids.append(word[0])
    else:
        raise RequestError(f"stop_word_ids: {word!r} has no text to look for")
