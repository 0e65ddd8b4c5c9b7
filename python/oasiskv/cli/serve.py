"""Serve a model through Triton (gRPC, HTTP) until SIGINT or SIGTERM."""

from __future__ import annotations

import argparse

from oasiskv.cli.engine_options import add_engine_arguments, engine_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on; there is no authentication")
    group.add_argument("--grpc-port", type=int, default=8001)
    group.add_argument("--http-port", type=int, default=8000)
    group.add_argument("--metrics-port", type=int, default=8002)
    group.add_argument("--start-deadline", type=float, default=600.0, metavar="S", help="seconds that loading, and then starting, may take")
    group.add_argument("--probe-every", type=float, default=10.0, metavar="S", help="seconds between real requests that check the server")
    group.add_argument("--drain", type=float, default=5.0, metavar="S", help="seconds that running requests get when stopping")
    group.add_argument(
        "--decoupled", action=argparse.BooleanOptionalAction, default=True, help="models that stream; without: one response a request"
    )
    group.add_argument("--verbose", action="store_true", help="pass the children's logs on to standard error")
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """130 after SIGINT, 0 after SIGTERM. Raises ConfigError, ServeError."""
    config = engine_config(args)
    from oasiskv.serve.options import ServeOptions
    from oasiskv.serve.triton import locate

    options = ServeOptions(
        config, args.host, args.grpc_port, args.http_port, args.metrics_port,
        start_s=args.start_deadline, probe_every_s=args.probe_every, drain_s=args.drain, verbose=args.verbose,
        decoupled=args.decoupled,
    )  # fmt: skip
    locate()  # says what is missing before its import would fail
    from oasiskv.serve.supervisor import run as supervise

    return supervise(options)
