"""Log-probabilities of the executor -> OpenAI's two forms.

The executor's: [logprob, [[id, logprob], ...]] a token, its own and those of the likeliest, as `executor/protocol.py` has it.
"""

from __future__ import annotations

from typing import Any

from oasiskv.tokenizer import Tokenizer


def of_chat(tokenizer: Tokenizer, token_ids: list[int], logprobs: list[list[Any]]) -> dict[str, Any]:
    """{"content": an object a token with its text, bytes and alternatives}."""
    content = [
        {**_entry(tokenizer, token, logprob), "top_logprobs": [_entry(tokenizer, *pair) for pair in top]}
        for token, (logprob, top) in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def of_completion(tokenizer: Tokenizer, token_ids: list[int], logprobs: list[list[Any]], offset: int) -> tuple[dict[str, Any], int]:
    """Four lists over the tokens, and the offset of the next token. `offset`: characters of the sequence's tokens before.

    The alternatives are an object by text; the token itself is always among them.
    """
    texts = [_bytes(tokenizer, token).decode("utf-8", "replace") for token in token_ids]
    tops, offsets = [], []
    for text, (logprob, top) in zip(texts, logprobs, strict=True):
        tops.append({_bytes(tokenizer, t).decode("utf-8", "replace"): p for t, p in top} | {text: logprob})
        offsets.append(offset)
        offset += len(text)
    own = [logprob for logprob, _ in logprobs]
    return {"tokens": texts, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}, offset


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, Any]:
    data = _bytes(tokenizer, token)
    return {"token": data.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(data)}


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    """What a token stands for; of one that has no text, such as the end of a turn, its name."""
    data = tokenizer.token_bytes(token)
    if data is None:
        data = tokenizer.decode([token]).encode()
    return data or tokenizer.token_name(token).encode()
