"""What a model refuses of a request, whatever state the engine is in."""

from __future__ import annotations

from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import RequestError

MAX_LOGITS_BYTES = 1 << 30  # of one request: its client may not have read any


def check_request(prompt_ids: list[int], params: SamplingParams, vocab_size: int) -> None:
    """Raises RequestError."""
    if not prompt_ids:
        raise RequestError("the prompt is empty: give at least one token")
    for token in prompt_ids:
        if not isinstance(token, int) or not 0 <= token < vocab_size:
            raise RequestError(f"prompt token id {token!r}: must be an integer in 0..{vocab_size - 1}, as the vocabulary is")
    named = {"bad_words": [t for word in params.bad_words for t in word], "logit_bias": [t for t, _ in params.logit_bias]}
    for field, ids in named.items():
        if ids and max(ids) >= vocab_size:
            raise RequestError(f"{field}: token id {max(ids)}: must be in 0..{vocab_size - 1}, as the vocabulary is")
    tokens = len(prompt_ids) * params.return_context_logits + params.max_tokens * params.return_generation_logits
    size = tokens * vocab_size * 4
    if size > MAX_LOGITS_BYTES:
        raise RequestError(
            f"return_context_logits, return_generation_logits: {tokens} tokens (the prompt's for the one, max_tokens for the other) "
            f"x {vocab_size} x 4 bytes = {size} bytes; at most {MAX_LOGITS_BYTES} are served"
        )
