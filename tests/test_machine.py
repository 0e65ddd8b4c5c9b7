"""What the machine leaves this process, read from folders in /proc's and /sys's place."""

from __future__ import annotations

from pathlib import Path

import pytest

from oasiskv import _core
from oasiskv.config import EngineConfig
from oasiskv.engine import machine
from oasiskv.errors import ConfigError

GIB = 2**30
UNSET_V1 = 9223372036854771712
V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
V2 = "41 31 0:38 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


class Machine:
    """A root folder with the files that a rule reads; what is not written is not there."""

    def __init__(self, root: Path) -> None:
        self.root = str(root)
        self.write("proc/meminfo", f"MemTotal: {32 << 20} kB\nMemFree: 1 kB\nMemAvailable: {30 << 20} kB\n")

    def write(self, path: str, text: object) -> None:
        file = Path(self.root) / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")

    def v1(self, group: str, limit: int, usage: int, files: int = 0) -> None:
        folder = f"sys/fs/cgroup/memory/{group}"
        self.write(f"{folder}/memory.limit_in_bytes", limit)
        self.write(f"{folder}/memory.usage_in_bytes", usage)
        self.write(f"{folder}/memory.stat", f"inactive_file 1\nactive_file 1\ntotal_inactive_file {files}\ntotal_active_file {files}")

    def v2(self, group: str, limit: object, usage: int, files: int = 0, high: object = "max") -> None:
        folder = f"sys/fs/cgroup/{group}"
        self.write(f"{folder}/memory.max", limit)
        self.write(f"{folder}/memory.high", high)
        self.write(f"{folder}/memory.current", usage)
        self.write(f"{folder}/memory.stat", f"anon {usage}\ninactive_file {files}\nactive_file {files}")

    def left(self, assume: int = 0) -> _core.MemoryLeft:
        return _core.memory_left(assume, self.root)


@pytest.fixture
def fake(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_a_limit_memavailable_counts(fake: Machine) -> None:
    left = fake.left()
    assert left.bytes == 30 * GIB
    assert "MemAvailable is 30.0 GiB" in left.why and "host_memory_gib" in left.remedy and "online" not in left.why
    assert fake.left(128 * GIB).bytes == 126 * GIB  # 2 GiB are in use
    assert fake.left(1 * GIB).bytes == 0


def test_memory_that_is_online_but_not_counted_is_named(fake: Machine) -> None:
    fake.write("sys/devices/system/memory/block_size_bytes", "80000000")
    for block in range(16):
        fake.write(f"sys/devices/system/memory/memory{block}/online", 1)
    assert "online" not in fake.left().why  # 32 GiB, as MemTotal
    for block in range(16, 64):
        fake.write(f"sys/devices/system/memory/memory{block}/online", 1)
    fake.write("sys/devices/system/memory/memory64/online", 0)
    left = fake.left()
    assert left.bytes == 30 * GIB and "128.0 GiB are online" in left.why


@pytest.mark.parametrize("version", [1, 2])
def test_the_tightest_group_counts_less_what_it_holds(fake: Machine, version: int) -> None:
    fake.write("proc/self/mountinfo", V1 if version == 1 else V2)
    fake.write("proc/self/cgroup", "3:cpu:/\n2:hugetlb,memory:/a/b\n" if version == 1 else "0::/a/b\n")
    write, unset = (fake.v1, UNSET_V1) if version == 1 else (fake.v2, "max")
    write("a/b", unset, 3 * GIB)
    assert fake.left().bytes == 30 * GIB
    write("a", 128 * GIB, 5 * GIB, files=1 * GIB)  # above what the machine shows: its memory grows up to there
    left = fake.left()
    assert left.bytes == 125 * GIB
    assert "control group /a:" in left.why and "128.0 GiB, 3.0 GiB in use" in left.why and "raise the group's limit" in left.remedy
    write("a/b", 64 * GIB, 3 * GIB)
    assert fake.left().bytes == 61 * GIB and "/a/b" in fake.left().why
    write("a/b/c", 1 * GIB, 0)  # not ours
    write("", 50 * GIB, 6 * GIB)
    assert fake.left().bytes == 44 * GIB and "control group /:" in fake.left().why
    assert fake.left(40 * GIB).bytes == 38 * GIB  # the caller's word lowers a limit,
    assert fake.left(400 * GIB).bytes == 44 * GIB  # and does not lift one
    write("a/b", 2 * GIB, 3 * GIB)
    assert fake.left().bytes == 0


def test_memory_high_is_a_limit(fake: Machine) -> None:
    fake.write("proc/self/mountinfo", V2)
    fake.write("proc/self/cgroup", "0::/job")
    fake.v2("job", 100 * GIB, 4 * GIB, high=20 * GIB)
    assert fake.left().bytes == 16 * GIB and "memory.high" in fake.left().why


def test_both_versions_at_once(fake: Machine) -> None:
    fake.write("proc/self/mountinfo", V1 + V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "))
    fake.write("proc/self/cgroup", "4:memory:/x\n0::/\n")
    fake.v1("x", 10 * GIB, 1 * GIB)
    assert fake.left().bytes == 9 * GIB


@pytest.mark.parametrize(
    ("mounted", "path", "group"),
    [
        ("/docker/1f", "/docker/1f", ""),  # a container that sees its own group as the root
        ("/docker/1f", "/docker/1f/job", "job"),
        ("/docker/1f", "/docker/1ff", ""),  # elsewhere: the mount is all there is to see
        ("/", "/../other", ""),  # outside of this namespace
        ("/", "/gone", ""),  # not to be seen from here
    ],
)
def test_groups_as_containers_see_them(fake: Machine, mounted: str, path: str, group: str) -> None:
    fake.write("proc/self/mountinfo", V1.replace("0:32 /", f"0:32 {mounted}", 1))
    fake.write("proc/self/cgroup", f"4:memory:{path}")
    fake.v1(group, 7 * GIB, 1 * GIB)
    assert fake.left().bytes == 6 * GIB


def test_nothing_known_leaves_nothing(tmp_path: Path) -> None:
    left = _core.memory_left(0, str(tmp_path))
    assert left.bytes == 0 and "host_memory_gib" in left.remedy
    assert _core.memory_left(8 * GIB, str(tmp_path)).bytes == 8 * GIB


def test_this_machine_leaves_something() -> None:
    assert 0 < machine.memory_left().bytes < 2**60
    assert 1 <= machine.usable_cpus() <= 4096


def test_a_quota_of_cores_counts(fake: Machine) -> None:
    cores = _core.usable_cpus(fake.root)
    fake.write("proc/self/mountinfo", V2)
    fake.write("proc/self/cgroup", "0::/a/b")
    for quota, expected in (
        ("max 100000", cores),
        ("150000 100000", 1),
        ("50000 100000", 1),
        (f"{cores}00000 100000", cores),
        ("x", cores),
    ):
        fake.write("sys/fs/cgroup/a/cpu.max", quota)
        assert _core.usable_cpus(fake.root) == expected, quota
    fake.write("proc/self/mountinfo", "33 31 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpuacct,cpu\n")
    fake.write("proc/self/cgroup", "1:cpuacct,cpu:/a")
    fake.write("sys/fs/cgroup/cpu/a/cpu.cfs_period_us", 100000)
    for quota, expected in ((-1, cores), (100000, 1)):
        fake.write("sys/fs/cgroup/cpu/a/cpu.cfs_quota_us", quota)
        assert _core.usable_cpus(fake.root) == expected


def test_memory_nodes_and_the_devices_node(fake: Machine) -> None:
    assert _core.memory_nodes(fake.root) == 1
    for text, nodes in (("0", 1), ("0-1", 2), ("0,2-4,7", 5), ("", 1)):
        fake.write("sys/devices/system/node/has_memory", text)
        assert _core.memory_nodes(fake.root) == nodes
    assert _core.node_of_pci_device("0000:1B:00.0", fake.root) == -1
    for node in (-1, 3):
        fake.write("sys/bus/pci/devices/0000:1b:00.0/numa_node", node)
        assert _core.node_of_pci_device("0000:1B:00.0", fake.root) == node


def test_the_limit_of_locked_memory_is_named_where_it_binds(fake: Machine) -> None:
    limits = "Limit                     Soft Limit           Hard Limit           Units\nMax locked memory         {0} {0} bytes"
    fake.write("proc/self/limits", limits.format(8 << 20))
    fake.write("proc/self/status", "Name:\tx\nCapEff:\t0000000000000000")
    assert "8192 KiB" in _core.locked_memory_note(GIB, fake.root)
    assert _core.locked_memory_note(8 << 20, fake.root) == ""
    fake.write("proc/self/status", "Name:\tx\nCapEff:\t0000000000004000")  # CAP_IPC_LOCK
    assert _core.locked_memory_note(GIB, fake.root) == ""
    fake.write("proc/self/status", "CapEff:\t0000000000000000")
    fake.write("proc/self/limits", limits.format("unlimited"))
    assert _core.locked_memory_note(GIB, fake.root) == ""


def test_pools_are_held_against_the_same_rule(fake: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    memory_left = _core.memory_left
    monkeypatch.setattr(machine._core, "memory_left", lambda assume: memory_left(assume, fake.root))
    core = _core.CoreConfig()
    core.num_layers = core.num_kv_heads = core.num_q_heads = 1
    core.head_dim, core.sparse_enabled = 64, False
    core.device_pages, core.host_blocks = GIB // core.page_bytes, 31 * GIB // core.page_bytes
    with pytest.raises(
        ConfigError, match=r"host_kv_gib = 31: .*32\.0 GiB; this machine has 30\.0 GiB left .*MemAvailable.*host_memory_gib"
    ):
        machine.check_pools_fit(EngineConfig(device_kv_gib=1, host_kv_gib=31), core)
    machine.check_pools_fit(EngineConfig(device_kv_gib=1, host_kv_gib=31, host_memory_gib=64), core)
