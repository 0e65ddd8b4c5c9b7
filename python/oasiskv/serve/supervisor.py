"""`oasiskv serve`: executor and tritonserver as one service. What dies is restarted; what stops leaves nothing behind."""

from __future__ import annotations

import json
import logging
import shutil
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict
from pathlib import Path

from oasiskv.checkpoint import resolve_model
from oasiskv.config import EngineConfig
from oasiskv.errors import EngineError
from oasiskv.executor.protocol import create_key
from oasiskv.serve import probe, processes, triton

_log = logging.getLogger("oasiskv.serve")
_START_DEADLINE_S = 180.0
_PROBE_EVERY_S = 5.0
_PROBE_DEADLINE_S = 20.0


class Server:
    """One runtime folder, one executor, one tritonserver. `close` is idempotent and removes all of it."""

    def __init__(self, config: EngineConfig, ports: triton.Ports) -> None:
        for field in ("grpc", "http", "metrics"):
            processes.check_port(f"{field}_port", getattr(ports, field))
        self._server = triton.find_server()
        self._config = config
        self._ports = ports
        tokenizer_dir = resolve_model(config.model, config.dtype)
        self._runtime = Path(tempfile.mkdtemp(prefix="oasiskv-"))  # mode 0700
        self._shm_prefix = f"{self._runtime.name}-"
        self._executor = self._triton = None
        self._wake = threading.Event()
        self._socket, self._key = self._runtime / "executor.sock", self._runtime / "executor.key"
        create_key(self._key)
        (self._runtime / "cwd").mkdir()
        triton.make_backend_dir(self._server, self._runtime / "backends")
        values = {
            "tokenizer_dir": str(tokenizer_dir.resolve()),
            "oasis_executor_socket": str(self._socket),
            "oasis_executor_key_file": str(self._key),
        }
        triton.fill_repository(triton.repository_source(), self._runtime / "repository", values)

    def start(self) -> None:
        """Start both and wait for the first real answer. Raises EngineError with the end of the logs."""
        self._start_executor()
        self._start_triton()
        end = time.monotonic() + _START_DEADLINE_S
        last = "nothing answered"
        while time.monotonic() < end:
            self._require_alive()
            try:
                probe.ask(self._ports.grpc, "Hello", 1, _PROBE_DEADLINE_S)
            except Exception as error:  # whatever tritonclient raises while the server comes up
                last = str(error)
                if self._wake.wait(0.1):
                    raise KeyboardInterrupt from None
            else:
                return
        raise EngineError(f"no answer within {_START_DEADLINE_S:.0f} s ({last})\n{self._logs()}")

    def supervise(self) -> None:
        """Until `stop`: restart what died; a probe that fails twice restarts Triton (a dead stub never comes back by itself)."""
        failures = 0
        while not self._wake.wait(_PROBE_EVERY_S):
            if self._executor.poll() is not None:
                _log.error("the executor died (exit %s); restarting it\n%s", self._executor.returncode, self._log_of("executor"))
                self._start_executor()
                continue
            if self._triton.poll() is not None:
                _log.error("tritonserver died (exit %s); restarting it\n%s", self._triton.returncode, self._log_of("triton"))
                self._restart_triton()
                continue
            try:
                probe.ask(self._ports.grpc, "Hello", 1, _PROBE_DEADLINE_S)
                failures = 0
            except Exception as error:
                failures += 1
                _log.error("a probe failed (%d in a row): %s", failures, error)
                if failures >= 2:
                    self._restart_triton()
                    failures = 0

    def stop(self) -> None:
        """Ask `start` or `supervise` to return; safe in a signal handler."""
        self._wake.set()

    def close(self) -> None:
        processes.stop(self._triton, grace_s=12)
        processes.stop(self._executor, grace_s=10)
        self._triton = self._executor = None
        self._clean_shm()
        shutil.rmtree(self._runtime, ignore_errors=True)

    def _start_executor(self) -> None:
        config = json.dumps(asdict(self._config))
        command = [sys.executable, "-m", "oasiskv.executor.server", "--socket", str(self._socket), "--key-file", str(self._key)]
        self._socket.unlink(missing_ok=True)
        self._executor = processes.spawn([*command, "--config-json", config], self._runtime / "executor.log", self._runtime / "cwd")
        end = time.monotonic() + _START_DEADLINE_S
        while not self._socket.exists():
            if self._executor.poll() is not None:
                raise EngineError(f"the executor did not start\n{self._log_of('executor')}")
            if time.monotonic() > end:
                raise EngineError(f"the executor was not ready within {_START_DEADLINE_S:.0f} s\n{self._log_of('executor')}")
            if self._wake.wait(0.05):
                raise KeyboardInterrupt

    def _start_triton(self) -> None:
        command = triton.command(self._server, self._runtime, self._ports, self._shm_prefix)
        self._triton = processes.spawn(command, self._runtime / "triton.log", self._runtime / "cwd", triton.environment())

    def _restart_triton(self) -> None:
        processes.stop(self._triton, grace_s=2)
        self._clean_shm()
        self._start_triton()

    def _require_alive(self) -> None:
        for name, process in (("executor", self._executor), ("triton", self._triton)):
            if process.poll() is not None:
                raise EngineError(f"{name} ended with exit {process.returncode}\n{self._log_of(name)}")

    def _clean_shm(self) -> None:
        for region in Path("/dev/shm").glob(f"{self._shm_prefix}*"):
            region.unlink(missing_ok=True)

    def _log_of(self, name: str) -> str:
        return f"--- end of {name}.log ---\n{processes.tail(self._runtime / f'{name}.log')}"

    def _logs(self) -> str:
        return f"{self._log_of('executor')}\n{self._log_of('triton')}"


def run(config: EngineConfig, ports: triton.Ports) -> int:
    """Serve until SIGINT (exit code 130) or SIGTERM (0)."""
    received: list[int] = []
    server: Server | None = None

    def on_signal(number: int, _frame: object) -> None:
        received.append(number)
        if server is None:
            raise KeyboardInterrupt
        server.stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    begin = time.monotonic()
    try:
        server = Server(config, ports)
        server.start()
        print(f"ready in {time.monotonic() - begin:.1f} s: model {config.model}, gRPC 127.0.0.1:{ports.grpc}, "
              f"HTTP 127.0.0.1:{ports.http}, metrics 127.0.0.1:{ports.metrics}", flush=True)
        server.supervise()
    except KeyboardInterrupt:
        pass
    finally:
        if server is not None:
            server.close()
    return 130 if signal.SIGINT in received else 0
