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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oasiskv.serve.local import free_ports

GENERATE = ["generate", "--prompt", "a", "--max-tokens", "4000", "--ignore-eos"]


def left_behind(temporary: Path) -> list[Path]:
    """What is in this run's temporary folder, and shared memory that no other server of this machine or test owns."""
    others = [Path(tempfile.gettempdir()), *(folder for folder in temporary.parent.iterdir() if folder != temporary)]
    owned = tuple(runtime.name for folder in others for runtime in folder.glob("oasiskv-*"))
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


def check_one(i: int, after_s: float, temporary: Path) -> None:
    temporary.mkdir()
    before = set(left_behind(temporary))
    ports = free_ports(3)
    serve = ["serve", *(a for n, p in zip(("grpc", "http", "metrics"), ports, strict=True) for a in (f"--{n}-port", str(p)))]
    arguments = serve if i % 2 else GENERATE
    mark = f"interrupt-{os.getpid()}-{i}"
    code, error = interrupt(arguments, after_s, mark, temporary)
    what = f"{arguments[0]} after {after_s:.3f} s"
    assert code == 130, f"{what}: {error}"
    assert "Traceback" not in error, f"{what}: {error}"
    end = time.monotonic() + 10
    while processes_with(mark) and time.monotonic() < end:
        time.sleep(0.05)
    assert processes_with(mark) == [], f"{what} left processes"
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))
    assert set(left_behind(temporary)) <= before, what
    temporary.rmdir()


def test_sigint_at_random_instants_leaves_nothing(tmp_path: Path) -> None:
    """Two at a time. The interpreter itself needs about 0.1 s to take over the signal from the system's default."""
    rng = random.Random(3)
    instants = [rng.uniform(0.15, 6.0 if i % 2 else 4.0) for i in range(50)]
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(check_one, i, after_s, tmp_path / str(i)) for i, after_s in enumerate(instants)]:
            done.result()
