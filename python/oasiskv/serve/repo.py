"""Fills the templates in triton_model_repo/ into a repository that tritonserver can load."""

from __future__ import annotations

import shutil
import string
from pathlib import Path

from oasiskv.errors import ConfigError

MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble", "tensorrt_llm_bls")
# What a value is when nobody gives one. Every other placeholder becomes empty, which is: not set.
DEFAULTS = {
    "triton_backend": "python",
    "triton_max_batch_size": "64",
    "decoupled_mode": "true",
    "max_queue_delay_microseconds": "0",
    "max_queue_size": "1024",
    "logits_datatype": "TYPE_FP32",
    "encoder_input_features_data_type": "TYPE_FP16",
    "cancellation_check_period_ms": "50",
    "add_special_tokens": "true",
    "skip_special_tokens": "true",
    "accumulate_tokens": "false",
    "tensorrt_llm_model_name": "tensorrt_llm",
    "preprocessing_instance_count": "1",
    "postprocessing_instance_count": "1",
    "bls_instance_count": "1",
}
NEEDED = ("tokenizer_dir", "oasis_executor_socket", "oasis_executor_authkey_file")


def templates() -> Path:
    """The templates' folder: inside the package once installed, beside `python/` in a source tree. Raises ConfigError."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package / "triton_model_repo", package.parent.parent / "triton_model_repo"):
        if all((folder / name / "config.pbtxt").exists() for name in MODELS):
            return folder
    raise ConfigError("triton_model_repo is missing from this installation: reinstall oasiskv")


def placeholders() -> frozenset[str]:
    """The names that a value can be given for. Raises ConfigError."""
    texts = (_template(templates() / name).template for name in MODELS)
    return frozenset(m["braced"] for text in texts for m in string.Template.pattern.finditer(text) if m["braced"])


def fill(target: Path, values: dict[str, str]) -> Path:
    """Write all models into the new folder `target`, `${name}` replaced. Raises ConfigError naming what is unknown or missing."""
    source = templates()
    names = placeholders()
    unknown = sorted(values.keys() - names)
    if unknown:
        raise ConfigError(f"unknown parameters: {', '.join(unknown)}; there are: {', '.join(sorted(names))}")
    missing = [name for name in NEEDED if not values.get(name)]
    if missing:
        raise ConfigError(f"no value for the parameter {', '.join(missing)}")
    if target.exists():
        raise ConfigError(f"{target} exists: give a folder that is not there yet")
    filled = {name: _quoted(name, text) for name, text in (dict.fromkeys(names, "") | DEFAULTS | values).items()}
    for name in MODELS:
        shutil.copytree(source / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        (target / name / "config.pbtxt").write_text(_template(source / name).substitute(filled), encoding="utf-8")
        (target / name / "1").mkdir(exist_ok=True)
    return target


def _template(model: Path) -> string.Template:
    return string.Template((model / "config.pbtxt").read_text(encoding="utf-8"))


def _quoted(name: str, text: str) -> str:
    if any(ord(c) < 32 for c in text):
        raise ConfigError(f"{name} = {text!r}: has control characters")
    return text.replace("\\", "\\\\").replace('"', '\\"')
