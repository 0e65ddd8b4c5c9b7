"""`oasiskv convert`, `serve` and `env`."""

from __future__ import annotations

import argparse
import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from oasiskv.cli.options import add_engine_options, engine_config


def add_parsers(commands: Any) -> None:
    p = commands.add_parser("convert", help="import a GGUF file or a Hugging Face folder into a checkpoint folder")
    p.add_argument("source", type=Path)
    p.add_argument("target", type=Path)
    p.add_argument("--dtype", default="float32")
    p.set_defaults(run=convert)

    p = commands.add_parser("serve", help="serve through Triton on loopback until SIGINT or SIGTERM")
    add_engine_options(p)
    p.add_argument("--grpc-port", type=int, default=8001)
    p.add_argument("--http-port", type=int, default=8000)
    p.add_argument("--metrics-port", type=int, default=8002)
    p.set_defaults(run=serve)

    p = commands.add_parser("env", help="what a bug report needs to say about this machine")
    p.add_argument("--json", action="store_true")
    p.set_defaults(run=env)


def convert(args: argparse.Namespace) -> int:
    from oasiskv.checkpoint import convert

    convert(args.source, args.target, args.dtype)
    print(f"wrote {args.target}")
    return 0


def serve(args: argparse.Namespace) -> int:
    from oasiskv.serve import supervisor, triton

    return supervisor.run(engine_config(args), triton.Ports(args.grpc_port, args.http_port, args.metrics_port))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """Versions, processor and memory; None for what is missing."""
    from oasiskv import __version__, _core
    from oasiskv.checkpoint.resolve import embedded_gguf
    from oasiskv.errors import OasisError

    try:
        embedded: str | None = str(embedded_gguf())
    except OasisError:
        embedded = None
    packages = ("torch", "numpy", "tokenizers", "safetensors", "gguf", "nvidia-pytriton", "tritonclient", "transformers")
    return {
        "oasiskv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kernels": _core.isa(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "embedded_model": embedded,
        "packages": {p: _version(p) for p in packages},
    }


def env(args: argparse.Namespace) -> int:
    found = environment()
    if args.json:
        print(json.dumps(found))
        return 0
    for key, value in (found | found.pop("packages")).items():
        print(f"{key:16} {value}")
    return 0
