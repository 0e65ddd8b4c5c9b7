"""A real service as a child of the tests, with its log, its processes and a way past Triton."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from oasiskv.executor.client import ExecutorClient
from oasiskv.serve.local import free_ports

SMALL_POOLS = ("--max-seq-len", "2048", "--device-kv-gib", "0.25", "--host-kv-gib", "0.5", "--probe-every", "1")


class Service:
    """`oasiskv serve` with small pools and `more` flags, ready once constructed. `log`: what it has told on standard error."""

    def __init__(self, *more: str) -> None:
        self.ports = free_ports(3)
        flags = [x for name, port in zip(("grpc", "http", "metrics"), self.ports, strict=True) for x in (f"--{name}-port", str(port))]
        command = [sys.executable, "-m", "oasiskv.cli", "serve", *flags, *SMALL_POOLS, *more]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.log: list[str] = []
        threading.Thread(target=lambda: self.log.extend(self.process.stderr), daemon=True).start()
        assert any("ready:" in line for line in self.process.stdout), "".join(self.log)

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.ports[0]}"

    def executor(self) -> ExecutorClient:
        """A connection of our own, past Triton."""
        command = read(Path(f"/proc/{self.descendants('oasiskv.executor')[0]}/cmdline")).split("\0")
        return ExecutorClient(command[command.index("--socket") + 1], command[command.index("--authkey-file") + 1])

    def descendants(self, name: str = "") -> list[int]:
        """Process ids below the supervisor whose command line contains `name`."""
        found, front = [], [self.process.pid]
        while front:
            children = Path(f"/proc/{front.pop()}/task").glob("*/children")
            for pid in (int(p) for c in children if (text := read(c)) for p in text.split()):
                front.append(pid)
                if name in read(Path(f"/proc/{pid}/cmdline")):
                    found.append(pid)
        return found

    def stop(self) -> None:
        """End it as an operator would; it must do so in order."""
        self.process.terminate()
        assert self.process.wait(40) == 0


def read(path: Path) -> str:
    """A file's text; nothing of one that is gone."""
    try:
        return path.read_text()
    except OSError:
        return ""


def alive(pid: int) -> bool:
    return read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])


def eventually(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.1)
