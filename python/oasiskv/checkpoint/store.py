"""Reading and writing checkpoint folders. A folder is written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from oasiskv.checkpoint.model_config import ModelConfig
from oasiskv.errors import CheckpointError

CONFIG, WEIGHTS = "config.json", "rank0.safetensors"


def read_text(path: Path) -> str:
    """Raises CheckpointError naming the file."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_json(path: Path) -> dict[str, Any]:
    """Raises CheckpointError naming the file."""
    text = read_text(path)
    try:
        raw = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not {type(raw).__name__}")
    return raw


def _refuse_constant(constant: str) -> float:
    raise ValueError(f"{constant} is not a number that JSON allows")


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file. Raises CheckpointError for a missing, truncated or corrupt one."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path} is corrupt or truncated: {error}") from None


def load_checkpoint(folder: Path | str) -> tuple[ModelConfig, dict[str, torch.Tensor]]:
    """Config and weights (in the stored dtype) of a checkpoint folder. Raises CheckpointError naming file, field or tensor."""
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder")
    config = ModelConfig.from_json(read_json(folder / CONFIG), str(folder / CONFIG))
    weights = load_tensors(folder / WEIGHTS)
    check_tensors(config, weights, str(folder / WEIGHTS))
    return config, weights


def check_tensors(config: ModelConfig, weights: dict[str, torch.Tensor], where: str) -> None:
    """Raises CheckpointError for a tensor that is missing, unknown, misshapen or not floating point."""
    shapes = config.shapes()
    for name, shape in shapes.items():
        if name not in weights:
            raise CheckpointError(f"{where}: tensor {name} is missing")
        if tuple(weights[name].shape) != shape:
            raise CheckpointError(f"{where}: tensor {name} has shape {list(weights[name].shape)}, the config asks for {list(shape)}")
        if not weights[name].is_floating_point():
            raise CheckpointError(f"{where}: tensor {name} is {weights[name].dtype}: quantised weights are not supported")
    unknown = sorted(set(weights) - set(shapes))
    if unknown:
        raise CheckpointError(f"{where}: tensor {unknown[0]} is not part of a {config.architecture} as configured")


@contextlib.contextmanager
def atomic_folder(target: Path) -> Iterator[Path]:
    """A scratch folder beside `target` that takes its name once the body succeeds; removed when it fails."""
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        for path in [*scratch.iterdir(), scratch]:
            _sync(path)
        scratch.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _stored(name: str, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    weight = weight.to(dtype).contiguous()
    if not torch.isfinite(weight).all():
        raise CheckpointError(f"tensor {name} is not finite as {dtype}: the source is damaged, or needs another dtype")
    return weight


def save_checkpoint(folder: Path, config: ModelConfig, weights: dict[str, torch.Tensor], extra: dict[str, Any]) -> None:
    """Write a new folder. `extra`: file name -> JSON value or text, for the tokenizer. Raises CheckpointError if it exists."""
    if folder.exists():
        raise CheckpointError(f"{folder} exists already: choose another name or remove it")
    check_tensors(config, weights, "the converted model")
    dtype = getattr(torch, config.dtype)
    with atomic_folder(folder) as scratch:
        save_file({n: _stored(n, w, dtype) for n, w in weights.items()}, scratch / WEIGHTS, metadata={"format": "pt"})
        for name, value in {CONFIG: config.to_json(), **extra}.items():
            text = value if isinstance(value, str) else json.dumps(value, indent=2, ensure_ascii=False)
            (scratch / name).write_text(text, encoding="utf-8")
