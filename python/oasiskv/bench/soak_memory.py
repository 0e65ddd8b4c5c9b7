"""The memory of a soak: what is sampled, and how much of it counts as a leak."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
from pathlib import Path

import torch

from oasiskv.bench.report import GIB, MIB
from oasiskv.config import EngineConfig

# Where to look when it grows.
SUSPECTS = {
    "rss": "what is kept for each request (Engine._sequences, EngineLoop._listeners, the runner, the drafter), then the core",
    "pinned": "what pins memory in every step (torch.cuda.host_memory_stats())",
    "gpu": "captured_steps in the rows of --json, other programs on the GPU, then torch's allocator (torch.cuda.memory_summary())",
}


def growth(samples: list[tuple[float, int]], seconds: float) -> float:
    """How much a line through the (second, bytes) of the last two thirds of `seconds` rises over them; bytes."""
    late = [s for s in samples if seconds / 3 <= s[0] <= seconds]
    if len(late) < 3:
        return 0.0
    times, sizes = zip(*late, strict=True)
    return statistics.linear_regression(times, sizes).slope * (times[-1] - times[0])


class Memory:
    """Samples of the process's memory and, on CUDA, of pinned host memory and of what is in use on the GPU, by whomever."""

    def __init__(self, config: EngineConfig) -> None:
        self._cuda = config.backend == "cuda"
        self._pool_bytes = int(config.host_kv_gib * GIB)  # the core pins it at the start, and nothing later
        self._samples: dict[str, list[tuple[float, int]]] = {}
        self._began = time.monotonic()

    def now(self) -> dict[str, int]:
        """Bytes by name; without the GPU's where it answers no more."""
        sizes = {"rss": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")}
        if self._cuda:
            with contextlib.suppress(RuntimeError):
                free, total = torch.cuda.mem_get_info()
                pinned_by_torch = torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)
                sizes |= {"pinned": self._pool_bytes + pinned_by_torch, "gpu": total - free}
        return sizes

    def restart(self) -> None:
        """The traffic begins: samples from before are those of warming up."""
        self._began = time.monotonic()
        self._samples.clear()
        self.sample()

    def sample(self) -> None:
        second = time.monotonic() - self._began
        for name, size in self.now().items():
            self._samples.setdefault(name, []).append((second, size))

    def leaks(self, seconds: float, most_mib: float) -> list[str]:
        """What grew by more than `most_mib` over the last two thirds of `seconds`, and where to look."""
        grown = {name: growth(samples, seconds) / MIB for name, samples in self._samples.items()}
        return [
            f"{name} still grew by {mib:.0f} MiB over the last two thirds of the run (--growth-mib {most_mib:g}): look at {SUSPECTS[name]}"
            for name, mib in grown.items()
            if mib > most_mib
        ]

    def row(self, seconds: float) -> dict[str, int]:
        """Bytes of the first, middle and last sample of each, and its growth."""
        row = {}
        for name, samples in self._samples.items():
            for when, (_, size) in zip(("start", "middle", "end"), (samples[0], samples[len(samples) // 2], samples[-1]), strict=True):
                row[f"{name}_{when}_bytes"] = size
            row[f"{name}_growth_bytes"] = round(growth(samples, seconds))
        return row
