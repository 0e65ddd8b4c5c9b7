"""Measure: `oasiskv bench decode --help`, also `host`, `kernels`, `soak` and `sweep`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["decode", "host", "kernels", "soak", "sweep"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")


def run(args: argparse.Namespace) -> int:
    from oasiskv.bench import decode, host, kernels, soak, sweep
    from oasiskv.cli.ending import interruptible

    interruptible()
    return {"decode": decode, "host": host, "kernels": kernels, "soak": soak, "sweep": sweep}[args.what].main(args.arguments)
