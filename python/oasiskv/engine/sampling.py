"""What a client may ask of sampling, validated."""

from __future__ import annotations

import reprlib
import sys
from dataclasses import dataclass
from typing import Any

from oasiskv.errors import RequestError

_INT32_MAX = 2**31 - 1  # what every client's protocol can carry
MAX_STOPS, MAX_STOP_CHARS = 64, 1024  # every token is held against all of them
MAX_SALT_CHARS = 256
MAX_BAD_WORDS, MAX_BAD_WORD_IDS = 1024, 64  # looked through for every token
GUIDES = ("json", "json_schema", "regex", "choice", "ebnf_grammar", "lark_grammar")
MAX_GUIDE_BYTES = 64 << 10
_FLOAT32_MAX = 3.4028234663852886e38
_FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


def _check(ok: bool, field: str, value: object, rule: str) -> None:
    if not ok:
        raise RequestError(f"{field} = {reprlib.repr(value)}: {rule}")


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _integer(value: object, low: int, high: int = _INT32_MAX) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_salt(value: object) -> bool:
    """Half a surrogate pair is no text: it has no UTF-8."""
    return isinstance(value, str) and len(value) <= MAX_SALT_CHARS and not any("\ud800" <= c <= "\udfff" for c in value)


@dataclass(frozen=True)
class Guide:
    """What form an answer must have.

    kind: json (an object or array; no text), json_schema, regex (the whole answer), choice (a JSON list of strings, one of which the answer
    is), ebnf_grammar (GBNF, begins at `root`) or lark_grammar (llguidance's, begins at `start`). Raises RequestError.
    """

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        _check(self.kind in GUIDES, "guide", self.kind, f"the kind must be one of {', '.join(GUIDES)}")
        _check(isinstance(self.text, str), "guide", self.text, "the text must be a string")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise RequestError("guide: the text is not valid Unicode") from None
        _check(size <= MAX_GUIDE_BYTES, "guide", self.text, f"{size} bytes, at most {MAX_GUIDE_BYTES} are served")
        _check(
            (self.kind == "json") == (not self.text), "guide", self.text, f"{self.kind} takes {'no' if self.kind == 'json' else 'a'} text"
        )


def _bad_words(value: Any) -> tuple[tuple[int, ...], ...]:
    few = isinstance(value, list | tuple) and len(value) <= MAX_BAD_WORDS
    few = few and all(
        isinstance(word, list | tuple) and 0 < len(word) <= MAX_BAD_WORD_IDS and all(_integer(t, 0) for t in word) for word in value
    )
    _check(few, "bad_words", value, f"must be at most {MAX_BAD_WORDS} lists of 1..{MAX_BAD_WORD_IDS} token ids")
    return tuple(tuple(word) for word in value)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    pairs = isinstance(value, list | tuple) and all(isinstance(p, list | tuple) and len(p) == 2 for p in value)
    _check(pairs, "logit_bias", value, "must be a list of pairs (token id, number)")
    for pair in value:
        good = _integer(pair[0], 0) and _finite(pair[1]) and abs(pair[1]) <= _FLOAT32_MAX
        _check(good, "logit_bias", pair, "must be a token id and a finite 32-bit number")
    _check(len({token for token, _ in value}) == len(value), "logit_bias", value, "names a token id twice")
    return tuple((token, float(bias)) for token, bias in value)


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy; top_k 0, top_p 1 and min_p 0 filter nothing. Raises RequestError naming the field."""

    max_tokens: int = 128
    min_tokens: int = 0  # before that many, neither end-of-sequence nor stop ids are sampled
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0  # a token's randomness depends on (seed, position) alone
    repetition_penalty: float = 1.0  # over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    logprobs: int | None = None  # top alternatives a token, besides its own
    cache_salt: str = ""  # prefixes are shared only among requests of one salt
    use_cache: bool = True  # false: neither reuse cached prefixes nor leave any
    bad_words: tuple[tuple[int, ...], ...] = ()  # the last id of each is not sampled where those before it are the newest tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added to its logit before penalties), each id once
    guide: Guide | None = None
    return_context_logits: bool = False  # of every prompt token, before anything is applied; the whole prompt is computed for it
    return_generation_logits: bool = False  # of every generated token

    def __post_init__(self) -> None:
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        for field in ("stop", "stop_token_ids"):
            value = getattr(self, field)
            _check(isinstance(value, list | tuple), field, value, "must be a list")
            object.__setattr__(self, field, tuple(value))
        for field in _FLOATS:
            _check(_finite(getattr(self, field)), field, getattr(self, field), "must be a number")
            object.__setattr__(self, field, float(getattr(self, field)))
        for field in ("ignore_eos", "include_stop_text", "use_cache", "return_context_logits", "return_generation_logits"):
            _check(isinstance(getattr(self, field), bool), field, getattr(self, field), "must be true or false")
        _check(_integer(self.max_tokens, 1), "max_tokens", self.max_tokens, f"must be an integer in 1..{_INT32_MAX}")
        few = _integer(self.min_tokens, 0, self.max_tokens)
        _check(few, "min_tokens", self.min_tokens, "must be in 0..max_tokens")
        _check(self.temperature >= 0, "temperature", self.temperature, "must be 0 (greedy) or more")
        _check(_integer(self.top_k, 0), "top_k", self.top_k, f"must be in 0 (off)..{_INT32_MAX}")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "must be in (0, 1]")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "must be in 0..1")
        _check(_integer(self.seed, 0, 2**64 - 1), "seed", self.seed, "must be an unsigned 64-bit integer")
        _check(self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "must be above 0")
        for field in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, field)
            _check(-2 <= value <= 2, field, value, "must be in -2..2")
        few = len(self.stop) <= MAX_STOPS and all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_CHARS for s in self.stop)
        _check(few, "stop", self.stop, f"must be at most {MAX_STOPS} strings of 1..{MAX_STOP_CHARS} characters")
        few = len(self.stop_token_ids) <= MAX_STOPS and all(_integer(t, 0) for t in self.stop_token_ids)
        _check(few, "stop_token_ids", self.stop_token_ids, f"must be at most {MAX_STOPS} token ids")
        top = self.logprobs
        _check(top is None or _integer(top, 0, 20), "logprobs", top, "must be in 0..20")
        _check(_is_salt(self.cache_salt), "cache_salt", self.cache_salt, f"must be text of at most {MAX_SALT_CHARS} characters")
        object.__setattr__(self, "bad_words", _bad_words(self.bad_words))
        object.__setattr__(self, "logit_bias", _logit_bias(self.logit_bias))
        _check(self.guide is None or isinstance(self.guide, Guide), "guide", self.guide, "must be a Guide")
        free = self.guide is None or self.min_tokens == 0
        _check(free, "min_tokens", self.min_tokens, "must be 0 with a guide, which alone says where the answer may end")

    def end_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids that end the request."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    @property
    def sampled_on_host(self) -> bool:
        """Whether sampling needs what the device does not keep: counts of tokens, the logits themselves, or what was generated."""
        masked = self.min_tokens > 0 or self.guide is not None or bool(self.bad_words)
        told = self.logprobs is not None or self.return_context_logits or self.return_generation_logits
        return self.penalised or masked or told or bool(self.logit_bias)
