"""Drafters: n-grams against a slow search, the model drafter against decoding from scratch."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from oasiskv.checkpoint import ModelConfig, load_checkpoint
from oasiskv.checkpoint.store import save_checkpoint
from oasiskv.draft import DraftRequest, make_drafter
from oasiskv.draft.model import ModelDrafter
from oasiskv.draft.ngram import NgramDrafter
from oasiskv.errors import CheckpointError, ConfigError
from oasiskv.tokenizer import Tokenizer


def slow_ngram(tokens: list[int], count: int) -> list[int]:
    """Longest n first, then the latest earlier occurrence; what runs into the end repeats."""
    for n in range(min(4, len(tokens) - 1), 0, -1):
        for end in range(len(tokens) - 1, n - 1, -1):
            if tokens[end - n : end] == tokens[-n:]:
                period = tokens[end:]
                return [period[i % len(period)] for i in range(count)]
    return []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.lists(st.integers(1, 6), min_size=1, max_size=8), st.integers(1, 7))
def test_ngram_finds_what_a_slow_search_finds(tokens, cuts, count):
    drafter, seen = NgramDrafter(), 1
    for cut in cuts:  # the context grows by any number of tokens between calls
        got = drafter.propose([DraftRequest(7, tokens[:seen], count)])
        assert got == [slow_ngram(tokens[:seen], count)]
        seen = min(len(tokens), seen + cut)


def test_ngram_keeps_requests_apart_and_forgets():
    drafter = NgramDrafter()
    a, b = [1, 2, 3, 1, 2], [1, 2, 9, 1, 2]
    assert drafter.propose([DraftRequest(1, a, 1), DraftRequest(2, b, 1)]) == [[3], [9]]
    drafter.forget(1)
    drafter.forget(1)
    assert drafter.propose([DraftRequest(1, b, 1), DraftRequest(2, b, 1)]) == [[9], [9]]


def test_previous_drafts_nothing():
    assert make_drafter("previous", None).propose([DraftRequest(1, [1, 2], 3), DraftRequest(2, [1], 1)]) == [[], []]


# ---------------------------------------------------------------- a model as drafter

VOCAB = 40
CONFIG = ModelConfig("Qwen2ForCausalLM", "float32", VOCAB, 32, 2, 4, 2, 8, 48, 1e-5, 1e4, 256, attn_bias=True)


def tokenizer_json(vocab: int = VOCAB) -> str:
    backend = Backend(models.BPE(vocab={chr(0x21 + i): i for i in range(vocab)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return backend.to_str()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    g = torch.Generator().manual_seed(5)
    weights = {n: torch.randn(s, generator=g) * (0.5 if len(s) == 2 else 1.0) for n, s in CONFIG.shapes().items()}
    path = tmp_path_factory.mktemp("draft") / "model"
    save_checkpoint(path, CONFIG, weights, {"tokenizer.json": tokenizer_json()})
    return path


@pytest.fixture
def drafter(folder):
    return make_drafter(f"model:{folder}", Tokenizer.from_dir(folder))


def greedy(folder, tokens: list[int], count: int) -> list[int]:
    """Greedy continuation by transformers, from scratch at every token."""
    transformers = pytest.importorskip("transformers")
    config, ours = load_checkpoint(folder)
    model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        rms_norm_eps=1e-5, max_position_embeddings=256, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        tie_word_embeddings=False,
    )).eval()  # fmt: skip
    state = {"model.embed_tokens.weight": ours["transformer.vocab_embedding.weight"], "model.norm.weight": ours["transformer.ln_f.weight"],
             "lm_head.weight": ours["lm_head.weight"]}  # fmt: skip
    for i in range(config.num_hidden_layers):
        a, b = f"transformer.layers.{i}.", f"model.layers.{i}."
        for kind in ("weight", "bias"):
            parts = ours[f"{a}attention.qkv.{kind}"].split([32, 16, 16])
            state |= {f"{b}self_attn.{p}_proj.{kind}": w for p, w in zip("qkv", parts, strict=True)}
        state |= {
            f"{b}self_attn.o_proj.weight": ours[a + "attention.dense.weight"], f"{b}mlp.gate_proj.weight": ours[a + "mlp.fc.weight"],
            f"{b}mlp.up_proj.weight": ours[a + "mlp.gate.weight"], f"{b}mlp.down_proj.weight": ours[a + "mlp.proj.weight"],
            f"{b}input_layernorm.weight": ours[a + "input_layernorm.weight"],
            f"{b}post_attention_layernorm.weight": ours[a + "post_layernorm.weight"],
        }  # fmt: skip
    model.load_state_dict(state)
    out = list(tokens)
    with torch.no_grad():
        for _ in range(count):
            out.append(int(model(torch.tensor([out])).logits[0, -1].argmax()))
    return out[len(tokens) :]


def test_model_drafts_are_its_greedy_continuation(folder, drafter):
    """Right and wrong drafts, several tokens between calls, two requests side by side."""
    a, b = [3, 1, 4, 1, 5, 9, 2, 6], [2, 7, 1]
    for step in range(6):
        got = drafter.propose([DraftRequest(1, list(a), 3), DraftRequest(2, list(b), 1)])
        assert got == [greedy(folder, a, 3), greedy(folder, b, 1)]
        a += got[0][: step % 4] if step % 2 else [(got[0][0] + 1) % VOCAB]  # accept some, or refuse all
        b += [step]
    drafter.forget(1)
    assert drafter.propose([DraftRequest(1, list(b), 2)]) == [greedy(folder, b, 2)]  # a reused id carries nothing over


def test_model_drafts_across_prefill_chunks(folder, drafter, monkeypatch):
    monkeypatch.setattr("oasiskv.draft.model._CHUNK", 7)
    tokens = [i * 13 % VOCAB for i in range(50)]
    turns = [drafter.propose([DraftRequest(1, tokens, 2)])[0] for _ in range(8)]
    assert turns == [[]] * 7 + [greedy(folder, tokens, 2)]  # one chunk a turn: a long prompt does not hold up the others


def test_a_token_that_the_draft_model_does_not_know_has_no_drafts(drafter):
    """The target's head may be padded further than the draft model's."""
    assert drafter.propose([DraftRequest(1, [1, VOCAB, 2], 2), DraftRequest(2, [1, 2], 1)])[0] == []


def test_model_drafter_stays_within_its_memory(folder):
    drafter = ModelDrafter(str(folder), Tokenizer.from_dir(folder), cache_bytes=200 * 2 * 2 * 2 * 8 * 4)  # 200 tokens
    long = [i % VOCAB for i in range(90)]
    expected = greedy(folder, long, 1)
    for _ in range(2):  # three do not fit together: the last has no drafts until one has ended
        for i in range(3):
            assert drafter.propose([DraftRequest(i, list(long), 1)]) == [expected if i == 0 else []]
            assert sum(c.bytes for c in drafter._caches.values()) <= drafter._cache_bytes
    assert drafter.propose([DraftRequest(9, [1] * 120, 1)]) == [[]]  # never fits
    drafter.forget(0)
    assert drafter.propose([DraftRequest(2, list(long), 1)]) == [expected]


def test_model_drafter_stops_at_its_own_context(drafter):
    assert drafter.propose([DraftRequest(1, [1] * 256, 1), DraftRequest(2, [1] * 255, 2)]) == [[], []]


def test_a_different_vocabulary_is_refused(folder, tmp_path):
    (tmp_path / "tokenizer.json").write_text(tokenizer_json(VOCAB - 1))
    with pytest.raises(ConfigError, match=r"drafter.*vocabulary"):
        make_drafter(f"model:{folder}", Tokenizer.from_dir(tmp_path))


def test_padding_rows_of_the_head_are_never_drafted(folder, tmp_path):
    config, weights = load_checkpoint(folder)
    padded = tmp_path / "padded"
    padded.mkdir()
    extra = {"transformer.vocab_embedding.weight": torch.zeros(8, 32), "lm_head.weight": torch.full((8, 32), 9.0)}
    save_file({n: torch.cat([w, extra[n], -extra[n]][: 3 if n in extra else 1]) if n in extra else w for n, w in weights.items()},
              padded / "rank0.safetensors")  # fmt: skip
    (padded / "config.json").write_text(json.dumps(config.to_json() | {"vocab_size": VOCAB + 16}))
    (padded / "tokenizer.json").write_text(tokenizer_json())
    drafter = make_drafter(f"model:{padded}", Tokenizer.from_dir(folder))
    assert drafter.propose([DraftRequest(1, [3, 1, 4], 3)]) == [greedy(folder, [3, 1, 4], 3)]


def test_unknown_drafters_are_refused(folder):
    with pytest.raises(ConfigError, match="eagle3"):
        make_drafter("eagle3", None)
    with pytest.raises(CheckpointError, match="nowhere"):
        make_drafter("model:/nowhere", Tokenizer.from_dir(folder))
