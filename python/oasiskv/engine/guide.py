"""Guides: what form an answer must have, as masks of the tokens that may come next (llguidance)."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from oasiskv.engine.sampling import Guide
from oasiskv.errors import OasisError, RequestError
from oasiskv.tokenizer import Tokenizer

_KEPT = 16  # compiled guides: one may have 100 MB
_STACK_BYTES = 512 << 20  # virtual; the compiler recurses a frame of some KB for every few bytes of a text
_MAX_EBNF_RULES = 1000  # the converter looks at all of them as often as they are deep
_MAX_LEXER_STATES = 20_000  # some KB each
_MESSAGE_CHARS = 500
_JSON = '{"type": ["object", "array"]}'
# Without a bound a model may go on with spaces for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,16}"}


class GuideError(OasisError):
    """A guide that compiled and then went over a limit of the library."""


def _choice(text: str) -> str:
    choices = json.loads(text)
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise ValueError("must be a JSON list of strings")
    return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(c) for c in choices))


def _ebnf(text: str) -> str:
    if text.count("::=") > _MAX_EBNF_RULES:
        raise ValueError(f"more than {_MAX_EBNF_RULES} rules")
    return LLMatcher.grammar_from_lark(gbnf_to_lark(text))


_GRAMMARS: dict[str, Callable[[str], str]] = {
    "json": lambda _: LLMatcher.grammar_from_json_schema(_JSON, defaults=_JSON_OPTIONS),
    "json_schema": lambda text: LLMatcher.grammar_from_json_schema(text, defaults=_JSON_OPTIONS),
    "regex": LLMatcher.grammar_from_regex,
    "choice": _choice,
    "ebnf_grammar": _ebnf,
    "lark_grammar": LLMatcher.grammar_from_lark,
}


class RowGuide:
    """A guide as one request follows it; the request's own tokens are the truth. For one thread."""

    def __init__(self, matcher: LLMatcher, library_ends: list[int], end_ids: frozenset[int], vocab_size: int, prompt_tokens: int) -> None:
        self._matcher = matcher
        self._library_ends = [t for t in library_ends if t < vocab_size]
        self._end_ids = [t for t in end_ids if t < vocab_size]
        self._vocab_size = vocab_size
        self._read = prompt_tokens

    def allowed(self, token_ids: list[int]) -> np.ndarray:
        """The ids that may follow `token_ids`, prompt first: int64 [n], ascending. Those that end the request are among them exactly where
        the guide may stop. Raises GuideError.
        """
        self._follow(token_ids)
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise GuideError(f"guide: {_why(self._matcher)}")
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(bool)
        mask[self._library_ends] = False
        if self._matcher.is_accepting():
            mask[self._end_ids] = True
        return np.flatnonzero(mask)

    def complete(self, token_ids: list[int]) -> bool:
        """Whether nothing but an end may follow."""
        self._follow(token_ids)
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _follow(self, token_ids: list[int]) -> None:
        if self._read < len(token_ids):
            self._matcher.consume_tokens(token_ids[self._read :])
            self._read = len(token_ids)


class Guides:
    """Compiles guides for one model's tokens. Thread-safe; the last few are kept."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._library: LLTokenizer | None = None  # made for the first guide, in some 0.2 s
        self._compiled: OrderedDict[Guide, LLMatcher] = OrderedDict()
        self._kept = threading.Lock()  # guards _compiled and what is copied from there
        self._compiling = threading.Lock()  # one at a time: it may take seconds

    def start(self, guide: Guide, end_ids: frozenset[int], prompt_tokens: int) -> RowGuide:
        """For a request that ends by one of end_ids. Raises RequestError for a guide that does not compile."""
        matcher = self._copy(guide)
        if matcher is None:
            with self._compiling:
                matcher = self._copy(guide) or self._compile(guide)
        return RowGuide(matcher, self._library.eos_tokens, end_ids, self._vocab_size, prompt_tokens)

    def _copy(self, guide: Guide) -> LLMatcher | None:
        with self._kept:
            matcher = self._compiled.get(guide)
            if matcher is None:
                return None
            self._compiled.move_to_end(guide)
            return matcher.deep_copy()

    def _compile(self, guide: Guide) -> LLMatcher:
        made: list[LLMatcher] = []
        errors: list[Exception] = []

        def work() -> None:
            try:
                made.append(self._matcher(_GRAMMARS[guide.kind](guide.text)))
            except Exception as error:  # the library's and the converter's are of many kinds
                errors.append(error)

        _run_on_a_deep_stack(work)
        why = str(errors[0]) or type(errors[0]).__name__ if errors else _why(made[0])
        if why:
            raise RequestError(f"guide ({guide.kind}) does not compile: {why[:_MESSAGE_CHARS]}")
        with self._kept:
            self._compiled[guide] = made[0]
            if len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
            return made[0].deep_copy()

    def _matcher(self, grammar: str) -> LLMatcher:
        if self._library is None:
            tokens = max(self._vocab_size, self._tokenizer.vocab_size)
            self._library = LLTokenizer(self._tokenizer.definition(), n_vocab=tokens, eos_token=sorted(self._tokenizer.eos_ids) or None)
        limits = LLParserLimits(max_lexer_states=_MAX_LEXER_STATES, verbose_errors=False)
        matcher = LLMatcher(self._library, grammar, log_level=0, limits=limits)
        if not matcher.is_error() and not any(matcher.compute_bitmask()):
            raise ValueError("no text has this form")
        return matcher


def _why(matcher: LLMatcher) -> str:
    message = matcher.get_error().replace("<non-verbose/>", "").strip()
    return "no text has this form" if message.startswith("NoExtension") else message[:_MESSAGE_CHARS]


def _run_on_a_deep_stack(work: Callable[[], None]) -> None:
    """A text of 64 KiB can nest deeper than a usual stack holds, which would end the process."""
    thread = threading.Thread(target=work, name="oasiskv-guide", daemon=True)
    usual = threading.stack_size(_STACK_BYTES)  # of threads started from here on: others meanwhile get a large one too
    try:
        thread.start()
    finally:
        threading.stack_size(usual)
    thread.join()
