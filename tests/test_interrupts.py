"""SIGINT at 50 random instants: exit code 130 each time, and no process, port or shared memory is left."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from oasiskv.demo import free_ports

GENERATE = ["generate", "--prompt", "a", "--max-tokens", "4000", "--ignore-eos"]


def left_behind(temporary: Path) -> list[Path]:
    """Runtime folders there, and shared memory that no server of this machine's other users and tests owns."""
    owned = tuple(folder.name for folder in Path(tempfile.gettempdir()).glob("oasiskv-*"))
    return [*temporary.iterdir(), *(region for region in Path("/dev/shm").glob("oasiskv-*") if not region.name.startswith(owned))]


def processes_with(mark: str) -> list[int]:
    """Processes whose environment holds `mark`: the command and all that it started."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes() and b"\0" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def interrupt(arguments: list[str], after_s: float, mark: str, temporary: Path) -> tuple[int, str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "oasiskv.cli", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OASISKV_TEST_MARK": mark, "TMPDIR": str(temporary)},
    )  # fmt: skip
    time.sleep(after_s)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    return process.returncode, error


def test_sigint_at_random_instants_leaves_nothing(tmp_path: Path) -> None:
    rng = random.Random(3)
    before = set(left_behind(tmp_path))
    for i in range(50):
        ports = free_ports(3)
        serve = ["serve", *(a for n, p in zip(("grpc", "http", "metrics"), ports, strict=True) for a in (f"--{n}-port", str(p)))]
        arguments, latest = (serve, 6.0) if i % 2 else (GENERATE, 4.0)
        # The interpreter itself needs about 0.1 s to take over the signal from the system's default.
        after_s = rng.uniform(0.15, latest)
        mark = f"interrupt-{os.getpid()}-{i}"
        code, error = interrupt(arguments, after_s, mark, tmp_path)
        assert code == 130, f"{arguments[0]} after {after_s:.3f} s: {error}"
        assert "Traceback" not in error, f"{arguments[0]} after {after_s:.3f} s: {error}"
        end = time.monotonic() + 10
        while processes_with(mark) and time.monotonic() < end:
            time.sleep(0.05)
        assert processes_with(mark) == [], f"{arguments[0]} after {after_s:.3f} s left processes"
        for port in ports:
            with socket.socket() as s:
                s.bind(("127.0.0.1", port))
        assert set(left_behind(tmp_path)) <= before, f"{arguments[0]} after {after_s:.3f} s"
