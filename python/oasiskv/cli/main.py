"""Entry point. Imports little, so that an early SIGINT ends quietly too.

Exit codes: 0 done, 1 a request failed, 2 bad options, model or prompt (one line on standard error), 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import Any, NoReturn


def _interrupted(_number: int, _frame: Any) -> NoReturn:
    """The default command holds nothing that outlives its process: leave at once, wherever Python is."""
    os._exit(130)


def main(argv: list[str] | None = None) -> int:
    signal.signal(signal.SIGINT, _interrupted)
    from oasiskv.cli import generate, other
    from oasiskv.errors import OasisError

    parser = argparse.ArgumentParser(prog="oasiskv", description="Long-context LLM serving out of a small working set.")
    commands = parser.add_subparsers(dest="command", required=True)
    generate.add_parser(commands)
    other.add_parsers(commands)
    bench = commands.add_parser("bench", help="benchmarks", add_help=False)
    bench.add_argument("which", choices=["decode"])
    bench.set_defaults(run=None)
    args, rest = parser.parse_known_args(argv)
    if rest and args.run is not None:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        if args.run is None:
            from oasiskv.bench import decode

            return decode.main(rest)
        return args.run(args)
    except OasisError as error:
        print(f"oasiskv: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
