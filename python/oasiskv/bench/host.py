"""`oasiskv bench host`: how fast the host tier's pinned memory is there, and that it can be used.

Paired: filling as much fresh ordinary memory (huge pages too) by as many threads, in turn with the allocation. The first allocation comes
before any fill, so that it alone bears what the machine does for memory that is used for the first time. Afterwards random places are
written by the CPU, copied to the device by the copy engine and by the gather kernel, and compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from oasiskv import _core
from oasiskv.bench.report import GIB, say
from oasiskv.engine.cuda_runner import require_cuda
from oasiskv.engine.machine import memory_left, usable_cpus
from oasiskv.errors import ConfigError, EngineError

PLACE = 1 << 20  # bytes of one checked place
_RUN = 8192  # bytes of one copy of the gather kernel
MARGIN_SHARE, MARGIN_MIN = 1 / 16, 4 * GIB  # what `--gib all` leaves to the rest of the machine: file cache, page tables, other processes


def usable_bytes(host_memory_gib: float | None) -> int:
    """What the limits allow less the margin: MARGIN_SHARE of it, at least MARGIN_MIN. Raises ConfigError where nothing remains."""
    left = memory_left(host_memory_gib)
    size = int(left.bytes - max(left.bytes * MARGIN_SHARE, MARGIN_MIN))
    if size <= 0:
        raise ConfigError(
            f"--gib all: this machine has {left.bytes / GIB:.1f} GiB left ({left.why}), no more than the margin; give a number"
        )
    return size


def size_bytes(text: str, host_memory_gib: float | None) -> int:
    """Bytes for --gib: a number of GiB, or `all`. Raises ConfigError."""
    if text == "all":
        return usable_bytes(host_memory_gib)
    try:
        size = int(float(text) * GIB)
    except (ValueError, OverflowError):
        size = 0
    if size < PLACE:
        raise ConfigError(f"--gib {text}: give a number of GiB, or 'all'")
    return size


def places(size: int, chunk: int, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Places that do not overlap: (within one registration, for the copy engine; also across their borders, for kernels)."""
    slots = rng.permutation(size // PLACE)[:count].astype(np.int64) * PLACE  # a registration is a multiple of PLACE
    borders = np.arange(chunk, size - PLACE, chunk, dtype=np.int64)
    across = rng.permutation(borders)[: count // 4] - PLACE // 2
    # Two slots lie half under a place across a border: those are left to it.
    apart = slots[~np.isin(slots, np.concatenate([across - PLACE // 2, across + PLACE // 2]))]
    return apart, np.concatenate([apart, across])


def check_use(memory: _core.cuda.HostMemory, count: int) -> dict[str, float]:
    """Copies random places to the device; GB/s of the copy engine and of the gather kernel. Raises EngineError where a byte differs."""
    rng = np.random.default_rng(0)
    array = np.asarray(memory)
    inside, anywhere = places(memory.bytes, memory.chunk_bytes, count, rng)
    for place in anywhere:
        array[place : place + PLACE] = rng.integers(0, 256, PLACE, dtype=np.uint8)
    torch.cuda.init()  # else torch says of nothing that it is pinned
    host = torch.from_numpy(array)
    if not host.is_pinned():
        raise EngineError("CUDA does not take the memory for pinned")
    target = torch.empty(len(anywhere), PLACE, dtype=torch.uint8, device="cuda")
    pairs = [(target[i], host[place : place + PLACE]) for i, place in enumerate(inside)]

    def copy() -> None:
        for to, source in pairs:
            to.copy_(source, non_blocking=True)

    rates = {"places": len(anywhere)}
    for name, call, expected in (("copy", copy, inside), ("gather", _gather(memory.address + anywhere, target), anywhere)):
        call()  # a first time untimed
        target.fill_(0)
        took_ms = _gpu_ms(call)
        got = target.cpu().numpy()
        wrong = [int(place) for i, place in enumerate(expected) if not np.array_equal(got[i], array[place : place + PLACE])]
        if wrong:
            raise EngineError(f"{name}: {len(wrong)} of {len(expected)} places differ, the first at byte {wrong[0]}")
        rates[f"{name}_gb_s"] = round(len(expected) * PLACE / took_ms / 1e6, 1)
    return rates


def _gather(addresses: np.ndarray, target: torch.Tensor) -> Callable[[], None]:
    """Calls the gather kernel for the places at int64 `addresses` [n]; into target: uint8 [n, PLACE], on the device."""
    offsets = np.arange(0, PLACE, _RUN, dtype=np.int64)
    sources = (addresses[:, None] + offsets).ravel()
    targets = target.data_ptr() + np.arange(len(sources), dtype=np.int64) * _RUN
    copies = torch.from_numpy(np.stack([sources, targets], axis=1)).cuda()
    number = torch.tensor([len(sources)], dtype=torch.int32, device="cuda")
    return lambda: _core.cuda.gather(copies.data_ptr(), number.data_ptr(), _RUN, 4, 8, torch.cuda.current_stream().cuda_stream)


def _gpu_ms(call: Callable[[], None]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def _show_progress(done: int, total: int) -> None:
    print(f"\r{done / GIB:.0f} of {total / GIB:.0f} GiB pinned", end="\n" if done == total else "", file=sys.stderr, flush=True)


def run(args: argparse.Namespace) -> dict[str, object]:
    require_cuda()
    size, threads = size_bytes(args.gib, args.host_memory_gib), args.threads or usable_cpus()
    chunk, assume = int(args.chunk_gib * GIB), int((args.host_memory_gib or 0) * GIB)
    pinned_s: list[float] = []
    filled_s: list[float] = []
    freed_s: list[float] = []
    rates: dict[str, float] = {}
    for i in range(args.runs):
        try:
            memory = _core.cuda.HostMemory(size, num_threads=threads, progress=_show_progress, chunk_bytes=chunk, assume_bytes=assume)
        except (ValueError, RuntimeError) as error:
            raise ConfigError(str(error)) from None
        pinned_s.append(memory.seconds)
        if i == args.runs - 1:
            rates = check_use(memory, args.places)
        node = memory.numa_node
        begin = time.monotonic()
        del memory
        freed_s.append(time.monotonic() - begin)
        filled_s.append(_core.fill_seconds(size, threads))
    gib = size / GIB
    row = {
        "gib": round(gib, 2),
        "threads": threads,
        "chunk_gib": args.chunk_gib,
        "numa_node": node,
        "runs": args.runs,
        "first_gib_s": round(gib / pinned_s[0], 2),
        "gib_s": round(gib / statistics.median(pinned_s), 2),
        "fill_gib_s": round(gib / statistics.median(filled_s), 2),
        "ratio": round(statistics.median(f / p for f, p in zip(filled_s, pinned_s, strict=True)), 3),
        "free_s": round(statistics.median(freed_s), 2),
        **rates,
    }
    say(
        f"{gib:.1f} GiB, {threads} threads: {row['gib_s']} GiB/s (first {row['first_gib_s']}), filling {row['fill_gib_s']} GiB/s, "
        f"ratio {row['ratio']}; {row['places']} random places are right, copy {row['copy_gb_s']} GB/s, gather {row['gather_gb_s']} GB/s"
    )
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="oasiskv bench host", description=__doc__)
    parser.add_argument("--gib", default="16", help="how much; 'all': what the limits allow less a margin (a sixteenth, at least 4 GiB)")
    parser.add_argument("--host-memory-gib", type=float, help="memory of the machine, where it grows with use")
    parser.add_argument("--threads", type=int, help="default: the cores this process may use")
    parser.add_argument("--chunk-gib", type=float, default=4.0, help="of one registration")
    parser.add_argument("--runs", type=int, default=3, help="paired runs; medians are reported")
    parser.add_argument("--places", type=int, default=1024, help="random places of 1 MiB that are checked")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    args = parser.parse_args(argv)
    row = run(args)
    if args.json:
        print(json.dumps(row), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
