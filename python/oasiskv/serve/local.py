"""`oasiskv serve` as a child of this program, on ports of its own: for the demo, benchmarks and tests."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from typing import Any

from oasiskv.errors import ServeError


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at this moment."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]


class LocalService:
    """A context manager; `flags` are those of `oasiskv serve` but for the ports. `ready` is the line that it told then.

    Raises ServeError when it does not start; why, it has told on standard error itself.
    """

    def __init__(self, *flags: str) -> None:
        self.grpc_port, self.http_port, self.metrics_port = free_ports(3)
        ports = {"--grpc-port": self.grpc_port, "--http-port": self.http_port, "--metrics-port": self.metrics_port}
        command = [sys.executable, "-m", "oasiskv.cli", "serve", *(str(x) for pair in ports.items() for x in pair), *flags]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            line = next((line for line in self._process.stdout if "ready:" in line), None)
        except BaseException:  # Ctrl-C while the model loads
            self.close()
            raise
        if line is None:
            raise ServeError(f"the server did not start (exit {self._process.wait()}); its reason is above")
        self.ready = line.strip()

    @property
    def grpc_url(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def close(self) -> None:
        """Stop it and wait for its end."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)

    def __enter__(self) -> LocalService:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
