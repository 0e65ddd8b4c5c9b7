"""A checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

from oasiskv.errors import CheckpointError, RequestError


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _json(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    text = _read(path)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def _special(config: dict[str, Any], name: str) -> str | None:
    """Tokenizer configs hold a special token as text or as an object with its text under `content`."""
    token = config.get(name)
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise CheckpointError(f"tokenizer_config.json: {name} = {token!r}: must be text")
    return text


def _eos_ids(generation: dict[str, Any], vocab_size: int) -> list[int]:
    eos = generation.get("eos_token_id")
    ids = [] if eos is None else eos if isinstance(eos, list) else [eos]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise CheckpointError(f"generation_config.json: eos_token_id = {eos!r}: must be a token id or a list of them")
    return [i for i in ids if i < vocab_size]  # heads are padded, configs name ids of the padding


def _token_bytes(backend: Any) -> dict[int, bytes] | None:
    """Id -> bytes of every token that `decode` shows, as the ByteLevel decoder maps them; None for another decoder."""
    from tokenizers import decoders

    if not isinstance(backend.decoder, decoders.ByteLevel):
        return None
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [b for b in range(256) if b not in visible]
    byte_of = {chr(b): b for b in visible} | {chr(256 + i): b for i, b in enumerate(hidden)}
    special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}

    def to_bytes(token: str) -> bytes:
        if all(c in byte_of for c in token):
            return bytes(byte_of[c] for c in token)
        return token.encode("utf-8")

    return {i: to_bytes(token) for token, i in backend.get_vocab().items() if i not in special}


class Tokenizer:
    """eos_ids: the ids that end a generation. Thread-safe."""

    def __init__(self, backend: Any, config: dict[str, Any], generation: dict[str, Any], template: str | None) -> None:
        self._backend = backend
        self._bos, self._eos = _special(config, "bos_token"), _special(config, "eos_token")
        self._template = template
        ids = _eos_ids(generation, backend.get_vocab_size())
        if not ids and self._eos is not None and (eos := backend.token_to_id(self._eos)) is not None:
            ids = [eos]
        self.eos_ids = frozenset(ids)
        bos = backend.token_to_id(self._bos) if self._bos else None
        # Llama 3 says so only in tokenizer.json's own template.
        adds_bos = config.get("add_bos_token", bos is not None and backend.encode("").ids[:1] == [bos])
        self._prepend = bos if adds_bos else None
        self._bytes = _token_bytes(backend)
        # Of a token, in bytes. A normalizer may shorten what it composes, threefold at most.
        self._longest = max((len(t.encode()) for t in backend.get_vocab()), default=1) * (3 if backend.normalizer else 1)

    @classmethod
    def from_dir(cls, folder: Path | str) -> Tokenizer:
        """Raises CheckpointError naming the file."""
        from tokenizers import Tokenizer as Backend

        folder = Path(folder)
        path = folder / "tokenizer.json"
        if not path.exists():
            raise CheckpointError(f"{path} is missing")
        try:
            backend = Backend.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise CheckpointError(f"{path} cannot be read: {error}") from None
        backend.no_truncation()
        backend.no_padding()
        config = _json(folder / "tokenizer_config.json")
        file = folder / "chat_template.jinja"
        template = _read(file) if file.exists() else config.get("chat_template")
        if isinstance(template, list):  # several named ones
            named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
            template = named.get("default")
        if template is not None and not isinstance(template, str):
            raise CheckpointError(f"{folder / 'tokenizer_config.json'}: chat_template must be text")
        try:
            return cls(backend, config, _json(folder / "generation_config.json"), template)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}: {error}") from None

    @property
    def vocab_size(self) -> int:
        return self._backend.get_vocab_size()

    def definition(self) -> str:
        """It in the form of tokenizer.json."""
        return self._backend.to_str()

    def same_vocabulary(self, other: Tokenizer) -> bool:
        return self._backend.get_vocab() == other._backend.get_vocab()

    def encode(self, text: str, bos: bool = True, max_tokens: int | None = None) -> list[int]:
        """Raw text to ids; a beginning-of-sequence token only where the model's own configuration adds one, and never twice.

        `bos=False` for text that begins no prompt. With `max_tokens`, text that is too long to fit into so many is refused unread, since
        encoding takes about a second a megabyte. Raises RequestError for text that is not Unicode.
        """
        try:
            size = len(text.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise RequestError(f"the prompt is not valid Unicode at character {error.start}: {error.reason}") from None
        if max_tokens is not None and size > max_tokens * self._longest:
            raise RequestError(
                f"the prompt of {size} bytes cannot fit max_seq_len {max_tokens}: a token stands for at most {self._longest} bytes"
            )
        ids = self._backend.encode(text, add_special_tokens=False).ids
        if bos and self._prepend is not None and ids[:1] != [self._prepend]:
            return [self._prepend, *ids]
        return ids

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        """Ids to text; bytes that are no UTF-8 become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes | None:
        """What a byte-level token stands for: b"" if `decode` leaves it out; None if this tokenizer is not byte-level."""
        if self._bytes is None:
            return None
        return self._bytes.get(token_id, b"")

    def apply_chat(self, messages: list[dict[str, str]]) -> str:
        """Messages [{"role", "content"}] to the prompt text that asks for the assistant's turn. Raises RequestError."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        if not self._template:
            raise RequestError("this model has no chat template: send raw text")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])

        def raise_exception(message: str) -> None:
            raise TemplateError(message)

        def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:  # jinja's own escapes for HTML
            return json.dumps(value, ensure_ascii=ensure_ascii, **options)

        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = tojson
        try:
            template = environment.from_string(self._template)
            return template.render(messages=messages, add_generation_prompt=True, bos_token=self._bos or "", eos_token=self._eos or "")
        except Exception as error:  # a template may trip over any message
            raise RequestError(f"the chat template refused the messages: {error}") from None
