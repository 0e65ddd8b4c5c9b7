"""Starts executor and tritonserver, proves by a real request that they answer, watches and restarts them, and cleans up."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from dataclasses import asdict
from typing import Any

from oasiskv.errors import ConfigError, EngineError, OasisError, ServeError
from oasiskv.executor.client import ExecutorClient
from oasiskv.executor.protocol import Output
from oasiskv.executor.transport import write_key
from oasiskv.serve import grpc_client, repo, triton
from oasiskv.serve.child import Child
from oasiskv.serve.options import ServeOptions
from oasiskv.serve.runtime import Runtime

_POLL_S = 0.25
_TRITON_EXIT_S = 8
_EXECUTOR_EXIT_S = 12.0  # beyond its drain: to hang up on clients that do not read, and to free the model
_LAST_ANSWERS_S = 0.3  # that the executor's last answers take through Triton
_BUSY_S = 120.0  # an engine with requests in flight that yields nothing for so long hangs
_MAX_RECOVERIES, _WINDOW_S = 5, 600.0


class _StopRequested(Exception):
    """A signal came while something was being waited for."""


def run(options: ServeOptions) -> int:
    """Serve until SIGINT (130) or SIGTERM (0). Raises ConfigError or ServeError; nothing is left behind either way."""
    options.check_ports()
    installation = triton.locate()
    stop = threading.Event()
    received: list[int] = []

    def on_signal(number: int, _frame: Any) -> None:
        received.append(number)
        stop.set()

    previous = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        with Runtime() as runtime:
            supervisor = Supervisor(options, installation, runtime, stop)
            try:
                supervisor.start()
                supervisor.watch()
            except _StopRequested:
                pass
            finally:
                supervisor.stop()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return 130 if signal.SIGINT in received else 0


class Supervisor:
    """All methods run on the main thread: the kernel ties a child's life to the thread that started it."""

    def __init__(self, options: ServeOptions, installation: triton.TritonInstallation, runtime: Runtime, stop: threading.Event) -> None:
        self._options = options
        self._triton = installation
        self._runtime = runtime
        self._stop = stop
        self._executor: Child | None = None
        self._server: Child | None = None
        self._stubs: set[int] = set()
        self._recoveries: deque[float] = deque(maxlen=_MAX_RECOVERIES)
        write_key(runtime.authkey_file)

    def start(self) -> None:
        begin = time.monotonic()
        o = self._options
        _log(f"loading {o.engine.model}")
        identity = self._start_executor(o.start_s)
        self._make_repository(identity)
        self._start_triton(o.start_s)
        _log(
            f"ready: gRPC {o.host}:{o.grpc_port}, HTTP {o.host}:{o.http_port}, metrics {o.host}:{o.metrics_port}, "
            f"model {o.engine.model}, after {time.monotonic() - begin:.1f} s",
            file=sys.stdout,
        )

    def watch(self) -> None:
        """Until a signal: look at the processes all the time, and send a real request now and then."""
        next_probe = time.monotonic() + self._options.probe_every_s
        while not self._stop.wait(_POLL_S):
            fault = self._dead_process()
            if fault is None and time.monotonic() >= next_probe:
                fault = self._failed_probe()
                next_probe = time.monotonic() + self._options.probe_every_s
            if fault is not None:
                self._recover(fault)
                next_probe = time.monotonic() + self._options.probe_every_s

    def stop(self) -> None:
        """The executor first: it refuses new requests and drains. A Triton that stops takes no further step of an ensemble, not even for
        the responses of running requests.
        """
        if self._executor:
            self._executor.stop(self._options.drain_s + _EXECUTOR_EXIT_S)
        if self._server:
            time.sleep(_LAST_ANSWERS_S)
            self._server.stop(_TRITON_EXIT_S + 4.0)

    # ------------------------------------------------------------ starting

    def _start_executor(self, deadline_s: float) -> dict[str, Any]:
        """Start it and wait until it answers; its ping."""
        command = [
            sys.executable, "-m", "oasiskv.executor", "--socket", str(self._runtime.socket), "--authkey-file",
            str(self._runtime.authkey_file), "--config-json", json.dumps(asdict(self._options.engine)),
            "--drain-s", str(self._options.drain_s), "--parent-pid", str(os.getpid()),
        ]  # fmt: skip
        self._executor = child = Child("executor", command, self._runtime.cwd, dict(os.environ), self._options.verbose)
        end = time.monotonic() + deadline_s
        while True:
            if child.exit_code() is not None:
                if child.exit_code() == 2 and (why := child.last_error()):
                    raise ConfigError(why)
                raise ServeError(f"the executor ended with code {child.exit_code()} while loading\n{child.tail()}")
            if self._runtime.socket.exists():
                try:
                    return self._ping()
                except EngineError:
                    pass  # the file of one that was killed: the new one replaces it
            if time.monotonic() > end:
                raise ServeError(f"the executor was not ready within {deadline_s:g} s\n{child.tail()}")
            self._wait()

    def _make_repository(self, identity: dict[str, Any]) -> None:
        engine = self._options.engine
        values = {
            "decoupled_mode": str(self._options.decoupled).lower(),
            "exclude_input_in_output": "true",
            "tokenizer_dir": identity["model_dir"],
            "oasis_max_seq_len": str(identity["max_seq_len"]),
            "oasis_executor_socket": str(self._runtime.socket),
            "oasis_executor_authkey_file": str(self._runtime.authkey_file),
            "oasis_top_k_blocks": str(engine.top_k_blocks),
            "oasis_fetch_ratio": str(engine.fetch_ratio),
            "oasis_drafter": engine.drafter,
            "oasis_draft_len": str(engine.draft_len),
        }
        repo.fill(self._runtime.folder / "models", values)
        self._triton.make_backend_dir(self._runtime.folder / "backends")

    def _start_triton(self, deadline_s: float) -> None:
        """Start it and wait until it answered a real request."""
        assert self._executor
        self._wait_for_ports()
        o, folder = self._options, self._runtime.folder
        ports = o.http_port, o.grpc_port, o.metrics_port
        server = self._triton.command(folder / "models", folder / "backends", o.host, ports, self._runtime.shm_prefix, _TRITON_EXIT_S)
        command = [sys.executable, "-m", "oasiskv.serve.launch", str(os.getpid()), *server]
        self._server = child = Child("triton", command, self._runtime.cwd, self._triton.environment(), o.verbose)
        end = time.monotonic() + deadline_s
        why = ""
        while True:
            if child.exit_code() is not None:
                raise ServeError(f"tritonserver ended with code {child.exit_code()} while starting\n{child.tail()}")
            if self._executor.exit_code() is not None:
                raise ServeError(f"the executor ended with code {self._executor.exit_code()} meanwhile\n{self._executor.tail()}")
            try:
                self._probe(min(o.probe_deadline_s, max(1.0, end - time.monotonic())))
            except grpc_client.RemoteError as error:
                why = str(error)
            else:
                self._stubs = child.members()
                return
            if time.monotonic() > end:
                raise ServeError(f"the ensemble answered no request within {deadline_s:g} s ({why})\n{child.tail()}")
            self._wait()

    def _wait_for_ports(self) -> None:
        end = time.monotonic() + 10.0
        while True:
            try:
                return self._options.check_ports()
            except ConfigError as error:
                if time.monotonic() > end:
                    raise ServeError(str(error)) from None
                self._wait()

    def _wait(self) -> None:
        if self._stop.wait(_POLL_S):
            raise _StopRequested

    # ------------------------------------------------------------ watching

    def _probe(self, deadline_s: float) -> None:
        """A real request through all models. Raises RemoteError."""
        for _ in grpc_client.generate(self._options.grpc_url, "a", max_tokens=1, deadline_s=deadline_s, give_up=self._gone):
            pass

    def _gone(self) -> bool:
        """Whether waiting for an answer has become useless."""
        dead = [c for c in (self._server, self._executor) if c and c.exit_code() is not None]
        return self._stop.is_set() or bool(dead)

    def _ping(self) -> dict[str, Any]:
        with ExecutorClient(self._runtime.socket, self._runtime.authkey_file, deadline_s=0.2) as client:
            return client.ping()

    def _dead_process(self) -> str | None:
        assert self._executor and self._server
        for child in (self._executor, self._server):
            if child.exit_code() is not None:
                return f"{child.name} ended with code {child.exit_code()}\n{child.tail()}"
        dead = self._server.dead_members(self._stubs)
        return f"Triton's stub processes {sorted(dead)} died" if dead else None

    def _failed_probe(self) -> str | None:
        try:
            self._probe(self._options.probe_deadline_s)
        except grpc_client.RemoteError as error:
            if self._stop.is_set():
                return None
            fault = self._dead_process()
            if fault is None and self._busy():
                return None
            return fault or f"a request to the ensemble failed: {error}"
        return None

    def _busy(self) -> bool:
        """Whether the engine has work and gets through its steps: the probe then merely waits in its queue."""
        try:
            ping = self._ping()
        except OasisError:
            return False
        return ping["in_flight"] > 0 and ping["quiet_s"] < _BUSY_S

    def _recover(self, fault: str) -> None:
        """Restart what is at fault, also when something else fails meanwhile. Raises ServeError when that happens too often."""
        begin = time.monotonic()
        while True:
            _log(f"fault: {fault}")
            now = time.monotonic()
            if len(self._recoveries) == _MAX_RECOVERIES and now - self._recoveries[0] < _WINDOW_S:
                raise ServeError(f"{_MAX_RECOVERIES} recoveries within {_WINDOW_S:g} s: giving up; the last fault: {fault}")
            self._recoveries.append(now)
            try:
                self._restart()
            except ServeError as error:
                fault = str(error)
            else:
                _log(f"recovered after {time.monotonic() - begin:.1f} s")
                return

    def _restart(self) -> None:
        """Raises ServeError."""
        assert self._executor and self._server
        if not self._executor_answers():
            self._executor.stop(1.0)
            self._start_executor(self._options.start_s)
            _log("restarted the executor")
        # The core model reconnects by itself; a Triton that lost a stub, or does not answer even so, is started anew.
        if self._server.exit_code() is None and not self._server.dead_members(self._stubs) and self._answers_again():
            return
        self._server.stop(1.0)
        self._runtime.clean_shm()
        self._start_triton(self._options.start_s)
        _log("restarted tritonserver")

    def _executor_answers(self) -> bool:
        assert self._executor
        if self._executor.exit_code() is not None:
            return False
        return self._busy() or self._executor_generates()

    def _executor_generates(self) -> bool:
        """Whether it answers a request of one token; an engine may accept requests and fail them all."""
        ended: queue.SimpleQueue[Output] = queue.SimpleQueue()
        try:
            with ExecutorClient(self._runtime.socket, self._runtime.authkey_file, deadline_s=0.2) as client:
                client.submit([0], {"max_tokens": 1}, lambda output: ended.put(output) if output.finished else None)
                return ended.get(timeout=self._options.probe_deadline_s).code is None
        except (OasisError, queue.Empty):
            return False

    def _answers_again(self) -> bool:
        end = time.monotonic() + 5.0
        while time.monotonic() < end:
            try:
                self._probe(2.0)
                return True
            except grpc_client.RemoteError:
                self._wait()
        return False


def _log(text: str, file: Any = None) -> None:
    print(f"oasiskv: {text}", file=file or sys.stderr, flush=True)
