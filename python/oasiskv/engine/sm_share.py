"""How a GPU's SMs are shared between the gather, which feeds the link, and the foreground's products.

One SM's gather moves about 21 GB/s alone, and far less while the foreground saturates the GPU's memory: the more of the link a step
needs, the more SMs its gather gets. What it has in flight beyond what fills the link waits in queues that all kernels share: a launch
with nothing to do takes 1.5 us alone, 2.4 beside 256 KiB in flight, 8.4 beside 768. Products are told how many SMs are left, so that they
choose tiles that fill no others.
"""

from __future__ import annotations

from dataclasses import dataclass

from oasiskv import _core


@dataclass(frozen=True)
class SmShare:
    """Of steps that may bring up to `link_mb` over the link."""

    link_mb: float
    gather_ctas: int
    foreground_sms: int  # 0: all
    in_flight: int = 8  # runs of 8 KiB a CTA: 2, 4, 6 or 8


# Measured by `oasiskv bench decode --backend cuda --sms ...` (benchmarks/results/sms_h200.jsonl): the fastest steps.
_TABLES = {"NVIDIA H200": [SmShare(400, 8, 124, in_flight=4), SmShare(float("inf"), 16, 116)]}


def sm_shares(gpu: str) -> list[SmShare]:
    """The table of the GPU of this name; for others, the H200's."""
    return _TABLES.get(gpu, _TABLES["NVIDIA H200"])


def gather_shares(shares: list[SmShare]) -> list[_core.GatherShare]:
    return [_core.GatherShare(int(min(s.link_mb, 1e12) * 1e6), s.gather_ctas, s.in_flight, s.foreground_sms) for s in shares]
