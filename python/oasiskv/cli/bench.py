"""Measure: `oasiskv bench decode --help`."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("what", choices=["decode"])
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="passed on")


def run(args: argparse.Namespace) -> int:
    from oasiskv.bench.decode import main
    from oasiskv.cli.main import interruptible

    interruptible()
    return main(args.arguments)
