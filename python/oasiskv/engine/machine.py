"""What of the machine this process may use. The rules are the core's (cpp/src/host/limits.h): its pinned memory keeps to them too."""

from __future__ import annotations

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError


def usable_cpus() -> int:
    """Cores this process may run on, or its control groups' quota of them where that is lower."""
    return _core.usable_cpus()


def memory_left(host_memory_gib: float | None = None) -> _core.MemoryLeft:
    """Memory that may still be taken. Without a control group's limit: MemAvailable, or what of `host_memory_gib` is not in use."""
    return _core.memory_left(int((host_memory_gib or 0) * 2**30))


def check_pools_fit(config: EngineConfig, core: _core.CoreConfig) -> None:
    """Raise ConfigError for pools larger than the memory: they are touched as they fill, and the kernel would then kill the process.

    With CUDA only the host's pool is in the machine's memory.
    """
    host = core.page_bytes * core.host_blocks
    on_device = 0 if config.backend == "cuda" else core.page_bytes * core.device_pages * core.num_layers + core.summary_bytes
    left = memory_left(config.host_memory_gib)
    if host + on_device > left.bytes:
        what = f"host_kv_gib = {config.host_kv_gib:g}: "
        if on_device:
            what = f"device_kv_gib = {config.device_kv_gib:g}, {what}with summaries {(host + on_device) / 2**30:.1f} GiB; "
        raise ConfigError(f"{what}this machine has {left.bytes / 2**30:.1f} GiB left ({left.why}); {left.remedy}")
