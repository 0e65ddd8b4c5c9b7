"""The embedded model's tokenizer against transformers' own, chat templates, and text that comes in pieces."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from oasiskv.checkpoint import gguf_tokenizer, resolve_model
from oasiskv.checkpoint.resolve import embedded_gguf
from oasiskv.errors import CheckpointError, RequestError
from oasiskv.tokenizer import IncrementalDetokenizer, Tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "I'll say it's 3.14159 or 1,234,567 (in 2024), won't I?",
    "def f(x):\n    return {'a': [x ** 2 for _ in range(10)]}\n\n\t# tabs\tand\n",
    "emoji: 😀👩‍👩‍👧‍👦🇺🇳 ✅  and accents: naïve café Ünïcødé e\u0301",
    "中文字符和日本語のテキスト、한국어도 있습니다。",
    "العربية עברית हिन्दी ไทย",
    "   leading, trailing   \n\n\n   ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "mixed\r\nline\u00a0ends\u2028x\x00y\x7f",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaa ================ ........",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(resolve_model("smollm2-135m"))


@pytest.fixture(scope="module")
def reference():
    transformers = pytest.importorskip("transformers")
    path = embedded_gguf()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(tokenizer, reference, text):
    ids = tokenizer.encode(text)
    assert ids == reference(text, add_special_tokens=False).input_ids
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@settings(max_examples=200, deadline=None)
@given(text=st.text(st.characters(exclude_categories=("Cs", "Nd", "Nl", "No")), max_size=60))
def test_ids_are_those_of_transformers_on_any_text(tokenizer, reference, text):
    # Without numbers: transformers' GGUF import drops SmolLM2's digit splitter, see the next test.
    assert tokenizer.encode(text) == reference(text, add_special_tokens=False).input_ids


def test_digits_stand_alone(tokenizer):
    """SmolLM2's own tokenizer.json splits digits off first, so spaces before a number stay together."""
    two_spaces = tokenizer.encode("  ")
    assert len(two_spaces) == 1
    assert tokenizer.encode("x  17") == [*tokenizer.encode("x"), *two_spaces, *tokenizer.encode("1"), *tokenizer.encode("7")]


def test_chat_is_the_models_own_template(tokenizer, reference):
    messages = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "4"}, {"role": "user", "content": "Sure?"}]
    for chat in (messages, [{"role": "system", "content": "Be brief."}, *messages]):
        assert tokenizer.apply_chat(chat) == reference.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert [reference.decode([i]) for i in tokenizer.eos_ids] == ["<|im_end|>"]


def test_text_that_is_not_unicode_is_a_request_error(tokenizer):
    with pytest.raises(RequestError, match="Unicode"):
        tokenizer.encode("ok \ud800")


# ---------------------------------------------------------------- pieces


def check_pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = IncrementalDetokenizer(tokenizer)
    pieces = [stream.push(i) for i in ids]
    pieces.append(stream.flush())
    assert stream.complete
    assert "".join(pieces) == tokenizer.decode(ids)
    return pieces


@settings(max_examples=300, deadline=None)
@given(ids=st.lists(st.integers(0, 49151) | st.integers(17, 280), max_size=40))
def test_pieces_of_any_ids_join_to_the_decoded_text(tokenizer, ids):
    check_pieces(tokenizer, ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_pieces_of_text_hold_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = check_pieces(tokenizer, ids)
    if tokenizer.decode(ids) == text and "\ufffd" not in text:  # SmolLM2's vocabulary lacks a few bytes and drops them
        assert all("\ufffd" not in p for p in pieces)


def test_half_a_character_waits(tokenizer):
    ids = tokenizer.encode("👩‍👩‍👧‍👦")
    assert len(ids) > 7
    stream = IncrementalDetokenizer(tokenizer)
    assert stream.push(ids[0]) == ""
    assert not stream.complete
    assert stream.flush() == "\ufffd"


def test_garbage_without_end_joins_too(tokenizer):
    byte = tokenizer.encode("👩")[0]
    assert check_pieces(tokenizer, [byte] * 50)[20] == "\ufffd"


def sentencepiece_like() -> Backend:
    """Metaspace BPE with byte fallback, as Llama 2's."""
    vocab = {"<unk>": 0, "<s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5} | {f"<0x{b:02X}>": 6 + b for b in range(256)}
    backend = Backend(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    return backend


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab é€😀", max_size=20))
def test_pieces_of_a_tokenizer_that_is_not_byte_level(text):
    tokenizer = Tokenizer(sentencepiece_like(), {"bos_token": "<s>"}, {}, None)
    pieces = check_pieces(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text
    assert all("\ufffd" not in p for p in pieces)


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("config", "adds"),
    [({}, True), ({"add_bos_token": True}, True), ({"add_bos_token": False}, False), ({"bos_token": None}, False)],
    ids=str,
)
def test_bos_comes_only_where_configured_and_never_twice(config, adds):
    tokenizer = Tokenizer(sentencepiece_like(), {"bos_token": {"content": "<s>"}} | config, {}, None)
    assert (tokenizer.encode("a")[0] == 1) == adds
    assert tokenizer.encode("<s>a").count(1) == 1
    assert 1 not in tokenizer.encode("a", bos=False)


def test_eos_may_be_one_or_several():
    for eos, expected in ((3, {3}), ([3, 4], {3, 4}), (None, {1})):
        assert Tokenizer(sentencepiece_like(), {"eos_token": "<s>"}, {"eos_token_id": eos}, None).eos_ids == expected


def chat(template: str | None, messages=()) -> str:
    return Tokenizer(sentencepiece_like(), {"bos_token": "<s>"}, {}, template).apply_chat(list(messages))


def test_templates_run_in_a_sandbox():
    assert chat("{{ bos_token }}{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content | tojson }}{% endfor %}",
                [{"content": "a"}, {"content": "<é>"}]) == '<s>"<é>"'  # fmt: skip
    assert chat("{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True) }}") == '{"a": 1, "b": "\\u00e9"}'
    for template in (
        "{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{{ raise_exception('no') }}", "{% for %}", "{{ 1 // 0 }}",
        "{{ messages[0].content }}",
    ):  # fmt: skip
        with pytest.raises(RequestError, match="chat template"):
            chat(template)
    with pytest.raises(RequestError, match="no chat template"):
        chat(None)


def test_damaged_tokenizer_files_are_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text(sentencepiece_like().to_str())
    for text in ("{", "[]", '{"bos_token": [1]}', '{"eos_token": {"content": 5}}', '{"chat_template": 5}'):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
            Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for eos in ('"x"', "[true]", "-1", '{"a": 1}'):
        (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {eos}}}')
        with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id"):
            Tokenizer.from_dir(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert Tokenizer.from_dir(tmp_path).apply_chat([]) == "yes"


class _Metadata:
    """The part of GgufFile that tokenizer_files reads."""

    path = "m.gguf"

    def __init__(self, **values):
        self._values = {f"tokenizer.ggml.{k}": v for k, v in values.items()}

    def get(self, key, default=None):
        return self._values.get(key, default)

    need = texts = get


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("qwen2", ["x", "1", "2", "3", "4", "!\n\n", "Ġ", "ĠI", "'ll"]),
        ("llama-bpe", ["x", "123", "4", "!\n\n", "Ġ", "ĠI", "'ll"]),
        ("smollm", ["x", "1", "2", "3", "4", "!", "\n\n ", " I", "'ll"]),
        ("gpt-2", ["x", "1234", "!", "\n\n ", " I", "'ll"]),
    ],
)
def test_gguf_pre_tokenizers(pre, pieces):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    file = _Metadata(model="gpt2", pre=pre, tokens=[*alphabet, "<|x|>"], merges=[], token_type=[1] * 256 + [3], eos_token_id=256)
    backend = Backend.from_str(gguf_tokenizer.tokenizer_files(file)["tokenizer.json"])
    got = [p for p, _ in backend.pre_tokenizer.pre_tokenize_str("x1234!\n\n  I'll")]
    assert got == [p.replace("\n", "Ċ").replace(" ", "Ġ") for p in pieces]
    assert backend.encode("<|x|>").ids == [256]


def test_llama3_gguf_files_add_bos_unless_they_say_otherwise():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for pre, says, adds in (("llama-bpe", {}, True), ("llama-bpe", {"add_bos_token": False}, False), ("smollm", {}, False)):
        file = _Metadata(model="gpt2", pre=pre, tokens=[*alphabet, "<|b|>"], merges=[], bos_token_id=256, **says)
        assert gguf_tokenizer.tokenizer_files(file)["tokenizer_config.json"]["add_bos_token"] == adds


def test_unsupported_gguf_tokenizers_are_refused_by_name():
    for values, named in (({"model": "llama"}, "llama"), ({"model": "gpt2", "pre": "tekken", "tokens": ["a"], "merges": []}, "tekken")):
        with pytest.raises(CheckpointError, match=named):
            gguf_tokenizer.tokenizer_files(_Metadata(**values))


def test_vocabularies_compare_by_content(tokenizer):
    assert tokenizer.same_vocabulary(Tokenizer.from_dir(resolve_model("smollm2-135m")))
    assert not tokenizer.same_vocabulary(Tokenizer(sentencepiece_like(), {}, {}, None))


def test_added_tokens_with_spaces_decode_as_they_are():
    backend = Backend(models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\S+"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken("two words é", normalized=False)])
    tokenizer = Tokenizer(backend, {}, {}, None)
    ids = tokenizer.encode("a two words é😀")
    assert 256 in ids
    assert "".join(check_pieces(tokenizer, ids)) == "a two words é😀"
