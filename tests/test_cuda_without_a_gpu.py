"""What of the CUDA backend is decided without a GPU: refusals at start, sizes of pools, the share of SMs, models without text."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from oasiskv import _core
from oasiskv.bench import decode_cuda
from oasiskv.config import EngineConfig
from oasiskv.engine import cuda_runner
from oasiskv.engine.core_config import core_config
from oasiskv.engine.engine import Engine
from oasiskv.engine.loaded import NoTokenizer, load_model
from oasiskv.engine.sm_share import SmShare, gather_shares, sm_shares
from oasiskv.errors import ConfigError
from oasiskv.models.presets import PRESETS
from oasiskv.tokenizer import IncrementalDetokenizer

CUDA = {"backend": "cuda", "dtype": "bfloat16"}


def test_a_build_without_cuda_says_how_to_get_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "_cuda", None)
    with pytest.raises(ConfigError, match=r"build\.py setup --cuda"):
        Engine(EngineConfig(**CUDA))


def test_a_machine_without_a_gpu_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_runner, "_cuda", object())
    monkeypatch.setattr(cuda_runner.torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="finds no GPU"):
        Engine(EngineConfig(**CUDA))


def test_dummy_weights_are_for_presets() -> None:
    with pytest.raises(ConfigError, match="qwen3-8b"):
        load_model(EngineConfig(model="smollm2-135m", dummy_weights=True, **CUDA))


def test_device_kv_gib_holds_pages_and_summaries() -> None:
    model = PRESETS["qwen3-8b"]
    config = EngineConfig(model="qwen3-8b", dummy_weights=True, device_kv_gib=56, host_kv_gib=100, max_batch_size=46, **CUDA)
    c = core_config(config, model)
    assert c.page_bytes == 8 * 2 * 16 * 128 * 2
    pages = c.device_pages * c.page_bytes * c.num_layers
    assert 0 <= 56 * 2**30 - pages - c.summary_bytes < c.page_bytes * c.num_layers
    # One summary a block of every layer that the host tier can hold, two vectors each, and a page more a request.
    blocks = c.host_blocks // c.num_layers
    assert blocks * 36 * 8 * 2 * 128 * 2 <= c.summary_bytes <= (blocks + 64 * 47) * 36 * 8 * 2 * 128 * 2


def test_no_host_tier_is_for_dense() -> None:
    c = core_config(EngineConfig(dense=True, host_kv_gib=0, enable_prefix_caching=False, **CUDA), PRESETS["qwen3-8b"])
    assert c.host_blocks == 0 and c.summary_bytes == 0


def test_the_more_of_the_link_the_more_sms() -> None:
    shares = sm_shares("NVIDIA H200")
    assert [s.link_mb for s in shares] == sorted(s.link_mb for s in shares) and shares[-1].link_mb == float("inf")
    assert [s.gather_ctas for s in shares] == sorted({s.gather_ctas for s in shares})
    assert all(s.foreground_sms + s.gather_ctas <= 132 for s in shares)
    assert sm_shares("a GPU of another name") == shares


def test_shares_reach_the_core_in_bytes() -> None:
    small, rest = gather_shares([SmShare(1.5, 2, 0), SmShare(float("inf"), 8, 0)])
    assert (small.link_bytes, small.ctas) == (1_500_000, 2)
    assert rest.link_bytes > 10**15 and rest.ctas == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backend", "tpu"),
        ("dtype", "int4"),
        ("head_dim", 80),
        ("gather_shares", []),
        ("gather_shares", [_core.GatherShare(1, 65)]),
        ("gather_shares", [_core.GatherShare(1, 4, 5)]),
    ],
)
def test_the_core_refuses_by_name(field: str, value: object) -> None:
    c = core_config(EngineConfig(device_kv_gib=4, host_kv_gib=4, **CUDA), PRESETS["qwen3-8b"])
    c.gather_shares = [_core.GatherShare(1 << 62, 4)]
    setattr(c, field, value)
    with pytest.raises(ValueError, match=field):
        _core.Core(c, 0, 0)


def test_a_model_without_text_yields_ids() -> None:
    tokenizer = NoTokenizer(1000)
    text = IncrementalDetokenizer(tokenizer)
    assert text.push(999) == "" and text.complete and text.flush() == ""
    with pytest.raises(ConfigError, match="give token ids"):
        tokenizer.encode("hello")


@pytest.mark.parametrize("mode", ["both", "", "dense,dense", "dense,oasis,sparse"])
def test_a_benchmark_knows_two_arms(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode_cuda.main(["--mode", mode])
    assert "give dense, oasis or dense,oasis" in capsys.readouterr().err


def test_a_benchmark_fills_each_arm_once_a_concurrency_and_profiles_last(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    shared: list[int] = []  # gather CTAs

    def arm(name: str) -> object:
        runner = SimpleNamespace(
            sms_in_use=lambda: (8, 124, 4) if name == "oasis" else (0, 0, 0),
            share_sms=lambda shares: shared.append(shares[0].gather_ctas),
        )
        engine = SimpleNamespace(config=SimpleNamespace(dense=name == "dense", host_kv_gib=1), runner=runner)
        times = {"tpot_ms": 2.0, "tpot_mean_ms": 2.0, "tpot_p99_ms": 2.0, "link_mb_step": 1.0, "stall_ms_step": 0.0, "host_ms_step": 0.0}

        def fill(requests: int, context: int, output: int) -> dict[str, float]:
            calls.append((name, "fill", requests))
            return {"running": requests, "prefill_s": 0.1}

        def measure(steps: int) -> dict[str, float]:
            calls.append((name, steps))
            return {**times, "turn_ms": 0.1, "turn_p99_ms": 0.1}

        def foreground_ms(steps: int) -> float:
            calls.append((name, "profiled"))
            return 1.5

        return SimpleNamespace(name=name, engine=engine, fill=fill, measure=measure, foreground_ms=foreground_ms, empty=lambda: None)

    monkeypatch.setattr(decode_cuda, "require_cuda", lambda: None)
    monkeypatch.setattr(decode_cuda, "measured_rates", lambda: {"hbm_gb_s": 1.0, "link_gb_s": 1.0})
    monkeypatch.setattr(decode_cuda, "_floors", lambda *_: {"hbm_floor_ms": 1.0, "link_floor_ms": 1.6})
    monkeypatch.setattr(decode_cuda, "_make_arms", lambda args: [arm(mode) for mode in args.mode])
    written: dict[str, list[dict]] = {"rows": [], "slow": []}
    monkeypatch.setattr(decode_cuda, "append_row", lambda file, row: written[file].append(row))
    shares = ["8:124:4", "16:116:6"]
    decode_cuda.main([*["--concurrency", "1", "2", "--output", "3", "--json", "rows", "--slow-down", "slow", "--sms"], *shares])

    def turn(requests: int, *what: object) -> list[object]:
        return [
            ("dense", "fill", requests),
            *([("dense", 3)] if 3 in what else []),
            ("oasis", "fill", requests),
            *[("oasis", w) for w in what],
        ]

    assert calls == [*turn(1, 3, 3), *turn(2, 3, 3), *turn(1, *["profiled"] * 4), *turn(2, *["profiled"] * 4)]
    assert shared == [8, 16] * 2 + [8, 0, 8, 16, 0, 16] * 2, "the share that is measured is back before the next profile"
    assert [(r["mode"], r["sms"], r["running"]) for r in written["rows"]] == [
        row for n in (1, 2) for row in [("dense", "table", n), *[("oasis", share, n) for share in shares]]
    ]
    assert [(r["sms"], r["running"], r["slow_down"], r["over_bound"]) for r in written["slow"]] == [
        (share, n, 1.0, 1.25) for n in (1, 2) for share in shares
    ]
