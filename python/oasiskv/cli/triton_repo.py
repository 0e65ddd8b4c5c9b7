"""Write a model repository for a Triton server of your own, next to an executor."""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path

from oasiskv.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="embedded model's name, checkpoint or Hugging Face folder, or GGUF file")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder to make")
    parser.add_argument(
        "values", nargs="*", metavar="key=value", help="of the templates' ${key}s; NVIDIA's keys, and oasis_*: docs/operations.md"
    )


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError, CheckpointError."""
    from oasiskv.checkpoint import resolve_model
    from oasiskv.cli.ending import interruptible
    from oasiskv.executor.transport import check_path, write_key
    from oasiskv.serve import repo

    values = dict(_pair(text) for text in args.values)
    out = args.out.absolute()
    values.setdefault("oasis_executor_socket", f"{out}.sock")
    values.setdefault("oasis_executor_authkey_file", f"{out}.key")
    socket, key = (Path(values[f"oasis_executor_{name}"]) for name in ("socket", "authkey_file"))
    check_path(socket)
    interruptible()
    folder = resolve_model(args.model).resolve()
    repo.fill(out, {"tokenizer_dir": str(folder), **values})
    if not key.exists():
        write_key(key)
    print(f"oasiskv: wrote {out}; start the executor before tritonserver:")
    command = ["python", "-m", "oasiskv.executor", "--socket", socket, "--authkey-file", key, "--config-json", _config(args.model, values)]
    print(f"  {shlex.join(map(str, command))}")
    print(f"  tritonserver --model-repository={shlex.quote(str(out))} --disable-auto-complete-config")
    return 0


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: give key=value")
    return key, value


def _config(model: str, values: dict[str, str]) -> str:
    """The options that the repository expects of its executor."""
    from oasiskv.serve.contract.parameters import EXPECTED

    options: dict[str, str | int] = {"model": model}
    for name in EXPECTED:
        if value := values.get(name):
            options[name.removeprefix("oasis_")] = int(value) if value.isdigit() else value
    return json.dumps(options)
