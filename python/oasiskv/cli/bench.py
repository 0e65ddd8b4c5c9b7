"""Measure: `oasiskv bench decode --help`, also `host`, `kernels`, `serve`, `soak` and `sweep`."""

from __future__ import annotations

import argparse
import importlib

_BENCHMARKS = ("decode", "host", "kernels", "serve", "soak", "sweep")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=_BENCHMARKS)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")


def run(args: argparse.Namespace) -> int:
    from oasiskv.cli.ending import interruptible

    benchmark = importlib.import_module(f"oasiskv.bench.{args.what}")
    interruptible()
    return benchmark.main(args.arguments)
