"""Child processes that die with their parent, and ports."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
from pathlib import Path

from oasiskv.errors import ConfigError

_libc = ctypes.CDLL(None)


def check_port(field: str, port: int) -> None:
    """Raises ConfigError when something listens there already."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("127.0.0.1", port))
        except (OSError, OverflowError) as error:
            raise ConfigError(f"{field} = {port}: {error}; stop what listens there or choose another port") from None


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on at this moment."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for s in sockets:
            s.bind(("127.0.0.1", 0))
        return [s.getsockname()[1] for s in sockets]
    finally:
        for s in sockets:
            s.close()


def _child_setup() -> None:
    os.setsid()  # a terminal's SIGINT reaches the supervisor only, which stops its children in order
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def spawn(command: list[str], log: Path, cwd: Path, env: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start a process group of its own, its output appended to `log`."""
    with log.open("ab") as out:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, env=env, preexec_fn=_child_setup
        )


def stop(process: subprocess.Popen[bytes] | None, grace_s: float) -> None:
    """SIGTERM, then SIGKILL to the whole group after `grace_s`; returns once it is reaped."""
    if process is None:
        return
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # what it may have left behind, stubs above all
    process.wait()


def tail(log: Path, lines: int = 20) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""
