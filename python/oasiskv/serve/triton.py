"""Finds the Triton server that the package nvidia-pytriton bundles, without importing it."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from oasiskv.errors import ConfigError

_INSTALL = "pip install 'oasiskv[triton]'"


@dataclass(frozen=True)
class TritonInstallation:
    """root has bin/, backends/ and caches/; stub is this Python's; libpython_dir is None where the loader finds libpython itself."""

    root: Path
    stub: Path
    libpython_dir: Path | None
    version: str  # of nvidia-pytriton

    @property
    def server(self) -> Path:
        return self.root / "bin" / "tritonserver"

    def make_backend_dir(self, folder: Path) -> Path:
        """The backend directory in the layout that tritonserver wants: the stub must lie beside the backend's library."""
        python = folder / "python"
        python.mkdir(parents=True)
        source = self.root / "backends" / "python"
        for file in (source / "libtriton_python.so", source / "triton_python_backend_utils.py", self.stub):
            (python / file.name).symlink_to(file)
        # The stub ignores PYTHONPATH but has this folder on sys.path: the models find this very package however it was found here.
        (python / "oasiskv").symlink_to(Path(__file__).resolve().parent.parent)
        return folder

    def command(self, models: Path, backends: Path, host: str, ports: tuple[int, int, int], shm_prefix: str, exit_s: int) -> list[str]:
        """ports: HTTP, gRPC, metrics. shm_prefix begins the names of its regions; exit_s: how long running requests hold up its end."""
        http, grpc, metrics = ports
        return [
            str(self.server), f"--model-repository={models}", f"--backend-directory={backends}",
            f"--cache-directory={self.root / 'caches'}", f"--http-address={host}", f"--http-port={http}",
            f"--grpc-address={host}", f"--grpc-port={grpc}", f"--metrics-address={host}", f"--metrics-port={metrics}",
            "--allow-gpu-metrics=false", "--disable-auto-complete-config", f"--exit-timeout-secs={exit_s}",
            f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """This process's, changed so that the stubs run this Python with its packages."""
        env = dict(os.environ)
        bins = [str(Path(sys.executable).parent), "/usr/bin", "/bin"]
        env["PATH"] = os.pathsep.join(bins)
        if self.libpython_dir:
            env["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, [str(self.libpython_dir), env.get("LD_LIBRARY_PATH")]))
        return env


def locate() -> TritonInstallation:
    """Raises ConfigError naming what is missing and how to install it."""
    for module, package in (("pytriton", "nvidia-pytriton"), ("tritonclient", "tritonclient[grpc]"), ("grpc", "tritonclient[grpc]")):
        if importlib.util.find_spec(module) is None:
            raise ConfigError(f"the package {package} is not installed: {_INSTALL}")
    _check_numpy()
    spec = importlib.util.find_spec("pytriton")
    root = Path(next(iter(spec.submodule_search_locations or []), "")) / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / "triton_python_backend_stub"
    for file in (root / "bin" / "tritonserver", root / "backends" / "python" / "libtriton_python.so"):
        if not file.exists():
            raise ConfigError(f"{file} is missing: reinstall nvidia-pytriton")
    if not stub.exists():
        have = ", ".join(sorted(p.name for p in stub.parent.parent.glob("3.*")))
        raise ConfigError(f"Triton has no stub for Python {python}: run with one of {have}")
    return TritonInstallation(root, stub, _libpython_dir(), importlib.metadata.version("nvidia-pytriton"))


def _check_numpy() -> None:
    version = importlib.metadata.version("numpy")
    if int(version.split(".")[0]) >= 2:
        raise ConfigError(f"numpy {version} crashes Triton's Python backend on string inputs: pip install 'numpy<2'")


def _libpython_dir() -> Path | None:
    """Where the shared libpython of this interpreter lies. The stub would otherwise take any other of that version."""
    name = sysconfig.get_config_var("INSTSONAME") or f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    folders = [sysconfig.get_config_var("LIBDIR"), f"{sys.base_prefix}/lib", sysconfig.get_config_var("LIBPL")]
    for folder in filter(None, folders):
        if ".so" in name and (Path(folder) / name).exists():
            return Path(folder)
    try:
        ctypes.CDLL(name)
    except OSError:
        raise ConfigError(
            f"{name} is not found: this Python has no shared library, which Triton needs; use one built with --enable-shared"
        ) from None
    return None
