"""Report what this installation runs on."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from typing import Any

from oasiskv import __version__
from oasiskv.cli import cuda_report
from oasiskv.errors import OasisError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true")


def run(args: argparse.Namespace) -> int:
    """0, also when something is missing: the report says so."""
    report = collect()
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        width = max(map(len, report))
        print("\n".join(f"{name:{width}}  {value}" for name, value in report.items()))
    return 0


def collect() -> dict[str, Any]:
    return {
        "oasiskv": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": _version("torch"),
        "numpy": _version("numpy"),
        "tokenizers": _version("tokenizers"),
        "core_isa": _isa(),
        **cuda_report.collect(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "memory_left": _memory_left(),
        "triton": _triton(),
        "embedded_model": _embedded_model(),
    }


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _isa() -> str:
    try:
        import torch  # noqa: F401  the core is linked against the same OpenMP

        from oasiskv import _core

        return _core.isa()
    except (ImportError, RuntimeError) as error:
        return f"missing: {error}"


def _memory_left() -> str:
    """What pools in host memory may take; see --host-memory-gib where memory grows with use."""
    try:
        from oasiskv.engine.machine import memory_left
    except ImportError as error:
        return f"missing: {error}"
    left = memory_left()
    return f"{left.bytes / 2**30:.1f} GiB ({left.why})"


def _triton() -> str:
    from oasiskv.serve.triton import locate

    try:
        found = locate()
    except (OasisError, importlib.metadata.PackageNotFoundError) as error:
        return f"missing: {error}"
    return f"{found.server} (nvidia-pytriton {found.version})"


def _embedded_model() -> str:
    from oasiskv.checkpoint.resolve import embedded_gguf

    try:
        return str(embedded_gguf())
    except OasisError as error:
        return f"missing: {error}"
