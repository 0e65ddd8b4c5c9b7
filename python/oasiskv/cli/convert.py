"""Import a Hugging Face folder or a GGUF file into a checkpoint folder."""

from __future__ import annotations

import argparse
from pathlib import Path

from oasiskv.config import DTYPES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, help="Hugging Face folder or GGUF file")
    parser.add_argument("target", type=Path, help="folder to make")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")


def run(args: argparse.Namespace) -> int:
    """Raises CheckpointError."""
    from oasiskv.checkpoint import convert
    from oasiskv.cli.ending import interruptible

    interruptible()
    convert(args.source, args.target, args.dtype)
    print(f"oasiskv: wrote {args.target}")
    return 0
