"""The tritonserver that the package nvidia-pytriton bundles: where it is and how it must be started."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
import sysconfig
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from oasiskv.errors import ConfigError

REPOSITORY_MODELS = ("preprocessing", "tensorrt_llm", "postprocessing", "ensemble")


@dataclass(frozen=True)
class Ports:
    grpc: int
    http: int
    metrics: int


def find_server() -> Path:
    """The folder of the bundled server. Raises ConfigError naming what to install."""
    spec = importlib.util.find_spec("pytriton")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("the Triton server is not installed: pip install 'oasiskv[triton]'")
    try:
        if int(version("numpy").split(".")[0]) >= 2:
            raise ConfigError(f"numpy {version('numpy')} kills Triton's python backend: pip install 'numpy<2'")
    except PackageNotFoundError:
        raise ConfigError("numpy is not installed: pip install 'numpy<2'") from None
    return Path(next(iter(spec.submodule_search_locations))) / "tritonserver"


def make_backend_dir(server: Path, target: Path) -> None:
    """The python backend with the stub of this interpreter beside it. Raises ConfigError where there is none."""
    stub = server / "python_backend_stubs" / f"{sys.version_info.major}.{sys.version_info.minor}" / "triton_python_backend_stub"
    if not stub.exists():
        raise ConfigError(f"Triton has no python backend for Python {sys.version_info.major}.{sys.version_info.minor}: use 3.10 to 3.12")
    backend = target / "python"
    backend.mkdir(parents=True)
    for name in ("libtriton_python.so", "triton_python_backend_utils.py"):
        (backend / name).symlink_to(server / "backends" / "python" / name)
    (backend / stub.name).symlink_to(stub)


def fill_repository(source: Path, target: Path, values: dict[str, str]) -> None:
    """Copy the model repository with `${name}` placeholders filled. Raises ConfigError for one without a value."""
    for model in REPOSITORY_MODELS:
        shutil.copytree(source / model, target / model, ignore=shutil.ignore_patterns("__pycache__"))
        (target / model / "1").mkdir(exist_ok=True)
        config = target / model / "config.pbtxt"
        text = re.sub(r"\$\{(\w+)\}", lambda m: values.get(m[1], m[0]), config.read_text())
        if left := re.findall(r"\$\{(\w+)\}", text):
            raise ConfigError(f"{config.name} of {model} needs a value for {left[0]}")
        config.write_text(text)


def repository_source() -> Path:
    """The repository shipped with the package, or of the source tree."""
    here = Path(__file__).resolve()
    for folder in (here.parents[1] / "triton_model_repo", here.parents[3] / "triton_model_repo"):
        if folder.is_dir():
            return folder
    raise ConfigError("triton_model_repo is not beside the package: reinstall oasiskv")


def command(server: Path, runtime: Path, ports: Ports, shm_prefix: str) -> list[str]:
    return [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={runtime / 'repository'}",
        f"--backend-directory={runtime / 'backends'}",
        f"--cache-directory={server / 'caches'}",
        "--http-address=127.0.0.1", "--grpc-address=127.0.0.1", "--metrics-address=127.0.0.1",
        f"--http-port={ports.http}", f"--grpc-port={ports.grpc}", f"--metrics-port={ports.metrics}",
        "--allow-gpu-metrics=false", "--disable-auto-complete-config", "--exit-timeout-secs=10", "--reuse-grpc-port=false",
        f"--backend-config=python,shm-region-prefix-name={shm_prefix}",
    ]


def environment() -> dict[str, str]:
    """The stub takes site-packages from the first python3 on PATH and needs this interpreter's libpython."""
    library = sysconfig.get_config_var("LIBDIR") or ""
    path = os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"])
    keep = {k: os.environ[k] for k in ("HOME", "LANG", "TMPDIR", "OASISKV_CACHE") if k in os.environ}
    return keep | {"PATH": path, "LD_LIBRARY_PATH": library, "OMP_NUM_THREADS": "1"}
