"""How the benchmarks of CUDA kernels measure: CUDA events around replays of a graph of several calls, arms alternating, medians."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable

import torch

from oasiskv import _core

Run = Callable[[], None]
_cuda = getattr(_core, "cuda", None)


def ints(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def copies(size: int) -> int:
    """Of what a call reads, `size` bytes: so many, which calls take in turn, that none finds its own in the L2 cache."""
    return -(-4 * torch.cuda.get_device_properties(0).L2_cache_size // size)


def events(count: int) -> list[torch.cuda.Event]:
    return [torch.cuda.Event(enable_timing=True) for _ in range(count)]


def captured(call: Run, calls: int, before: Run | None = None) -> torch.cuda.CUDAGraph:
    """`before` once, then `calls` calls; one more has run, for what is set up once."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        if before:
            before()
        for _ in range(calls):
            call()
    return graph


def paired(arms: dict[str, Run], runs: int, calls: int, before: Run | None = None) -> dict[str, float]:
    """Median microseconds a call of each arm; the arms alternate, a graph of `before` and `calls` calls between two events."""
    times: dict[str, list[float]] = {name: [] for name in arms}
    graphs = {name: captured(call, calls, before) for name, call in arms.items()}
    for run in range(runs + 2):
        for name, graph in graphs.items():
            begin, end = events(2)
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if run >= 2:
                times[name].append(begin.elapsed_time(end) * 1e3 / calls)
    return {name: statistics.median(t) for name, t in times.items()}


def under_load(call: Run, load: Run, runs: int, calls: int, before: Run | None = None) -> dict[str, float]:
    """Median microseconds a call `alone` and `loaded`: while `load` runs on another stream, which goes first. The two alternate.
    `load`: what the load takes, as calls go on until it ends. Unmeasured calls come before those that count: the load has its SMs by then.

    Raises RuntimeError if the load ends before the calls do."""
    times: dict[str, list[float]] = {"alone": [], "loaded": [], "load": []}
    graph = captured(call, calls, before)
    here, other = torch.cuda.current_stream(), torch.cuda.Stream(priority=-1)
    for run in range(runs + 2):
        for arm in ("alone", "loaded"):
            begin, end, load_begin, load_end = events(4)
            torch.cuda.synchronize()
            if arm == "loaded":
                with torch.cuda.stream(other):
                    load_begin.record()
                    load()
                    load_end.record()
            graph.replay()
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            if arm == "loaded":
                if load_end.query():
                    raise RuntimeError("the load ended before the calls did")
                while not load_end.query():
                    graph.replay()
                    here.synchronize()
            if run >= 2:
                times[arm].append(begin.elapsed_time(end) * 1e3 / calls)
                if arm == "loaded":
                    times["load"].append(load_begin.elapsed_time(load_end) * 1e3)
    return {name: statistics.median(t) for name, t in times.items()}


class Read:
    """A plain read of as many bytes; the floor of what only reads device memory."""

    def __init__(self, size: int) -> None:
        self._buffers = itertools.cycle(torch.empty(copies(size), size, dtype=torch.uint8, device="cuda").unbind())
        self._out = ints([0])
        self.sms = torch.cuda.get_device_properties(0).multi_processor_count

    def __call__(self) -> None:
        buffer = next(self._buffers)
        _cuda.read(buffer.data_ptr(), buffer.numel(), self._out.data_ptr(), self.sms * 4, stream())
