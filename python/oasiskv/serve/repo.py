"""Fills the templates in triton_model_repo/ into a repository that tritonserver can load."""

from __future__ import annotations

import shutil
import string
from pathlib import Path

from oasiskv.errors import ConfigError

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")


def templates() -> Path:
    """The templates' folder: inside the package once installed, beside `python/` in a source tree. Raises ConfigError."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "triton_model_repo", package.parent.parent / "triton_model_repo"):
        if all((folder / name / "config.pbtxt").exists() for name in MODELS):
            return folder
    raise ConfigError("triton_model_repo is missing from this installation: reinstall oasiskv")


def fill(target: Path, values: dict[str, str]) -> Path:
    """Write all models into the new folder `target`, `${name}` replaced. Raises ConfigError for a name without a value."""
    source = templates()
    quoted = {k: v.replace("\\", "\\\\").replace('"', '\\"') for k, v in values.items()}
    for name in MODELS:
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        config = target / name / "config.pbtxt"
        try:
            config.write_text(string.Template(config.read_text(encoding="utf-8")).substitute(quoted), encoding="utf-8")
        except KeyError as missing:
            raise ConfigError(f"{name}/config.pbtxt: no value for the parameter {missing}") from None
        (target / name / "1").mkdir(exist_ok=True)
    return target
