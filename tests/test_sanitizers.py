"""The C++ test programs under ThreadSanitizer and AddressSanitizer: a delayed transfer changes no bit, nothing leaks."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("sanitizer", ["thread", "address"])
def test_core_is_clean(sanitizer: str) -> None:
    build = ROOT / "build" / f"sanitize-{sanitizer}"
    options = [f"-DOASIS_SANITIZE={sanitizer}", "-DOASIS_TESTS=ON", "-DOASIS_PYTHON=OFF", "-DCMAKE_CXX_FLAGS=-Werror"]
    configured = subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *options], capture_output=True, text=True)
    assert configured.returncode == 0, configured.stdout + configured.stderr
    built = subprocess.run(["cmake", "--build", build], capture_output=True, text=True)
    assert built.returncode == 0, built.stdout[-4000:]
    for program, expected in (["core_stress", "60"], "ok requests=60"), (["nan_rows"], "ok"), (["host_range"], "ok"):
        ran = subprocess.run([build / program[0], *program[1:]], capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stdout + ran.stderr[-6000:]
        assert ran.stdout.startswith(expected)
