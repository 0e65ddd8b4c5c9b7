"""What of the machine this process may use."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError

_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
_UNLIMITED = 1 << 60  # what an unset limit may read as
_MEMORY_MAX = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def usable_cpus() -> int:
    """Cores this process may run on, or the control group's quota of them where that is lower."""
    cpus = len(os.sched_getaffinity(0))
    with contextlib.suppress(OSError, ValueError):  # absent, or "max"
        quota, period = _CPU_MAX.read_text().split()
        cpus = min(cpus, max(1, int(quota) // int(period)))
    return cpus


def memory_bytes() -> int:
    """The control group's limit, or physical memory where there is none. A virtual machine's memory may grow up to the limit with use."""
    for path in _MEMORY_MAX:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            if (limit := int(path.read_text())) < _UNLIMITED:
                return limit
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_pools_fit(config: EngineConfig, core: _core.CoreConfig) -> None:
    """Raise ConfigError for pools larger than the memory: they are touched as they fill, and the kernel would then kill the process."""
    summaries = core.host_blocks // 16 if core.sparse_enabled else 0  # in host blocks' worth: two vectors for 16 keys and 16 values
    wanted = core.page_bytes * (core.device_pages * core.num_layers + core.host_blocks + summaries)
    have = memory_bytes()
    if wanted > have:
        raise ConfigError(
            f"device_kv_gib = {config.device_kv_gib:g}, host_kv_gib = {config.host_kv_gib:g}: with summaries {wanted / 2**30:.1f} GiB, "
            f"this machine has {have / 2**30:.1f} GiB; lower them"
        )
