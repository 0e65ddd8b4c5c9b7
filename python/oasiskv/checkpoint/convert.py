"""Any supported source -> a checkpoint folder."""

from __future__ import annotations

from pathlib import Path

from oasiskv.checkpoint.gguf_import import import_gguf
from oasiskv.checkpoint.hf_import import import_hf
from oasiskv.checkpoint.store import save_checkpoint
from oasiskv.config import DTYPES
from oasiskv.errors import CheckpointError


def convert(source: Path | str, target: Path | str, dtype: str = "float32") -> None:
    """Import a GGUF file or a Hugging Face folder into the new folder `target`. Raises CheckpointError; writes all or nothing."""
    source, target = Path(source), Path(target)
    if dtype not in DTYPES:
        raise CheckpointError(f"dtype = {dtype!r}: use one of {', '.join(DTYPES)}")
    if not source.exists():
        raise CheckpointError(f"{source} does not exist")
    if target.exists():
        raise CheckpointError(f"{target} exists already: choose another name or remove it")
    config, weights, extra = import_hf(source, dtype) if source.is_dir() else import_gguf(source, dtype)
    save_checkpoint(target, config, weights, extra)
