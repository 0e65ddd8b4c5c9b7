"""`python -m oasiskv.serve.openai`: serve OpenAI's API over the executor at a local socket until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

import uvicorn

from oasiskv.errors import OasisError
from oasiskv.executor.parent import die_with
from oasiskv.serve.openai.app import Front, make_app
from oasiskv.serve.openai.link import ExecutorLink
from oasiskv.tokenizer import Tokenizer

_EXIT_S = 3  # for answers under way; their requests have ended, since the executor stops first
_KEEP_ALIVE_S = 75  # longer than clients keep an idle connection, else one reuses what is being closed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m oasiskv.serve.openai", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="the executor's local socket")
    parser.add_argument("--authkey-file", type=Path, required=True, help="file of mode 600 with the executor's key")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model-name", required=True, help="the name that clients ask for")
    parser.add_argument("--parent-pid", type=int, required=True, help="die when this process, the parent, ends")
    parser.add_argument("--access-log", action="store_true")
    args = parser.parse_args()
    die_with(args.parent_pid)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        link = ExecutorLink(args.socket, args.authkey_file)
        front = Front(link, Tokenizer.from_dir(link.identity["model_dir"]), args.model_name)
    except OasisError as error:
        print(f"oasiskv: error: {error}", file=sys.stderr)
        return 2
    uvicorn.run(
        make_app(front), host=args.host, port=args.port, log_level="info" if args.access_log else "warning",
        access_log=args.access_log, ws="none", timeout_graceful_shutdown=_EXIT_S, timeout_keep_alive=_KEEP_ALIVE_S,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
