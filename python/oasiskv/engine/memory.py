"""How much memory the pools may hope for: they are mapped at the start and touched as they fill."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def memory_bytes() -> int:
    """Physical memory, or the control group's limit where that is lower."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _CGROUP_LIMITS:
        with contextlib.suppress(OSError, ValueError):  # absent, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def check_pools_fit(config: EngineConfig, core: _core.CoreConfig) -> None:
    """Raise ConfigError for pools larger than the memory: the kernel would kill the process once they fill."""
    wanted = core.page_bytes * (core.device_pages * core.num_layers + core.host_blocks)
    have = memory_bytes()
    if wanted > have:
        raise ConfigError(
            f"device_kv_gib = {config.device_kv_gib:g}, host_kv_gib = {config.host_kv_gib:g}: "
            f"this machine has {have / 2**30:.1f} GiB for both; lower them"
        )
