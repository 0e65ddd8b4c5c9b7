"""What `oasiskv env` says of CUDA: the build, the GPU, and whether the one runs on the other."""

from __future__ import annotations

import ctypes
import warnings
from pathlib import Path
from typing import Any

CAPABILITY = (9, 0)  # the kernels are compiled for sm_90a alone: instructions of that architecture do not run on any other


def collect() -> dict[str, Any]:
    """`cuda` is the verdict; the rest is what it rests on, None where there is nothing to say. Needs no GPU and no driver."""
    import torch

    built = _built()
    gpu, why = _gpu()
    return {
        "cuda": verdict(built, gpu, why),
        "core_cuda": built,
        "torch_cuda": torch.version.cuda,
        "cublaslt": _loaded_library("libcublasLt.so"),
        "gpu": gpu and gpu.name,
        "gpu_capability": gpu and f"{gpu.major}.{gpu.minor}",
        "gpu_memory_gib": gpu and round(gpu.total_memory / 2**30, 1),
        "gpu_driver": _driver(),
    }


def _built() -> bool:
    try:
        from oasiskv import _core
    except ImportError:
        return False
    return hasattr(_core, "cuda")


def _gpu() -> tuple[Any, str]:
    """torch's properties of the first GPU, or None and why there is none."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.init()
            return torch.cuda.get_device_properties(0), ""
    except (RuntimeError, AssertionError) as error:  # AssertionError: a torch without CUDA
        return None, str(error).strip().split("\n")[0].split(". ")[0].rstrip(".")


def verdict(built: bool, gpu: Any, why: str) -> str:
    """In words. gpu: name, major and minor of its compute capability; None: `why` there is none."""
    if not built:
        return "not built: python3 build.py setup --cuda"
    if gpu is None:
        return f"built, but it will not run here: {why}"
    if (gpu.major, gpu.minor) != CAPABILITY:
        return (
            f"built, but it will not run here: {gpu.name} has compute capability {gpu.major}.{gpu.minor}, the kernels are for 9.0 (Hopper)"
        )
    return f"ready: {gpu.name}"


def _loaded_library(name: str) -> str | None:
    """The file of a library that this process has loaded. The core's comes with it."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    return next((path for line in lines if name in (path := line.split(maxsplit=5)[-1])), None)


def _driver() -> str | None:
    """The driver's release, by the library that comes with it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    text = ctypes.create_string_buffer(96)
    if nvml.nvmlInit_v2() != 0:
        return None
    said = nvml.nvmlSystemGetDriverVersion(text, len(text))
    nvml.nvmlShutdown()
    return text.value.decode() if said == 0 else None
