"""A child process of the supervisor: its output's tail, whether it lives, and how it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from pathlib import Path

from oasiskv.errors import ServeError

_TAIL_LINES = 40


class Child:
    """Runs in a session of its own, so that a Ctrl-C in the terminal reaches only the supervisor."""

    def __init__(self, name: str, command: list[str], cwd: Path, env: dict[str, str], verbose: bool) -> None:
        self.name = name
        self._tail: deque[str] = deque(maxlen=_TAIL_LINES)
        self._verbose = verbose
        try:
            self._process = subprocess.Popen(
                command, cwd=cwd, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                text=True, errors="replace", start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise ServeError(f"the {name} cannot be started in {cwd}: {error}; start the server anew") from None
        self._reader = threading.Thread(target=self._read, name=f"oasiskv-{name}-log", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def tail(self) -> str:
        """Its last lines of output."""
        if self.exit_code() is not None:
            self._reader.join(timeout=1.0)
        return "\n".join(f"  {self.name}| {line}" for line in list(self._tail)) or f"  {self.name}| (no output)"

    def last_error(self) -> str | None:
        """The one-line error it ended with, if it is one of ours."""
        self._reader.join(timeout=1.0)
        return next(
            (line.removeprefix("oasiskv: error: ") for line in reversed(list(self._tail)) if line.startswith("oasiskv: error: ")), None
        )

    def dead_members(self, known: set[int]) -> set[int]:
        """Those of `known` process ids that live no more."""
        return known - self.members()

    def members(self) -> set[int]:
        """Process ids of its own direct children that live."""
        found = set()
        for task in Path(f"/proc/{self.pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found |= {int(p) for p in task.read_text().split() if _alive(int(p))}
        return found

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL to its whole session after `grace_s` seconds. Idempotent."""
        self.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._tail.append(line.rstrip())
            if self._verbose:
                with contextlib.suppress(OSError):  # nobody reads standard error: the child must still be drained
                    print(f"{self.name}| {line.rstrip()}", file=sys.stderr, flush=True)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
