"""The llama, qwen2 and qwen3 families: pre-norm decoder layers with grouped-query attention and SwiGLU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from oasiskv.checkpoint import ModelConfig
from oasiskv.ops import PackedLinear, rms_norm, silu_mul

Attend = Callable[[int, Tensor], Tensor]


class _Layer:
    def __init__(self, config: ModelConfig, weights: dict[str, Tensor], index: int) -> None:
        def weight(name: str) -> Tensor | None:
            found = weights.get(f"transformer.layers.{index}.{name}")
            return None if found is None else found.float().contiguous()

        self._index = index
        self._eps = config.norm_epsilon
        self._head_size = config.head_size
        self._q = config.num_attention_heads * config.head_size
        self._kv = config.num_key_value_heads * config.head_size
        self._input_norm, self._post_norm = weight("input_layernorm.weight"), weight("post_layernorm.weight")
        self._q_norm, self._k_norm = weight("attention.q_layernorm.weight"), weight("attention.k_layernorm.weight")
        self._qkv = PackedLinear(weight("attention.qkv.weight"), weight("attention.qkv.bias"))
        self._dense = PackedLinear(weight("attention.dense.weight"))
        # Hugging Face's gate_proj is `fc` here, its up_proj is `gate`.
        self._gate_up = PackedLinear(torch.cat([weight("mlp.fc.weight"), weight("mlp.gate.weight")]))
        self._down = PackedLinear(weight("mlp.proj.weight"))

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        qkv = self._qkv(rms_norm(x, self._input_norm, self._eps))
        if self._q_norm is not None:
            qkv = self._normalise_heads(qkv)
        x = x + self._dense(attend(self._index, qkv))
        return x + self._down(silu_mul(self._gate_up(rms_norm(x, self._post_norm, self._eps))))

    def _normalise_heads(self, qkv: Tensor) -> Tensor:
        q, k, v = qkv.split([self._q, self._kv, self._kv], dim=1)
        q = rms_norm(q.reshape(-1, self._head_size), self._q_norm, self._eps).view(-1, self._q)
        k = rms_norm(k.reshape(-1, self._head_size), self._k_norm, self._eps).view(-1, self._kv)
        return torch.cat([q, k, v], dim=1)


class DecoderModel:
    """Weights packed for the core's `linear`; computes in float32.

    `attend(layer, qkv)` gets packed rows [rows, (Hq + 2H) * D] after bias and QK norm, before RoPE, and returns [rows, Hq * D].
    """

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        self.config = config
        self._embedding = weights["transformer.vocab_embedding.weight"].float()
        self._layers = [_Layer(config, weights, i) for i in range(config.num_hidden_layers)]
        self._final_norm = weights["transformer.ln_f.weight"].float().contiguous()
        self._head = PackedLinear(weights.get("lm_head.weight", self._embedding))
        self._last = torch.empty(0, config.hidden_size)

    def forward(self, token_ids: Tensor, attend: Attend, logits_rows: Tensor) -> Tensor:
        """token_ids int64 [rows], logits_rows int64 [n] -> logits float32 [n, vocab]"""
        x = self._embedding[token_ids]
        for layer in self._layers:
            x = layer(x, attend)
        self._last = x
        return self.logits(logits_rows)

    def logits(self, rows: Tensor) -> Tensor:
        """Of rows, int64 [n], of the last `forward`: float32 [n, vocab]"""
        if len(rows) == 0:
            return torch.empty(0, self.config.vocab_size)
        return self._head(rms_norm(self._last[rows].contiguous(), self._final_norm, self.config.norm_epsilon))
