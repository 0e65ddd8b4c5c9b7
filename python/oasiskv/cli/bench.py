"""Measure: `oasiskv bench decode --help`, `oasiskv bench sweep --help`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["decode", "sweep"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")


def run(args: argparse.Namespace) -> int:
    from oasiskv.bench import decode, sweep
    from oasiskv.cli.ending import interruptible

    interruptible()
    return {"decode": decode, "sweep": sweep}[args.what].main(args.arguments)
