"""A smaller model of the same vocabulary drafts greedily over a dense cache of its own."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from oasiskv.checkpoint import ModelConfig, load_checkpoint, resolve_model
from oasiskv.draft.base import Drafter, DraftRequest
from oasiskv.errors import ConfigError
from oasiskv.models.decoder import DecoderModel
from oasiskv.models.rope import rope_tables
from oasiskv.tokenizer import Tokenizer

_CHUNK = 512


class _Cache:
    """Keys and values [layer][kv_head, capacity, D] of one request; `length` of them valid, for the tokens in `tokens`."""

    def __init__(self, layers: int, heads: int, head_size: int) -> None:
        self.tokens: list[int] = []
        self._shape = (heads, 0, head_size)
        self.keys = [torch.empty(self._shape) for _ in range(layers)]
        self.values = [torch.empty(self._shape) for _ in range(layers)]

    def reserve(self, length: int) -> None:
        if length <= self.keys[0].shape[1]:
            return
        heads, _, head_size = self._shape
        for store in (self.keys, self.values):
            for i, old in enumerate(store):
                store[i] = torch.empty(heads, _capacity(length), head_size)
                store[i][:, : old.shape[1]] = old

    @property
    def bytes(self) -> int:
        return 2 * len(self.keys) * self.keys[0].numel() * 4


class ModelDrafter(Drafter):
    """`cache_bytes` bounds all requests' caches: a request that finds no room beside the others has no drafts until some of them have
    ended. Which ones draft then depends on the batch, and with it what a sparse request predicts; dense answers do not. A turn reads at
    most 512 tokens of a request, so that a long prompt does not hold up the others; there are no drafts until all is read.
    Raises ConfigError when the vocabularies differ.
    """

    def __init__(self, model: str, tokenizer: Tokenizer, cache_bytes: int = 2 << 30) -> None:
        folder = resolve_model(model, "float32")
        if not Tokenizer.from_dir(folder).same_vocabulary(tokenizer):  # heads may be padded differently
            raise ConfigError(f"drafter = 'model:{model}': its vocabulary differs from the target model's; use one of the same family")
        self._config, weights = load_checkpoint(folder)
        self._model = DecoderModel(self._config, weights)
        self._cos, self._sin = rope_tables(self._config, self._config.max_position_embeddings)
        self._vocab = tokenizer.vocab_size
        self._caches: dict[int, _Cache] = {}
        self._cache_bytes = cache_bytes

    def propose(self, requests: list[DraftRequest]) -> list[list[int]]:
        with torch.inference_mode():
            return [self._draft(r) for r in requests]

    def forget(self, request_id: int) -> None:
        self._caches.pop(request_id, None)

    def _draft(self, request: DraftRequest) -> list[int]:
        c = self._config
        length = len(request.tokens) + request.count
        others = sum(cache.bytes for i, cache in self._caches.items() if i != request.id)
        if length > c.max_position_embeddings or others + _cache_bytes(c, length) > self._cache_bytes:
            self.forget(request.id)
            return []
        cache = self._caches.setdefault(request.id, _Cache(c.num_hidden_layers, c.num_key_value_heads, c.head_size))
        kept = _common_prefix(cache.tokens, request.tokens[:-1])
        del cache.tokens[kept:]
        todo = request.tokens[kept : kept + _CHUNK]
        if max(todo) >= c.vocab_size:  # heads are padded differently
            return []
        logits = self._forward(cache, todo)
        drafts: list[int] = []
        if len(cache.tokens) == len(request.tokens):
            drafts.append(int(logits[0, : self._vocab].argmax()))
            while len(drafts) < request.count:
                drafts.append(int(self._forward(cache, drafts[-1:])[0, : self._vocab].argmax()))
        return drafts

    def _forward(self, cache: _Cache, tokens: list[int]) -> Tensor:
        start, rows = len(cache.tokens), len(tokens)
        cache.reserve(start + rows)
        c = self._config
        cos, sin = self._cos[start : start + rows], self._sin[start : start + rows]
        mask = torch.ones(rows, start + rows, dtype=torch.bool).tril(start)

        def attend(layer: int, qkv: Tensor) -> Tensor:
            heads = qkv.view(rows, -1, c.head_size).transpose(0, 1)
            q, k, v = heads.split([c.num_attention_heads, c.num_key_value_heads, c.num_key_value_heads])
            cache.keys[layer][:, start : start + rows] = _rotate(k, cos, sin)
            cache.values[layer][:, start : start + rows] = v
            keys, values = cache.keys[layer][:, : start + rows], cache.values[layer][:, : start + rows]
            out = scaled_dot_product_attention(_rotate(q, cos, sin)[None], keys[None], values[None], attn_mask=mask, enable_gqa=True)
            return out[0].transpose(0, 1).reshape(rows, -1).contiguous()

        logits = self._model.forward(torch.tensor(tokens), attend, torch.tensor([rows - 1]))
        cache.tokens += tokens
        return logits


def _cache_bytes(config: ModelConfig, tokens: int) -> int:
    """At most, with the room to grow that `_Cache.reserve` takes."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_size * 4 * _capacity(tokens)


def _capacity(tokens: int) -> int:
    return tokens + tokens // 2 + 64


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def _common_prefix(a: list[int], b: list[int]) -> int:
    if a == b[: len(a)]:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
