"""The model families of decoder.py on CUDA, by this project's kernels; a step only enqueues and may be captured."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oasiskv import _core
from oasiskv.checkpoint import ModelConfig

if TYPE_CHECKING:
    from oasiskv.engine.token_table import TokenTable

_cuda = getattr(_core, "cuda", None)
# attend(layer, qkv, out): addresses of packed rows [rows, (Hq + 2H) * D] before QK norm and RoPE, and of [rows, Hq * D] to be written;
# enqueues on forward's stream.
CudaAttend = Callable[[int, int, int], None]
_FIXED_ROWS = 64  # that a batch-invariant product works on at a time


class _Layer:
    def __init__(self, index: int, take: Callable[[str], Tensor | None]) -> None:
        def weight(name: str) -> Tensor | None:
            return take(f"transformer.layers.{index}.{name}")

        self.input_norm, self.post_norm = weight("input_layernorm.weight"), weight("post_layernorm.weight")
        self.q_norm, self.k_norm = weight("attention.q_layernorm.weight"), weight("attention.k_layernorm.weight")
        self.qkv, self.qkv_bias = weight("attention.qkv.weight"), weight("attention.qkv.bias")
        self.dense = weight("attention.dense.weight")
        # Hugging Face's gate_proj is `fc` here, its up_proj is `gate`.
        self.gate_up = torch.cat([weight("mlp.fc.weight"), weight("mlp.gate.weight")])
        self.down = weight("mlp.proj.weight")


def _ptr(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


class CudaDecoder:
    """Weights and workspaces on the GPU. The residual stream is in dtype, the logits are float32."""

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        dtype: str,
        max_rows: int,
        max_logits: int,
        batch_invariant: bool = False,
    ) -> None:
        """`weights` is emptied as they move, so that they need not fit twice. dtype: float32, float16 or bfloat16. With `batch_invariant`
        a row's result does not depend on how many rows there are.
        """
        self.config, self.dtype, self.norm_eps = config, dtype, config.norm_epsilon
        self.max_rows, self.max_logits = max_rows, max_logits
        self._type = getattr(torch, dtype)

        def take(name: str) -> Tensor | None:
            found = weights.pop(name, None)
            return None if found is None else found.to("cuda", self._type).contiguous()

        self._embedding = take("transformer.vocab_embedding.weight")
        self._layers = [_Layer(i, take) for i in range(config.num_hidden_layers)]
        self._final_norm = take("transformer.ln_f.weight")
        head = take("lm_head.weight")
        self._head = self._embedding if head is None else head
        self._linear, self._fixed_rows = _cuda.Linear(), _FIXED_ROWS if batch_invariant else 0
        self._allocate()

    def _allocate(self) -> None:
        c, rows, logits_rows = self.config, self.max_rows, self.max_logits

        def workspace(rows: int, width: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(rows, width, dtype=dtype, device="cuda")

        q, kv = c.num_attention_heads * c.head_size, c.num_key_value_heads * c.head_size
        self._residual = workspace(rows, c.hidden_size, self._type)
        self._normed = workspace(rows, c.hidden_size, self._type)
        self._out = workspace(rows, c.hidden_size, self._type)  # of attention and of the MLP, before it joins the residual
        self._qkv = workspace(rows, q + 2 * kv, self._type)
        self._attended = workspace(rows, q, self._type)
        self._gate_up = workspace(rows, 2 * c.intermediate_size, self._type)
        self._activated = workspace(rows, c.intermediate_size, self._type)
        self._last = workspace(logits_rows, c.hidden_size, self._type)
        self._logits = workspace(logits_rows, c.vocab_size, torch.float32)

    def last_logits(self, rows: list[int]) -> Tensor:
        """Of the last call of `forward` or replay of one, float32 [len(rows), vocab], on torch's current stream."""
        return self._logits[torch.tensor(rows, device="cuda")]

    def context_logits(self, first: int, count: int, stream: int) -> Tensor:
        """Of `count` rows of the last call of `forward`: float32 [count, vocab] in host memory. What that call returned is overwritten."""
        found = torch.empty(count, self.config.vocab_size)
        for at in range(0, count, self.max_logits):
            rows = min(self.max_logits, count - at)
            self._multiply(self._normed[first + at :], self._head, self._logits, rows, None, stream, 0)
            found[at : at + rows] = self._logits[:rows].cpu()
        return found

    def _multiply(self, x: Tensor, weight: Tensor, y: Tensor, count: int, bias: Tensor | None, stream: int, sms: int) -> None:
        """y[:count] = x[:count] @ weight.T + bias"""
        n, k = weight.shape
        pointers = (x.data_ptr(), weight.data_ptr(), _ptr(bias), y.data_ptr())
        float_out = y.dtype != self._type
        self._linear.run(self.dtype, count, n, k, sms, *pointers, stream, float_out=float_out, fixed_rows=self._fixed_rows)

    def qk_norm_pointers(self, layer: int) -> tuple[int, int]:
        """Addresses of the layer's q and k norm weights [head_size] in dtype, for the append kernel; 0 where there is none."""
        return _ptr(self._layers[layer].q_norm), _ptr(self._layers[layer].k_norm)

    def tune(self, rows: int, logits_rows: int, stream: int, sms: int = 0) -> None:
        """Time the products' algorithms for these sizes and keep the fastest; some 50 ms, and waits for the stream. Changes results
        by rounding alone; does nothing where products are batch-invariant.
        """
        if self._fixed_rows:
            return
        layers = self._layers
        products = [
            (self._normed, [x.qkv for x in layers], layers[0].qkv_bias, self._qkv, rows),
            (self._attended, [x.dense for x in layers], None, self._out, rows),
            (self._normed, [x.gate_up for x in layers], None, self._gate_up, rows),
            (self._activated, [x.down for x in layers], None, self._out, rows),
            (self._last, [self._head], None, self._logits, logits_rows),
        ]
        for x, weights, bias, y, count in products:
            n, k = weights[0].shape
            pointers = (x.data_ptr(), [w.data_ptr() for w in weights], _ptr(bias), y.data_ptr())
            self._linear.tune(self.dtype, count, n, k, sms, *pointers, 1, stream, float_out=y.dtype != self._type)

    def forward(
        self,
        rows: int,
        logits_rows: int,
        row_ptr: int,
        logits_row_ptr: int,
        table: TokenTable,
        attend: CudaAttend,
        stream: int,
        sms: int = 0,
    ) -> Tensor:
        """Logits float32 [logits_rows, vocab], a view that the next call overwrites.

        row_ptr: Row [rows] (ops.h); logits_row_ptr: LogitsRow [logits_rows] (tokens.h); stream: a CUDA stream's handle; sms: that the
        products are to use, 0: all. Only enqueues. The first call with a count of rows chooses algorithms, so make it before a capture.
        Raises ValueError for more rows than there is room for.
        """
        if rows > self.max_rows or logits_rows > self.max_logits:
            raise ValueError(f"{rows} rows, {logits_rows} of logits: there is room for {self.max_rows} and {self.max_logits}")
        c, row_bytes = self.config, self._residual.element_size() * self.config.hidden_size

        def linear(x: Tensor, weight: Tensor, y: Tensor, count: int = rows, bias: Tensor | None = None) -> None:
            self._multiply(x, weight, y, count, bias, stream, sms)

        def norm(x: Tensor, weight: Tensor, residual: Tensor | None = self._residual) -> None:
            pointers = (x.data_ptr(), _ptr(residual), weight.data_ptr(), self._normed.data_ptr())
            _cuda.add_rms_norm(self.dtype, *pointers, rows, c.hidden_size, self.norm_eps, stream)

        _cuda.embed(row_ptr, rows, table.tables, self._embedding.data_ptr(), self._residual.data_ptr(), row_bytes, stream)
        for i, layer in enumerate(self._layers):
            if i == 0:
                norm(self._residual, layer.input_norm, residual=None)
            else:
                norm(self._out, layer.input_norm)
            linear(self._normed, layer.qkv, self._qkv, bias=layer.qkv_bias)
            attend(i, self._qkv.data_ptr(), self._attended.data_ptr())
            linear(self._attended, layer.dense, self._out)
            norm(self._out, layer.post_norm)
            linear(self._normed, layer.gate_up, self._gate_up)
            _cuda.silu_mul(self.dtype, self._gate_up.data_ptr(), self._activated.data_ptr(), rows, c.intermediate_size, stream)
            linear(self._activated, layer.down, self._out)
        norm(self._out, self._final_norm)
        _cuda.take_rows(logits_row_ptr, logits_rows, self._normed.data_ptr(), self._last.data_ptr(), row_bytes, stream)
        linear(self._last, self._head, self._logits, count=logits_rows)
        return self._logits[:logits_rows]
