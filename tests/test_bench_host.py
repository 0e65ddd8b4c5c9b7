"""`oasiskv bench host` as far as it needs no GPU: how much it takes, which places it checks, what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oasiskv import _core
from oasiskv.bench import host
from oasiskv.cli.main import main
from oasiskv.errors import ConfigError


class Left:
    why = "a test"

    def __init__(self, gib: float) -> None:
        self.bytes = int(gib * host.GIB)


def test_all_leaves_the_margin(monkeypatch: pytest.MonkeyPatch) -> None:
    for left, expected in ((126, 126 * 15 / 16), (64, 60), (16, 12)):
        monkeypatch.setattr(host, "memory_left", lambda _, left=left: Left(left))
        assert host.size_bytes("all", None) == int(expected * host.GIB)
    monkeypatch.setattr(host, "memory_left", lambda _: Left(4))
    with pytest.raises(ConfigError, match=r"4\.0 GiB left \(a test\)"):
        host.size_bytes("all", None)


def test_a_size_is_a_number_of_gib() -> None:
    assert host.size_bytes("0.5", None) == host.GIB // 2
    for text in ("many", "0", "-1", "nan", "inf", ""):
        with pytest.raises(ConfigError, match="--gib"):
            host.size_bytes(text, None)


@pytest.mark.parametrize(("size_mib", "chunk_mib"), [(64, 8), (65, 64), (7, 2), (16, 64), (1, 2)])
def test_places_keep_apart_and_copies_stay_within_a_registration(size_mib: int, chunk_mib: int) -> None:
    size, chunk = size_mib << 20, chunk_mib << 20
    for seed in range(20):
        inside, anywhere = host.places(size, chunk, 32, np.random.default_rng(seed))
        assert set(inside) <= set(anywhere) and len(anywhere) > 0
        ends = np.sort(anywhere)
        assert (ends[1:] - ends[:-1] >= host.PLACE).all() and ends[0] >= 0 and ends[-1] + host.PLACE <= size
        assert (inside // chunk == (inside + host.PLACE - 1) // chunk).all()
        assert size - host.PLACE <= chunk or any(p // chunk != (p + host.PLACE - 1) // chunk for p in anywhere)


def test_filling_takes_time_and_needs_a_size() -> None:
    assert _core.fill_seconds(3 << 20, 2) > 0
    for size, threads in ((0, 1), (1, 0)):
        with pytest.raises(ValueError, match="fill_seconds"):
            _core.fill_seconds(size, threads)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "host", "--gib", "1"]) == 2
    assert "backend = 'cuda'" in capsys.readouterr().err
