"""Measure: `oasiskv bench decode --help`, also `host`, `kernels` and `sweep`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["decode", "host", "kernels", "sweep"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")


def run(args: argparse.Namespace) -> int:
    from oasiskv.bench import decode, host, kernels, sweep
    from oasiskv.cli.ending import interruptible

    interruptible()
    return {"decode": decode, "host": host, "kernels": kernels, "sweep": sweep}[args.what].main(args.arguments)
