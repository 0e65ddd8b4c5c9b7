"""What `oasiskv serve` is told."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError

_MAX_S = 86400


@dataclass(frozen=True)
class ServeOptions:
    """Times in seconds. start_s bounds loading the model and, separately, starting Triton. Raises ConfigError."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    grpc_port: int = 8001
    http_port: int = 8000
    metrics_port: int = 8002
    start_s: float = 600.0
    probe_every_s: float = 10.0
    probe_deadline_s: float = 10.0
    drain_s: float = 5.0
    verbose: bool = False
    decoupled: bool = True  # Triton's models may answer a request with several responses

    def __post_init__(self) -> None:
        if ":" in self.host or not self.host:
            raise ConfigError(f"--host {self.host!r}: give an IPv4 address or a name")
        ports = {"--grpc-port": self.grpc_port, "--http-port": self.http_port, "--metrics-port": self.metrics_port}
        for flag, port in ports.items():
            if not 1 <= port <= 65535:
                raise ConfigError(f"{flag} {port}: must be in 1..65535")
        times = {"--start-deadline": self.start_s, "--probe-every": self.probe_every_s, "--drain": self.drain_s}
        times["probe_deadline_s"] = self.probe_deadline_s
        for flag, seconds in times.items():
            least = 0 if flag == "--drain" else 0.1
            if not least <= seconds <= _MAX_S:  # false for NaN
                raise ConfigError(f"{flag} {seconds:g}: must be in {least:g}..{_MAX_S} seconds")
        if len(set(ports.values())) < len(ports):
            raise ConfigError("--grpc-port, --http-port and --metrics-port must differ")

    def check_ports(self) -> None:
        """Raise ConfigError naming a port that is taken: Triton would share it silently with whoever has it."""
        for flag, port in (("--grpc-port", self.grpc_port), ("--http-port", self.http_port), ("--metrics-port", self.metrics_port)):
            with socket.socket() as probe:
                # As Triton does, ignore connections of an earlier server that are closing; a listener is still an error.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((self.host, port))
                except OSError as error:
                    raise ConfigError(f"{flag} {port} on {self.host}: {error.strerror}; stop what uses it or give another port") from None

    @property
    def grpc_url(self) -> str:
        return f"{self.host}:{self.grpc_port}"
