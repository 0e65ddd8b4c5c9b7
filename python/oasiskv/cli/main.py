"""Dispatch to the commands. Light: torch is imported by the command that needs it, so that errors and Ctrl-C are quick."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from typing import NoReturn

from oasiskv import __version__
from oasiskv.cli.ending import FAILED, INTERRUPTED, USAGE, leave
from oasiskv.errors import EngineError, OasisError, RequestError, ServeError


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line."""

    def error(self, message: str) -> NoReturn:
        print(f"oasiskv: error: {message} (see {self.prog} --help)", file=sys.stderr)
        raise SystemExit(USAGE)


def build_parser() -> Parser:
    from oasiskv.cli import bench, convert, env, generate, serve, top, triton_repo

    parser = Parser(prog="oasiskv", description="Long-context LLM serving out of a small working set of the KV cache.")
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for module in (generate, serve, top, triton_repo, convert, bench, env):
        name = module.__name__.rpartition(".")[2].replace("_", "-")
        summary = (module.__doc__ or "").partition("\n")[0]
        sub = commands.add_parser(name, help=summary, description=summary, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        module.add_arguments(sub)
        sub.set_defaults(run=module.run)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a request or the server failed, 2 usage, configuration or checkpoint, 130 SIGINT."""
    # An import that is interrupted may answer with an ImportError of its own: until a command is ready, leave at once.
    signal.signal(signal.SIGINT, leave)
    try:
        args = build_parser().parse_args(argv)
        sys.stdout.reconfigure(errors="backslashreplace")  # an answer may hold what the terminal's encoding cannot
        code = args.run(args)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print("oasiskv: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OasisError as error:
        print(f"oasiskv: error: {error}", file=sys.stderr)
        return FAILED if isinstance(error, RequestError | EngineError | ServeError) else USAGE
    except OSError as error:
        if not isinstance(error, BrokenPipeError):  # the reader of our output went away: nobody to tell
            print(f"oasiskv: error: {error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is still buffered
        return FAILED
