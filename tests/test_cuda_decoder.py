"""The decoder on CUDA against a float64 model in torch, eagerly and as a captured graph."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from oasiskv import _core
from oasiskv.checkpoint import ModelConfig
from oasiskv.engine.token_table import TokenTable
from oasiskv.models.cuda_decoder import CudaDecoder
from reference.cuda import DTYPES, NAN, ints, needs_gpu, relative_error, stream

pytestmark = [*needs_gpu, pytest.mark.cublas]

LLAMA = ModelConfig("LlamaForCausalLM", "float32", 200, 64, 3, 4, 2, 64, 96, 1e-5, 1e4, 256)
CONFIGS = {
    "plain": LLAMA,
    "qk_norm": replace(LLAMA, architecture="Qwen3ForCausalLM", qk_layernorm=True),
    "bias, tied": replace(LLAMA, architecture="Qwen2ForCausalLM", attn_bias=True, share_embedding_table=True),
}
ROOM = 80
TOLERANCE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 4e-2}  # a few layers' roundings


def random_weights(config: ModelConfig, dtype: str) -> dict[str, Tensor]:
    torch.manual_seed(config.vocab_size)
    weights = {}
    for name, shape in config.shapes().items():
        scale = 1 if "embedding" in name else 0.5 if "bias" in name else 0.2 if len(shape) == 1 else shape[1] ** -0.5
        mean = 1 if "norm" in name or "ln_f" in name else 0
        weights[name] = (torch.randn(shape) * scale + mean).to(DTYPES[dtype])
    return weights


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def dense_attention(config: ModelConfig, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
    """float64 packed rows of one sequence -> [rows, Hq * D]; causal, without RoPE, by sums that do not depend on a library's choice."""
    rows, d, heads = len(qkv), config.head_size, config.num_key_value_heads
    group = config.num_attention_heads // heads
    q, k, v = qkv.split([heads * group * d, heads * d, heads * d], dim=1)
    q, k, v = q.view(rows, heads * group, d), k.view(rows, heads, d), v.view(rows, heads, d)
    if q_norm is not None:
        q, k = rms_norm(q, q_norm, config.norm_epsilon), rms_norm(k, k_norm, config.norm_epsilon)
    k, v = (t[:, :, None].expand(rows, heads, group, d).reshape(q.shape) for t in (k, v))
    scores = (q[:, None] * k[None]).sum(-1) / d**0.5  # [row, key, head]
    later = torch.ones(rows, rows, dtype=torch.bool, device=qkv.device).triu(1)
    weights = scores.masked_fill(later[:, :, None], float("-inf")).softmax(dim=1)
    return (weights[..., None] * v[None]).sum(1).reshape(rows, -1)


def own_queries(config: ModelConfig, qkv: Tensor, q_norm: Tensor | None, k_norm: Tensor | None) -> Tensor:
    """In place of attention, where a row is to depend on itself alone."""
    return qkv[:, : config.num_attention_heads * config.head_size]


Attention = Callable[[ModelConfig, Tensor, Tensor | None, Tensor | None], Tensor]


def reference(
    config: ModelConfig, weights: dict[str, Tensor], tokens: list[int], logits_rows: list[int], attention: Attention = dense_attention
) -> Tensor:
    w = {name: tensor.double().cuda() for name, tensor in weights.items()}
    embedding = w["transformer.vocab_embedding.weight"]
    x = embedding[tokens]
    for i in range(config.num_hidden_layers):
        layer = {n.removeprefix(f"transformer.layers.{i}."): t for n, t in w.items() if n.startswith(f"transformer.layers.{i}.")}
        qkv = rms_norm(x, layer["input_layernorm.weight"], config.norm_epsilon) @ layer["attention.qkv.weight"].T
        qkv = qkv + layer.get("attention.qkv.bias", 0)
        norms = [layer.get(f"attention.{n}_layernorm.weight") for n in "qk"]
        x = x + attention(config, qkv, *norms) @ layer["attention.dense.weight"].T
        y = rms_norm(x, layer["post_layernorm.weight"], config.norm_epsilon)
        gate, up = y @ layer["mlp.fc.weight"].T, y @ layer["mlp.gate.weight"].T
        x = x + (gate * gate.sigmoid() * up) @ layer["mlp.proj.weight"].T
    return rms_norm(x[logits_rows], w["transformer.ln_f.weight"], config.norm_epsilon) @ w.get("lm_head.weight", embedding).T


class Attend:
    """An attention on the addresses that the decoder gives, with the norms that it names."""

    def __init__(self, decoder: CudaDecoder, rows: int, attention: Attention = dense_attention) -> None:
        self._decoder, self._rows, self._attention = decoder, rows, attention
        norms = [t for layer in decoder._layers for t in (layer.q_norm, layer.k_norm) if t is not None]
        self._at = {t.data_ptr(): t for t in (decoder._qkv, decoder._attended, *norms)}

    def __call__(self, layer: int, qkv: int, out: int) -> None:
        norms = [self._at[p].double() if p else None for p in self._decoder.qk_norm_pointers(layer)]
        result = self._attention(self._decoder.config, self._at[qkv][: self._rows].double(), *norms)
        self._at[out][: self._rows].copy_(result)


class Step:
    """Rows of two requests, drafts and padding among them. `shuffle` gives them other values, in place."""

    def __init__(self, config: ModelConfig, rows: int, padding: int) -> None:
        self._config, self.count, self._real = config, rows, rows - padding
        self.table = TokenTable(2, 40)
        self._rows, self._logits_rows = ints([(-1, 0, -1, 0, 0)] * rows), ints([(-1, 0, 0)] * 4)
        self.shuffle(1)

    def shuffle(self, seed: int) -> None:
        rng = random.Random(seed)
        torch.manual_seed(seed)
        self.table.tokens.copy_(torch.randint(self._config.vocab_size, self.table.tokens.shape))
        self.table.drafts.copy_(torch.randint(self._config.vocab_size, self.table.drafts.shape))
        rows = [(rng.randrange(40), 0, -1, rng.randrange(2), max(0, rng.randrange(-4, 5))) for _ in range(self._real)]
        self._rows[: self._real] = ints(rows)
        self.wanted = [0, self._real - 1, rng.randrange(self._real)]  # and one of padding
        self._logits_rows[:3] = ints([(row, 0, 0) for row in self.wanted])
        tokens, drafts = self.table.tokens.tolist(), self.table.drafts.tolist()
        self.tokens = [drafts[request][draft - 1] if draft else tokens[request][position] for position, _, _, request, draft in rows]

    def run(self, decoder: CudaDecoder, sms: int = 0) -> Tensor:
        pointers = (self._rows.data_ptr(), self._logits_rows.data_ptr())
        return decoder.forward(self.count, 4, *pointers, self.table, Attend(decoder, self.count), stream(), sms)


def make(config: ModelConfig, dtype: str, batch_invariant: bool = False) -> tuple[CudaDecoder, dict[str, Tensor]]:
    weights = random_weights(config, dtype)
    given = dict(weights)
    decoder = CudaDecoder(config, given, dtype, max_rows=ROOM, max_logits=ROOM, batch_invariant=batch_invariant)
    assert not given  # taken over, so that the caller's copies can go
    return decoder, weights


def poison(decoder: CudaDecoder) -> None:
    for name in ("_residual", "_normed", "_out", "_qkv", "_attended", "_gate_up", "_activated", "_last", "_logits"):
        getattr(decoder, name).fill_(NAN)


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("variant", list(CONFIGS))
def test_forward(variant: str, dtype: str) -> None:
    config = CONFIGS[variant]
    decoder, weights = make(config, dtype)
    assert all(bool(p) == config.qk_layernorm for i in range(config.num_hidden_layers) for p in decoder.qk_norm_pointers(i))
    for rows, padding, sms in ((1, 0, 0), (9, 2, 0), (33, 1, 100)):
        step = Step(config, rows, padding)
        poison(decoder)
        logits = step.run(decoder, sms)
        torch.cuda.synchronize()
        assert logits.shape == (4, config.vocab_size) and logits.dtype == torch.float32
        assert relative_error(logits[:3], reference(config, weights, step.tokens, step.wanted)) < TOLERANCE[dtype]
        assert (logits[3] == 0).all()  # padding


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_captured_forward_serves_other_rows(dtype: str) -> None:
    config = CONFIGS["qk_norm"]
    decoder, weights = make(config, dtype)
    step = Step(config, 12, 3)
    step.run(decoder)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = step.run(decoder)
    for seed in (1, 2, 3):
        step.shuffle(seed)
        poison(decoder)
        graph.replay()
        captured = logits.clone()
        assert relative_error(captured[:3], reference(config, weights, step.tokens, step.wanted)) < TOLERANCE[dtype]
        poison(decoder)
        assert torch.equal(captured, step.run(decoder))


def test_captured_decoding_takes_its_tokens_from_the_device() -> None:
    """Forward and greedy sampling in one graph: a step's tokens are the next step's rows."""
    decoder, weights = make(LLAMA, "float32")
    table = TokenTable(2, 16)
    prompts = [[3, 5], [7, 11, 13, 17]]
    for request, prompt in enumerate(prompts):
        table.admit(request, prompt)
    rows, logits_rows = ints([(0, 0, -1, 0, 0)] * 2), ints([(0, 0, 0)] * 2)
    attend = Attend(decoder, 2, own_queries)

    def plan(step: int) -> None:
        positions = [len(prompt) - 1 + step for prompt in prompts]
        rows.copy_(ints([(p, 0, -1, i, 0) for i, p in enumerate(positions)]))
        logits_rows.copy_(ints([(i, i, p) for i, p in enumerate(positions)]))

    def forward() -> None:
        logits = decoder.forward(2, 2, rows.data_ptr(), logits_rows.data_ptr(), table, attend, stream())
        arguments = (logits.data_ptr(), LLAMA.vocab_size, logits_rows.data_ptr(), 2, table.tables, table.work.data_ptr())
        _core.cuda.sample_greedy(*arguments, table.result_ptr(0), stream())

    plan(0)
    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        forward()
    expected = [list(prompt) for prompt in prompts]
    for step in range(6):
        plan(step)
        graph.replay()
        torch.cuda.synchronize()
        for tokens in expected:
            tokens.append(int(reference(LLAMA, weights, tokens[-1:], [0], own_queries).argmax()))
        assert table.result(0, 2) == [tokens[-1] for tokens in expected]
    assert table.lengths.tolist() == [len(tokens) for tokens in expected]
    assert all(table.tokens[i, : len(tokens)].tolist() == tokens for i, tokens in enumerate(expected))


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_batch_invariant(dtype: str) -> None:
    """A row by itself gives the bits that it gives among others."""
    decoder, _ = make(CONFIGS["bias, tied"], dtype, batch_invariant=True)
    table = TokenTable(1, ROOM)
    table.tokens.copy_(torch.arange(ROOM)[None])

    def logits_of(positions: list[int]) -> Tensor:
        n = len(positions)
        rows, logits_rows = ints([(p, 0, -1, 0, 0) for p in positions]), ints([(i, 0, p) for i, p in enumerate(positions)])
        attend = Attend(decoder, n, own_queries)
        logits = decoder.forward(n, n, rows.data_ptr(), logits_rows.data_ptr(), table, attend, stream()).clone()
        torch.cuda.synchronize()
        return logits

    everything = logits_of(list(range(ROOM)))
    assert torch.isfinite(everything).all()
    for positions in ([0], [ROOM - 1], [5, 70, 33], list(range(ROOM - 1, 14, -1))):
        assert torch.equal(logits_of(positions), everything[positions])


def test_more_rows_than_there_is_room_for_are_refused() -> None:
    decoder, _ = make(LLAMA, "float32")
    table = TokenTable(1, 8)
    for rows, logits_rows in ((ROOM + 1, 1), (1, ROOM + 1)):
        with pytest.raises(ValueError, match="room for 80 and 80"):
            decoder.forward(rows, logits_rows, 0, 0, table, lambda *_: None, stream())
