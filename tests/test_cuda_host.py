"""The host tier's pinned memory: kernels use it across its registrations, and nothing of it is left when it goes."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from oasiskv import _core
from reference.cuda import SMALL, ints, needs_gpu, stream

pytestmark = needs_gpu

MIB = 2**20
CHUNK = 2 * MIB  # the smallest registration: few MiB have several borders


def allocate(size: int, **options: object) -> object:
    return _core.cuda.HostMemory(size, **({"chunk_bytes": CHUNK} | options))


BIG = {"chunk_bytes": 64 * MIB, "num_threads": 4}
BIG_SIZE = 256 * MIB  # far above what threads and allocators keep


def held() -> int:
    """Writable bytes that this process has mapped."""
    return int(re.search(r"VmData:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


@pytest.mark.parametrize("num_threads", [0, 1, 7])
@pytest.mark.parametrize("size", [1, CHUNK, 5 * CHUNK, 9 * CHUNK - 4097])
def test_it_is_zeroed_and_pinned(size: int, num_threads: int) -> None:
    seen: list[tuple[int, int]] = []
    memory = allocate(size, num_threads=num_threads, progress=lambda done, total: seen.append((done, total)))
    total = -(-size // CHUNK) * CHUNK
    assert (seen[0], seen[-1]) == ((0, total), (total, total)) and seen == sorted(seen)
    assert memory.bytes == size and memory.address % CHUNK == 0 and memory.chunk_bytes == CHUNK and memory.seconds > 0
    array = np.asarray(memory)
    assert array.ctypes.data == memory.address and array.shape == (size,) and not array.any()
    tensor = torch.from_numpy(array)
    assert tensor.is_pinned()
    assert not tensor[-CHUNK // 2 :].cuda(non_blocking=True).any()


@pytest.mark.parametrize("size", [16, 4096, 8192, 65536])
def test_gather_across_registrations(size: int) -> None:
    rng = np.random.default_rng(size)
    borders = 6
    memory = allocate((borders + 1) * CHUNK)
    array = np.asarray(memory)
    array[:] = rng.integers(0, 256, array.size, dtype=np.uint8)
    places = [0, array.size - size]
    for border in range(CHUNK, (borders + 1) * CHUNK, CHUNK):
        places += [border - size, border, *(border - 16 * int(i) for i in rng.integers(0, size // 16, 4))]
    places += [16 * int(i) for i in rng.integers(0, (array.size - size) // 16, 64)]
    target = torch.full((len(places), size), 0xA5, dtype=torch.uint8, device="cuda")
    copies = torch.tensor([(memory.address + place, target[i].data_ptr()) for i, place in enumerate(places)], device="cuda")
    count = ints([len(places)])
    _core.cuda.gather(copies.data_ptr(), count.data_ptr(), size, 3, 8, stream())
    torch.cuda.synchronize()
    for got, place in zip(target.cpu().numpy(), places, strict=True):
        assert np.array_equal(got, array[place : place + size]), place


def test_a_kernel_reads_every_chunk() -> None:
    """The kernel that only reads tells of one value of its threads' sums (see probe.cu): it stands at one place of zeros at a time."""
    memory = allocate(4 * CHUNK)
    words = np.frombuffer(memory, dtype=np.uint32)
    out = ints([0])

    def read() -> int:
        out.zero_()
        _core.cuda.read(memory.address, memory.bytes, out.data_ptr(), 8, stream())
        torch.cuda.synchronize()
        return int(out)

    assert read() == 0
    for border in range(5):
        for place in (border * CHUNK // 4 - 1, border * CHUNK // 4):
            if 0 <= place < words.size:
                words[place] = 0x5BD1E995
                assert read() == 1, place
                words[place] = 0
    assert read() == 0


def test_a_kernel_writes_across_registrations() -> None:
    heads, dim, chunks = 3, 64, 4
    unit_bytes = heads * 2 * 16 * dim * 2  # does not divide a chunk
    memory = allocate(chunks * CHUNK)
    array = np.asarray(memory)
    array[:] = 7
    host_units = [0, chunks * CHUNK // unit_bytes - 1]
    for border in range(1, chunks):
        host_units += [border * CHUNK // unit_bytes - 1, border * CHUNK // unit_bytes, border * CHUNK // unit_bytes + 1]
    assert any(unit * unit_bytes < CHUNK < (unit + 1) * unit_bytes for unit in host_units)
    count = len(host_units)
    pool = torch.randn(count, heads, 2, 16, dim, device="cuda").bfloat16()
    settled = ints([(0, block, block, -1, 0) for block in range(count)])  # request, block, page; dense
    number, units = ints([count]), ints(host_units)
    _core.cuda.write_through(
        num_kv_heads=heads, group=1, head_dim=dim, element_bytes=2, layers=1, blocks=settled.data_ptr(),
        num_blocks=number.data_ptr(), pool=pool.data_ptr(), layer_bytes=0,
        host_units=units.data_ptr(), host_stride=count, host_step=1, host_offset=0, host_base=memory.address,
        num_ctas=2, stream=stream(),
    )  # fmt: skip
    torch.cuda.synchronize()
    expected = np.full_like(array, 7)
    for page, unit in zip(pool.view(torch.uint8).cpu().numpy().reshape(count, unit_bytes), host_units, strict=True):
        expected[unit * unit_bytes : (unit + 1) * unit_bytes] = page
    assert np.array_equal(array, expected)


def test_memory_that_went_can_be_had_again() -> None:
    def once() -> tuple[int, int]:
        memory = allocate(BIG_SIZE, **BIG)
        np.asarray(memory)[::MIB] = 1
        del memory
        torch.cuda.synchronize()
        return held(), torch.cuda.mem_get_info()[0]

    once()  # what CUDA keeps for good
    before, free = once()
    for _ in range(3 if SMALL else 20):
        after, free_now = once()
    assert after - before < BIG_SIZE // 2 and free - free_now < BIG_SIZE // 2


def test_arrays_over_it_keep_it() -> None:
    memory = allocate(CHUNK)
    array = np.asarray(memory)
    del memory
    array[:] = 3
    assert int(torch.from_numpy(array).cuda().sum()) == 3 * CHUNK


class Stop(Exception):
    pass


def fails_at(call: int, error: BaseException):
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == call or (call < 0 and done == total):
            raise error

    return progress


@pytest.mark.parametrize("call", [1, -1])  # before anything is there; when all is
@pytest.mark.parametrize("error", [Stop("enough"), KeyboardInterrupt()], ids=["exception", "interrupt"])
def test_a_callback_that_raises_undoes_everything(call: int, error: BaseException) -> None:
    allocate(BIG_SIZE, **BIG)
    before = held()
    for _ in range(3):
        with pytest.raises(type(error)) as raised:
            allocate(BIG_SIZE, progress=fails_at(call, error), **BIG)
        assert raised.value is error
    assert held() - before < BIG_SIZE // 2
    assert np.asarray(allocate(BIG_SIZE, **BIG)).size == BIG_SIZE


@pytest.mark.parametrize("callback", [True, False])
def test_sigint_ends_the_allocation(callback: bool) -> None:
    """It is seen at the progress reports, whether or not somebody asked for those; the last one at the latest."""
    allocate(BIG_SIZE, **BIG)
    before = held()

    def interrupt(*_: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.02, interrupt)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            if not callback:
                timer.start()
            allocate(BIG_SIZE if callback else 4 * BIG_SIZE, progress=interrupt if callback else None, **(BIG | {"num_threads": 1}))
            timer.join()
            time.sleep(0.1)
    finally:
        timer.cancel()
        signal.signal(signal.SIGINT, previous)
    assert held() - before < BIG_SIZE // 2


def test_what_the_machine_does_not_have_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"host_kv_gib = 1\.04858e\+06: too much; this machine has [\d.]+ GiB left \(.+\); lower it"):
        allocate(2**50)
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 65536 kB\nMemAvailable: 32768 kB\n")
    with pytest.raises(RuntimeError, match=r"host_kv_gib = 0\.0625: .*no control group has a limit.*host_memory_gib"):
        allocate(64 * MIB, root=str(tmp_path))
    assert allocate(64 * MIB, root=str(tmp_path), assume_bytes=2**30).bytes == 64 * MIB


@pytest.mark.parametrize(
    "options",
    [{"bytes": 0}, {"bytes": -1}, {"chunk_bytes": MIB}, {"chunk_bytes": 3 * MIB}, {"chunk_bytes": 2**36 + CHUNK}, {"chunk_bytes": 0},
     {"num_threads": -1}, {"numa_node": -2}, {"numa_node": 1000}, {"assume_bytes": -1}],
    ids=str,
)  # fmt: skip
def test_bad_options_are_refused_by_name(options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        _core.cuda.HostMemory(**({"bytes": CHUNK, "chunk_bytes": CHUNK} | options))


def test_it_is_placed_near_the_gpu() -> None:
    if _core.memory_nodes() == 1:
        assert allocate(CHUNK).numa_node == -1
    try:
        assert allocate(CHUNK, numa_node=0).numa_node == 0
    except ValueError:
        pytest.skip("this sandbox does not let a process place its memory")
