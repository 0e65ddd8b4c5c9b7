"""build.py on a tree of its own (no package to install, a build that a small in-tree backend does), and the lock files."""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from packaging.markers import Marker
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]

BACKEND = """
import base64, os, pathlib, zipfile
pathlib.Path("settings").write_text("".join(value for name, value in sorted(os.environ.items()) if name.startswith("SKBUILD")))
if pathlib.Path("cpp/src/a.cpp").read_text() == "broken":
    raise SystemExit("a.cpp:1:1: error: this is broken")
def build_editable(folder, config_settings=None, metadata_directory=None):
    name, info = "oasiskv-0-py3-none-any.whl", "oasiskv-0.dist-info"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as z:
        z.writestr("oasiskv.pth", os.path.abspath("python"))
        z.writestr(info + "/METADATA", "Metadata-Version: 2.1\\nName: oasiskv\\nVersion: 0\\n")
        z.writestr(info + "/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        z.writestr(info + "/RECORD", "")
    return name
"""
DEMO = """
import subprocess, sys, time
if sys.argv[1:] == ["fail"]:
    sys.exit(7)
child = subprocess.Popen(["sh", "-c", "trap '' INT TERM; while :; do sleep 0.2; done"])
print("child", child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree after its first setup. Tests leave it as complete as they found it."""
    root = tmp_path_factory.mktemp("tree with a space")
    files = {
        "requirements/lock.txt": "# nothing\n",
        "requirements/models.txt": "# nothing\n",
        "requirements/cuda.txt": "oasiskv-no-such-package ; python_version < '3'\n",
        "cpp/src/a.cpp": "1",
        "CMakeLists.txt": "",
        "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
        "backend.py": BACKEND,
        "python/oasiskv/__init__.py": "",
        "python/oasiskv/demo.py": DEMO,
        "python/oasiskv/cli/__init__.py": "",
        "python/oasiskv/cli/__main__.py": "print(open('env.json').read())",
        "env.json": '{"core_isa": "avx2", "cuda": "built, but"}',
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    shutil.copy(ROOT / "build.py", root)
    assert steps(build(root, "setup")) == ["making .venv", "installing pinned", "installing the", "compiling the", "setup is"]
    return root


@pytest.fixture(scope="module")
def module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("oasis_build", ROOT / "build.py")
    assert spec and spec.loader
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded
    spec.loader.exec_module(loaded)
    return loaded


def build(root: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "build.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **env}, timeout=120)


def steps(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The first two words of each step of a run that must have succeeded."""
    assert done.returncode == 0, done.stdout + done.stderr
    return [" ".join(line.split()[3:5]) if line.startswith("[ ") else line for line in done.stdout.splitlines()]


def script(path: Path, text: str) -> str:
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def gone(pid: int) -> bool:
    """Ended, or ended and not yet reaped by whoever adopts orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_second_setup_does_nothing(tree: Path) -> None:
    assert steps(build(tree, "setup")) == ["setup is"]


def test_only_what_changed_is_done_again(tree: Path) -> None:
    (tree / "cpp/src/a.cpp").write_text("2")
    assert steps(build(tree, "setup")) == ["compiling the", "setup is"]
    (tree / "requirements/lock.txt").write_text("# another\n")
    assert steps(build(tree, "setup")) == ["installing pinned", "installing the", "compiling the", "setup is"]
    assert steps(build(tree, "setup")) == ["setup is"]


def test_interrupted_environment_is_made_again(tree: Path) -> None:
    (tree / ".venv/bin/pip").unlink()
    assert steps(build(tree, "setup"))[0] == "making .venv"
    assert steps(build(tree, "setup")) == ["setup is"]


def test_moved_tree_is_installed_again(tree: Path) -> None:
    elsewhere = tree.with_name("elsewhere")
    tree.rename(elsewhere)
    try:
        assert "compiling the" in steps(build(elsewhere, "setup"))
        assert build(elsewhere, "demo", "fail").returncode == 7
    finally:
        elsewhere.rename(tree)
    assert "compiling the" in steps(build(tree, "setup"))


def test_failed_step_shows_command_and_log_and_is_repeated(tree: Path) -> None:
    (tree / "cpp/src/a.cpp").write_text("broken")
    done = build(tree, "demo")
    assert done.returncode == 1
    assert re.search(r"command: .*pip install .*-e '.*tree with a space", done.stderr)
    assert "a.cpp:1:1: error: this is broken" in done.stderr
    assert "error: this is broken" in (tree / "build/logs/extension.log").read_text()
    assert "child" not in done.stdout  # nothing runs after the failure
    (tree / "cpp/src/a.cpp").write_text("3")
    assert steps(build(tree, "setup")) == ["compiling the", "setup is"]


def test_no_compiler_names_the_package_before_the_long_steps(tree: Path, tmp_path: Path) -> None:
    lock, source = tree / "requirements/lock.txt", tree / "cpp/src/a.cpp"
    old = lock.read_text(), source.read_text()
    lock.write_text("# changed\n")
    source.write_text("4")
    done = build(tree, "setup", PATH=str(tmp_path), CXX="")
    lock.write_text(old[0])
    source.write_text(old[1])
    assert done.returncode == 1
    assert "no C++ compiler was found" in done.stderr and "apt-get install g++" in done.stderr
    assert done.stdout == ""
    assert steps(build(tree, "setup", PATH=str(tmp_path), CXX="")) == ["setup is"]  # no compiler is needed where nothing is compiled


@pytest.fixture()
def nvcc(tmp_path: Path) -> str:
    return script(tmp_path / "nvcc", "echo Cuda compilation tools, release 13.0, V13.0.88\n")


def test_cuda_is_kept_to_until_cpu(tree: Path, nvcc: str) -> None:
    changed = ["installing pinned", "installing the", "compiling the"]
    assert steps(build(tree, "setup", "--cuda", CUDACXX=nvcc)) == [*changed, "CUDA: built,", "setup is"]
    settings = (tree / "settings").read_text()
    assert "build/cuda-{wheel_tag}" in settings and f"OASIS_CUDA=ON;CMAKE_CUDA_COMPILER={nvcc};OASIS_CUBLAS_ROOT=" in settings
    assert steps(build(tree, "setup", CUDACXX="/none")) == ["CUDA: built,", "setup is"]  # no nvcc is needed where nothing is compiled
    (tree / ".venv/bin/pip").unlink()
    assert steps(build(tree, "setup", CUDACXX=nvcc)) == ["making .venv", *changed, "CUDA: built,", "setup is"]
    assert steps(build(tree, "setup", "--cpu")) == ["removing torch's", *changed, "setup is"]
    assert (tree / "settings").read_text() == ""
    assert steps(build(tree, "setup")) == ["setup is"]


def test_a_setup_for_cuda_that_failed_is_no_complete_one_for_the_cpu(tree: Path, nvcc: str) -> None:
    cuda = tree / "requirements/cuda.txt"
    old = cuda.read_text()
    cuda.write_text("oasiskv-no-such-package==1\n")
    done = build(tree, "setup", "--cuda", CUDACXX=nvcc, PIP_NO_INDEX="1")
    assert done.returncode == 1 and "oasiskv-no-such-package" in done.stderr
    assert build(tree, "setup", CUDACXX=nvcc, PIP_NO_INDEX="1").returncode == 1  # goes on as it was begun
    cuda.write_text(old)
    assert steps(build(tree, "setup", "--cpu")) == ["removing torch's", "installing pinned", "installing the", "setup is"]


def test_cuda_without_nvcc_changes_nothing(tree: Path, tmp_path: Path) -> None:
    done = build(tree, "setup", "--cuda", CUDACXX=str(tmp_path / "none"))
    assert done.returncode == 1 and done.stdout == ""
    assert "no nvcc was found" in done.stderr and "apt-get install cuda-toolkit-13-0" in done.stderr
    assert steps(build(tree, "setup")) == ["setup is"]


@pytest.mark.parametrize(
    ("output", "said"),
    [("release 12.3, V12.3.52", "is of CUDA 12.3, torch's build and its cuBLAS of CUDA 13"), ("nothing", "does not say its version")],
)
def test_unfit_nvcc(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, said: str) -> None:
    monkeypatch.setenv("CUDACXX", script(tmp_path / "nvcc", f"echo {output}\n"))
    with pytest.raises(module.BuildError, match=said):
        module.require_nvcc()


def test_nvcc_is_found_where_cuda_lies(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nvcc: str) -> None:
    (tmp_path / "bin").mkdir()
    Path(nvcc).rename(tmp_path / "bin/nvcc")
    monkeypatch.setenv("PATH", "/bin")
    monkeypatch.setenv("CUDACXX", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert module.require_nvcc() == str(tmp_path / "bin/nvcc")


def test_a_cuda_core_that_does_not_load_fails_the_setup(tree: Path, nvcc: str) -> None:
    env = tree / "env.json"
    old = env.read_text()
    env.write_text('{"core_isa": "missing: libcublasLt.so.13: cannot open"}')
    done = build(tree, "setup", "--cuda", CUDACXX=nvcc)
    env.write_text(old)
    assert done.returncode == 1 and "does not load" in done.stderr and "libcublasLt.so.13: cannot open" in done.stderr
    assert steps(build(tree, "setup", "--cpu"))[0] == "removing torch's"


def test_old_compiler(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = script(tmp_path / "old-g++", "echo unrecognized option -std=c++20; exit 1\n")
    monkeypatch.setenv("CXX", f"{old} -m64")
    with pytest.raises(module.BuildError, match=r"(?s)does not compile C\+\+20.*old-g\+\+ -m64.*unrecognized option.*g\+\+ 11"):
        module.require_compiler()


def test_no_python(module: ModuleType, tmp_path: Path) -> None:
    useless = [
        str(tmp_path / "missing"),
        script(tmp_path / "fails", "exit 1\n"),
        script(tmp_path / "python3.9", "echo 3 9 1\n"),
        script(tmp_path / "python3.13", "echo 3 13 1\n"),
    ]
    with pytest.raises(module.BuildError, match=r"no Python 3\.10, 3\.11 or 3\.12 .*python3\.11-venv"):
        module.find_python(useless)


def test_best_python(module: ModuleType, tmp_path: Path) -> None:
    static311 = script(tmp_path / "a", "echo 3 11 0\n")
    shared310 = script(tmp_path / "b", "echo 3 10 1\n")
    shared312 = script(tmp_path / "c", "echo 3 12 1\n")
    again312 = script(tmp_path / "d", "echo 3 12 1\n")
    assert module.find_python([static311]).path == static311
    assert module.find_python([static311, shared310, shared312, again312]).path == shared312  # Triton needs the shared library
    real = module.inspect_python(sys.executable)
    assert real.version == sys.version_info[:2]


@pytest.mark.parametrize(
    ("output", "remedy"),
    [("OSError: [Errno 28] No space left on device", "The disk is full"), ("fatal error: Python.h: No such file", "python3-dev")],
)
def test_remedies(module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, remedy: str) -> None:
    monkeypatch.setattr(module, "LOGS", tmp_path)
    with pytest.raises(module.BuildError) as caught:
        module.run_step("x", "trying", ["sh", "-c", f"echo '{output}'; exit 3"])
    assert "trying: failed (exit 3)" in str(caught.value) and output in str(caught.value)
    assert remedy in str(caught.value).splitlines()[-1]


def test_second_build_waits_for_the_first(tree: Path) -> None:
    with (tree / "build/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen([sys.executable, str(tree / "build.py"), "setup"], stdout=subprocess.PIPE, text=True)
        assert child.stdout and "waiting" in child.stdout.readline()
        assert child.poll() is None
    assert "setup is complete" in child.communicate(timeout=60)[0]


def test_exit_codes(tree: Path) -> None:
    assert build(tree, "demo", "fail").returncode == 7
    assert build(tree, "--help").returncode == 0
    assert build(tree, "nonsense").returncode == 2
    assert build(tree, "setup", "--cuda", "--cpu").returncode == 2
    for command in ("setup", "wheel"):
        done = build(tree, command, "--cdua")
        assert done.returncode == 2 and "--cdua" in done.stderr and done.stdout == ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_ends_the_children(tree: Path, number: signal.Signals) -> None:
    command = [sys.executable, str(tree / "build.py"), "demo"]
    parent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert parent.stdout
    line = next(line for line in parent.stdout if line.startswith("child"))
    parent.send_signal(number)
    assert parent.wait(timeout=30) == 130
    deadline = time.monotonic() + 10
    while not gone(int(line.split()[1])):
        assert time.monotonic() < deadline, "a grandchild that ignores the signal lives on"
        time.sleep(0.05)


def lock_lines(*names: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for name in names for line in (ROOT / "requirements" / name).read_text().splitlines()]
    return [line for line in lines if line]


def locked_versions(lines: list[str], python: str) -> dict[str, str]:
    locked: dict[str, str] = {}
    for line in lines:
        name, version, marker = re.fullmatch(r"([\w.-]+)==([\w.]+)(?: ; (python_version .*))?", line).groups()  # type: ignore[union-attr]
        if marker is None or Marker(marker).evaluate({"python_version": python}):
            name = re.sub(r"[-_.]+", "-", name).lower()
            assert name not in locked, f"{name} is listed twice for Python {python}"
            locked[name] = version
    return locked


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12"])
def test_lock_is_exact_and_within_the_ranges(module: ModuleType, python: str) -> None:
    locked = locked_versions(lock_lines("lock.txt", "models.txt"), python)
    torch = f"torch=={locked['torch']}"
    cuda = lock_lines("cuda.txt")
    assert f"{torch},!={locked['torch']}+cpu" in cuda
    assert [line for line in cuda if line.startswith(f"nvidia-cublas=={module.CUDA_MAJOR}.")]
    locked |= locked_versions([line for line in cuda if not line.startswith(torch)], python)
    for text in importlib.metadata.requires("oasiskv") or []:
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in ("triton", "openai", "cuda", "dev")):
            assert need.specifier.contains(locked[need.name.lower()]), f"{text}: the lock has {locked[need.name.lower()]}"
