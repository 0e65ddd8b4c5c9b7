"""Rotary tables and logits against transformers, with attention done here by plain torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oasiskv import ops
from oasiskv.checkpoint import ModelConfig, convert, load_checkpoint, resolve_model
from oasiskv.models.decoder import DecoderModel
from oasiskv.models.rope import rope_tables

transformers = pytest.importorskip("transformers")

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = [
    None, {"rope_type": "linear", "factor": 2.5}, LLAMA3, YARN, YARN | {"attention_factor": 1.3},
    YARN | {"mscale": 0.7, "mscale_all_dim": 1.1},
    YARN | {"beta_fast": 16, "beta_slow": 2, "truncate": False}, YARN | {"factor": 0.5},
]  # fmt: skip


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("base", "dim"), [(10000.0, 64), (1e6, 128), (500000.0, 16)])
def test_rope_tables_equal_transformers(scaling, base, dim):
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    theirs = transformers.LlamaConfig(
        hidden_size=4 * dim, num_attention_heads=4, head_dim=dim, max_position_embeddings=256,
        rope_parameters={"rope_theta": base, "rope_type": "default"} | (scaling or {}),
    )  # fmt: skip
    cos, sin = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(300)[None])
    ours = None if scaling is None else {("type" if k == "rope_type" else k): v for k, v in scaling.items()}
    config = ModelConfig("LlamaForCausalLM", "float32", 8, 4 * dim, 1, 4, 4, dim, 8, 1e-5, base, 256, ours)
    got = rope_tables(config, 300)
    for mine, full in zip(got, (cos, sin), strict=True):
        assert mine.shape == (300, dim // 2)
        assert mine.dtype == torch.float32
        assert mine.is_contiguous()
        torch.testing.assert_close(mine, full[0, :, : dim // 2], rtol=0, atol=1e-6)


def causal_attention(config: ModelConfig, rows: int):
    """attend(layer, qkv) over the rows themselves, at positions 0.."""
    cos, sin = rope_tables(config, rows)
    q_heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_size
    mask = torch.full((rows, rows), -torch.inf).triu(1)

    def rotate(x):
        a, b = x[..., : dim // 2], x[..., dim // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

    def attend(layer, qkv):
        heads = qkv.view(rows, -1, dim).transpose(0, 1)
        q, k, v = heads.split([q_heads, kv_heads, kv_heads])
        group = q_heads // kv_heads
        k, v = rotate(k).repeat_interleave(group, 0), v.repeat_interleave(group, 0)
        weights = (rotate(q) @ k.transpose(1, 2) / dim**0.5 + mask).softmax(-1)
        return (weights @ v).transpose(0, 1).reshape(rows, -1).contiguous()

    return attend


def our_logits(folder: Path, ids: list[int], rows: list[int]) -> torch.Tensor:
    config, weights = load_checkpoint(folder)
    with torch.inference_mode():
        attend = causal_attention(config, len(ids))
        return DecoderModel(config, weights).forward(torch.tensor(ids), attend, torch.tensor(rows, dtype=torch.int64))


COMMON = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
FAMILIES = {
    "llama": ("Llama", {"rope_parameters": LLAMA3 | {"rope_theta": 10000.0}}),
    "llama-wide-heads": ("Llama", {"head_dim": 16, "rms_norm_eps": 1e-3}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": YARN | {"rope_theta": 10000.0}}),
}


def tiny_hf(folder: Path, family: str, shards: bool = False) -> torch.nn.Module:
    name, options = FAMILIES[family]
    torch.manual_seed(1)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**COMMON, **options)).eval()
    with torch.no_grad():
        for p in model.parameters():  # biases and norms too, so that a forgotten one shows
            p.copy_(torch.randn_like(p) * (0.3 if p.dim() == 2 else 0.5) + (1.0 if p.dim() == 1 else 0.0))
    model.save_pretrained(folder, max_shard_size="40KB" if shards else "1GB")
    (folder / "tokenizer.json").write_text("{}")
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_transformers(tmp_path, family):
    model = tiny_hf(tmp_path / "hf", family, shards=family == "qwen3")
    assert (tmp_path / "hf" / "model.safetensors.index.json").exists() == (family == "qwen3")
    convert(tmp_path / "hf", tmp_path / "ck")
    ids = torch.randint(0, 96, (150,)).tolist()
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    rows = [149, 0, 77]
    got = our_logits(tmp_path / "ck", ids, rows)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected[rows], rtol=1e-3, atol=2e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_older_configs_say_the_same(tmp_path, family):
    """`rope_theta` and `rope_scaling` with `type`, as before transformers 5."""
    tiny_hf(tmp_path / "hf", family)
    convert(tmp_path / "hf", tmp_path / "new")
    path = tmp_path / "hf" / "config.json"
    raw = json.loads(path.read_text())
    rope = raw.pop("rope_parameters")
    raw["rope_theta"] = rope.pop("rope_theta")
    raw["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    path.write_text(json.dumps(raw))
    convert(tmp_path / "hf", tmp_path / "old")
    assert load_checkpoint(tmp_path / "old")[0] == load_checkpoint(tmp_path / "new")[0]


@pytest.fixture(scope="module")
def embedded() -> Path:
    return resolve_model("smollm2-135m", "float32")


def transformers_from_gguf() -> torch.nn.Module:
    """The embedded file read without our importer: transformers' own loader of GGUF weights wants the package accelerate."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    from oasiskv.checkpoint.resolve import embedded_gguf

    config = transformers.LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm", "token_embd": "model.embed_tokens", "output_norm": "model.norm"}  # fmt: skip
    state = {}
    for t in GGUFReader(str(embedded_gguf())).tensors:
        w = torch.from_numpy(dequantize(t.data, t.tensor_type).copy())
        *layer, kind, _ = t.name.split(".")
        if kind in ("attn_q", "attn_k"):  # rows 2i and 2i+1 of a head are its rows i and i+32
            w = torch.cat([torch.cat([head[0::2], head[1::2]]) for head in w.split(64)])
        state[(f"model.layers.{layer[1]}." if layer else "") + names[kind] + ".weight"] = w
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    model.tie_weights()
    return model


def test_embedded_model_equals_transformers(embedded):
    model = transformers_from_gguf()
    ids = list(range(1000, 1200, 7))
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0]
    got = our_logits(embedded, ids, list(range(len(ids))))
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=5e-3)


def test_embedded_model_knows_facts(embedded):
    from oasiskv.tokenizer import Tokenizer

    tokenizer = Tokenizer.from_dir(embedded)
    ids = tokenizer.encode("The capital of France is")
    logits = our_logits(embedded, ids, [len(ids) - 1])
    assert tokenizer.decode([int(logits[0].argmax())]) == " Paris"


def test_no_logits_rows_still_run_every_layer(embedded):
    config, weights = load_checkpoint(embedded)
    seen = []

    def attend(layer, qkv):
        seen.append(layer)
        return qkv[:, : config.num_attention_heads * config.head_size].contiguous()

    out = DecoderModel(config, weights).forward(torch.tensor([5, 6]), attend, torch.tensor([], dtype=torch.int64))
    assert out.shape == (0, config.vocab_size)
    assert seen == list(range(config.num_hidden_layers))


# ---------------------------------------------------------------- ops


@pytest.mark.parametrize(("rows", "n", "k"), [(1, 1, 1), (3, 17, 5), (8, 64, 48), (33, 100, 129)])
def test_ops_equal_torch_and_do_not_depend_on_the_batch(rows, n, k):
    torch.manual_seed(rows)
    x, w, b, g = torch.randn(rows, k), torch.randn(n, k), torch.randn(n), torch.randn(k)
    linear = ops.PackedLinear(w, b)
    w.fill_(7)  # it keeps its own copy
    torch.manual_seed(rows)
    x, w = torch.randn(rows, k), torch.randn(n, k)
    torch.testing.assert_close(linear(x), x @ w.T + b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ops.rms_norm(x, g, 1e-5), torch.nn.functional.rms_norm(x, (k,), g, 1e-5), rtol=1e-5, atol=1e-5)
    pair = torch.randn(rows, 2 * k)
    torch.testing.assert_close(ops.silu_mul(pair), torch.nn.functional.silu(pair[:, :k]) * pair[:, k:], rtol=1e-5, atol=1e-5)
    for op in (linear, lambda t: ops.rms_norm(t, g, 1e-5)):
        assert torch.equal(op(x), torch.cat([op(x[i : i + 1].contiguous()) for i in range(rows)]))
    assert torch.equal(ops.silu_mul(pair), torch.cat([ops.silu_mul(pair[i : i + 1].contiguous()) for i in range(rows)]))


def test_ops_refuse_what_the_pointers_cannot_carry():
    linear = ops.PackedLinear(torch.randn(4, 6))
    for bad in (torch.randn(2, 5), torch.randn(6), torch.randn(2, 6).double(), torch.randn(6, 2).t(), torch.randn(2, 12)[:, ::2]):
        with pytest.raises(ValueError, match="linear"):
            linear(bad)
        with pytest.raises(ValueError, match="rms_norm"):
            ops.rms_norm(bad, torch.ones(6), 1e-5)
    for weight in (torch.ones(6).double(), torch.ones(12)[::2]):
        with pytest.raises(ValueError, match="rms_norm"):
            ops.rms_norm(torch.randn(2, 6), weight, 1e-5)
    with pytest.raises(ValueError, match="silu_mul"):
        ops.silu_mul(torch.randn(2, 5))
    with pytest.raises(ValueError, match="PackedLinear"):
        ops.PackedLinear(torch.randn(4, 6), torch.randn(5))
