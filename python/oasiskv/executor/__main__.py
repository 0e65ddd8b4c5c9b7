"""`python -m oasiskv.executor`: load a model, serve it on a local socket until SIGTERM."""

from __future__ import annotations

import argparse
import json
import logging
import signal
import sys
import threading
from dataclasses import asdict, fields, replace
from pathlib import Path

from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError, OasisError
from oasiskv.executor import parent, transport


def parse_config(text: str) -> EngineConfig:
    """EngineConfig from a JSON object of its fields. Raises ConfigError naming the field."""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--config-json is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError("--config-json: give one JSON object with the fields of EngineConfig")
    unknown = values.keys() - {f.name for f in fields(EngineConfig)}
    if unknown:
        raise ConfigError(f"--config-json: unknown fields {', '.join(sorted(unknown))}")
    return EngineConfig(**values)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m oasiskv.executor", description=__doc__)
    parser.add_argument("--socket", type=Path, required=True, help="path of the local socket to make")
    parser.add_argument("--authkey-file", type=Path, required=True, help="file of mode 600 with the key that clients must know")
    parser.add_argument("--config-json", default="{}", help="fields of EngineConfig")
    parser.add_argument("--drain-s", type=float, default=5.0, help="seconds that requests in flight get after SIGTERM")
    parser.add_argument("--parent-pid", type=int, help="die when this process, the parent, ends")
    args = parser.parse_args(argv)
    if args.parent_pid is not None:
        parent.die_with(args.parent_pid)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        return _serve(args, stop)
    except OasisError as error:
        print(f"oasiskv: error: {error}", file=sys.stderr)
        return 2


def _serve(args: argparse.Namespace, stop: threading.Event) -> int:
    config = parse_config(args.config_json)
    key = transport.read_key(args.authkey_file)
    transport.check_path(args.socket)
    # torch comes in here, after the cheap checks.
    from oasiskv.checkpoint import resolve_model
    from oasiskv.engine.loop import EngineLoop
    from oasiskv.executor.server import ExecutorServer

    folder = resolve_model(config.model, config.dtype)
    loop = EngineLoop(replace(config, model=str(folder)))
    identity = {"model": config.model, "model_dir": str(folder.resolve()), "max_seq_len": loop.max_seq_len, "options": asdict(config)}
    server = ExecutorServer(loop, args.socket, key, identity)
    while not stop.wait(0.5) and loop.broken is None:
        pass
    broken = None if stop.is_set() else loop.broken
    server.close(args.drain_s)
    if broken:
        print(f"oasiskv: error: {broken}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
