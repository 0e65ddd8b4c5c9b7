"""A fast tokenizer out of a GGUF file's metadata: byte-level BPE with the pre-tokenizer that the file names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oasiskv.errors import CheckpointError

if TYPE_CHECKING:
    from oasiskv.checkpoint.gguf_file import GgufFile

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # tokenizer.ggml.token_type

# The published split patterns of these tokenizers.
_QWEN2_SPLIT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_SPLIT = _QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _pre_tokenizer(name: str, where: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    splits = {"qwen2": _QWEN2_SPLIT, "llama-bpe": _LLAMA3_SPLIT}
    if name not in splits:
        raise CheckpointError(
            f"{where}: tokenizer.ggml.pre = {name!r} is not supported: use smollm, gpt-2, qwen2 or llama-bpe, "
            "or convert from the Hugging Face folder"
        )
    split = pre_tokenizers.Split(Regex(splits[name]), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def tokenizer_files(file: GgufFile) -> dict[str, Any]:
    """tokenizer.json, tokenizer_config.json and generation_config.json. Raises CheckpointError."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    where = str(file.path)
    kind = file.need("tokenizer.ggml.model")
    if kind != "gpt2":
        raise CheckpointError(f"{where}: tokenizer.ggml.model = {kind!r} is not supported: only byte-level BPE (gpt2)")
    pre = file.get("tokenizer.ggml.pre", "gpt-2")
    tokens = file.texts("tokenizer.ggml.tokens")
    merges = [tuple(m.split(" ", 1)) for m in file.texts("tokenizer.ggml.merges")]
    vocab = {t: i for i, t in enumerate(tokens)}
    # The library panics on a merge whose result is no token.
    if bad := next((m for m in merges if len(m) != 2 or not {*m, "".join(m)} <= vocab.keys()), None):
        raise CheckpointError(f"{where}: tokenizer.ggml.merges holds {' '.join(bad)!r}, which does not make a token")
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    tokenizer = Tokenizer(bpe)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, where)
    tokenizer.decoder = decoders.ByteLevel()
    types = file.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(f"{where}: tokenizer.ggml.token_type must hold one type for each of the {len(tokens)} tokens")
    for token, type_ in zip(tokens, types, strict=True):
        if type_ == _CONTROL:
            tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type_ in (_UNKNOWN, _USER_DEFINED):
            tokenizer.add_tokens([AddedToken(token, special=False, normalized=False)])
    bos, eos, eot = (_token_id(file, f"tokenizer.ggml.{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot"))
    stops = [i for i in (eos, eot) if i is not None]
    return {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": {
            "add_bos_token": bool(file.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")),
            "bos_token": None if bos is None else tokens[bos],
            "eos_token": None if eos is None else tokens[eos],
            "chat_template": file.get("tokenizer.chat_template"),
        },
        "generation_config.json": {"bos_token_id": bos, "eos_token_id": sorted(set(stops))},
    }


def _token_id(file: GgufFile, key: str, vocab_size: int) -> int | None:
    value = file.get(key)
    if value is not None and not (isinstance(value, int) and 0 <= value < vocab_size):
        raise CheckpointError(f"{file.path}: metadata {key} = {value!r}: must be a token id below {vocab_size}")
    return value
