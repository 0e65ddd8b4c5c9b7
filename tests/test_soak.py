"""`oasiskv bench soak`: a short one passes on the CPU, and each planted fault makes it fail with a message that names it."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from oasiskv.bench import soak_ledger, soak_run
from oasiskv.bench.report import MIB
from oasiskv.bench.soak_canary import Canary
from oasiskv.bench.soak_clients import Clients
from oasiskv.bench.soak_ledger import Ledger
from oasiskv.bench.soak_memory import Memory, growth
from oasiskv.bench.soak_report import Report
from oasiskv.bench.soak_traffic import PHASES, Client, Limits, Request, Schedule, wrong
from oasiskv.cli.main import main
from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.llm import LLM, GenerationResult
from oasiskv.engine.loop import EngineLoop
from oasiskv.engine.sampling import SamplingParams

# Ten device pages, short requests: seconds are enough for preemptions, and a canary that is sparse.
SMALL = {
    "rate": 3, "in-flight": 12, "max-prompt": 40, "max-output": 48, "canary-prompt": 60, "canary-output": 12, "canary-every-s": 1,
    "top-k-blocks": 2, "sparse-from": 40, "max-batch-size": 8, "max-seq-len": 96, "device-kv-gib": 0.0075, "host-kv-gib": 0.05,
    "every-s": 2,
}  # fmt: skip
STATS: dict[str, Any] = {"stats": {"generated_tokens": 1}}


def soak(seconds: float, **changes: object) -> int:
    options = SMALL | {name.replace("_", "-"): value for name, value in changes.items()}
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return main(["bench", "soak", "--minutes", str(seconds / 60), *flags])


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_short_soak_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.jsonl"
    code = soak(12, json=out, seed=2)
    told = capsys.readouterr().err
    assert code == 0, told
    begin, *progress, end = rows(out)
    assert begin["kind"] == "begin" and begin["seed"] == 2 and begin["max_prompt"] == 40
    assert len(progress) >= 5 and all(row["kind"] == "progress" and row["device_pages"] == 10 for row in progress)
    assert end["kind"] == "end" and end["passed"] and end["exit_code"] == 0 and end["failures"] == [] and end["closed"]
    assert end["preemptions"] > 0 and end["cancelled"] > 0 and end["sparse_steps"] > 0 and end["canaries"] > 2, end
    assert end["canary_mismatches"] == 0 and 0 < end["preempted"] <= end["preemptions"] and end["in_flight"] == 0
    assert end["held_start"] == end["held_end"] == {"device_pages": 0, "host_blocks": 0, "summary_pages": 0}
    assert all(end[f"rss_{when}_bytes"] > 100 * MIB for when in ("start", "middle", "end"))
    assert "with seed 2" in told and "tok/s; rss" in told and "of 10 device pages" in told and "soak passed: seed 2" in told


def test_all_sizes_of_steps_come_before_the_traffic(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    met: set[tuple[int, bool]] = set()  # requests that decode, and whether the first of them is sparse
    step, restart = Engine.step, Memory.restart

    def noted(engine: Engine) -> list:
        outputs = step(engine)
        running = engine.request_ids()
        met.add((engine.usage()["decoding"], bool(running) and engine.stats(running[0])["sparse_steps"] > 0))
        return outputs

    def stop_noting(memory: Memory) -> None:
        monkeypatch.setattr(Engine, "step", step)
        restart(memory)

    monkeypatch.setattr(soak_run, "captures", lambda config: True)
    monkeypatch.setattr(soak_ledger, "LEAST", {"cpu": {}})
    monkeypatch.setattr(Engine, "step", noted)
    monkeypatch.setattr(Memory, "restart", stop_noting)
    assert soak(1, device_kv_gib=0.05, growth_mib=1000, json=tmp_path / "soak.jsonl") == 0
    assert met >= {(n, sparse) for n in range(1, 9) for sparse in (False, True)}


def test_an_engine_that_hangs_before_the_traffic_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    step, close, release = Engine.step, soak_run.Soak._close, threading.Event()

    def hangs(engine: Engine) -> list:
        if engine.usage()["decoding"] > 1:  # more than the canary: sizes are met
            release.wait(60)
        return step(engine)

    monkeypatch.setattr(soak_run, "captures", lambda config: True)
    monkeypatch.setattr(soak_run.Soak, "_close", lambda self: release.set() or close(self))
    monkeypatch.setattr(Engine, "step", hangs)
    assert soak(1, stall_s=2) == 1
    told = capsys.readouterr().err
    assert "no client waits, and the engine's thread has been in its step for 2." in told and "in hangs" in told


def test_what_does_not_end_in_time_is_cancelled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(soak_run, "DRAIN_S", 0.0)
    monkeypatch.setattr(soak_ledger, "LEAST", {"cpu": {}})
    out = tmp_path / "soak.jsonl"
    assert soak(4, rate=8, json=out) == 0, capsys.readouterr().err
    end = rows(out)[-1]
    assert end["given_up"] > 2 and end["in_flight"] == 0 and end["seconds"] < 4 + 10


def test_sigterm_ends_it_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = Clients.start

    def start_and_be_killed(self: Clients) -> None:
        start(self)
        threading.Timer(2.0, os.kill, (os.getpid(), signal.SIGTERM)).start()

    monkeypatch.setattr(Clients, "start", start_and_be_killed)
    before, out = signal.getsignal(signal.SIGTERM), tmp_path / "soak.jsonl"
    assert soak(60, json=out) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    (failure,) = [row for row in rows(out) if row["kind"] == "failure"]
    end = rows(out)[-1]
    assert failure["what"].startswith("SIGTERM came 2 s into the run")
    assert end["kind"] == "end" and not end["passed"] and end["failures"] == [failure["what"]] and end["closed"]
    assert "soak FAILED" in capsys.readouterr().err


def test_a_canary_that_differs_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    generate, calls = LLM.generate, []

    def lies(self: LLM, *args: Any) -> list[GenerationResult]:
        results = generate(self, *args)
        calls.append(results)
        if len(calls) > 2:
            results[0].token_ids[7] += 1
        return results

    monkeypatch.setattr(LLM, "generate", lies)
    assert soak(60, rate=0.5) == 1
    assert "soak failed: the canary answered otherwise from token 7 on" in capsys.readouterr().err
    assert len(calls) == 3  # the first difference ends it


def test_a_request_that_is_not_given_back_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    end, leaked = Engine._end, []

    def leaks(self: Engine, sequence: Any, step: int = 0) -> dict[str, Any]:
        small = sequence.prompt_tokens + sequence.generated < 32
        if leaked or sequence.finish_reason != "length" or not small:
            return end(self, sequence, step)
        leaked.append(sequence.id)
        del self._sequences[sequence.id]
        return self._stats(sequence, step)

    monkeypatch.setattr(Engine, "_end", leaks)
    assert soak(4, rate=1) == 1
    told = capsys.readouterr().err
    assert leaked and "the engine holds {'device_pages': " in told and "'decoding': 1" in told and "look at Engine._end" in told


def test_a_request_that_gets_no_output_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    deliver = EngineLoop._deliver

    def loses(self: EngineLoop, output: Any) -> None:
        if output is None or output.request_id != 3:
            deliver(self, output)
        elif output.finished:
            self._listeners.pop(3)

    monkeypatch.setattr(EngineLoop, "_deliver", loses)
    assert soak(60, stall_s=10, rate=0.5) == 1
    told = capsys.readouterr().err
    assert "has had no output for 10 s (--stall-s 10)" in told and "The engine's thread has been in its step for" in told
    assert "loop.py" in told  # the stack of the engine's thread


def test_a_soak_that_saw_too_little_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(1, rate=0.01) == 1
    told = capsys.readouterr().err
    assert "only 0 preemptions" in told and "only 0 done" in told and "this run has tested too little" in told


def test_sizes_that_refuse_everything_are_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.jsonl"
    assert soak(1, max_prompt=90, json=out) == 2
    assert [row["kind"] for row in rows(out)] == ["begin", "end"] and "does not fit" in rows(out)[-1]["failures"][0]
    assert "the largest request or the canary does not fit" in capsys.readouterr().err
    assert soak(1, canary_prompt=20) == 2
    assert "the canary never turns sparse" in capsys.readouterr().err


def test_growth_is_that_of_the_last_two_thirds() -> None:
    warm = [(float(t), 1000 if t >= 20 else 50 * t) for t in range(60)]
    assert growth(warm, 60) == 0
    assert growth([(t, size + 10 * t) for t, size in warm], 60) == pytest.approx(390)  # 39 s of it
    assert growth(warm[:2], 60) == 0


def test_what_grows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds, gpu, pinned = iter(range(1000)), iter(range(10, 10_000, 10)), {"allocated_bytes.current": 3 * MIB}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1000 * MIB - next(gpu) * MIB, 1000 * MIB))
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: pinned)
    monkeypatch.setattr(time, "monotonic", lambda: next(seconds))
    memory = Memory(EngineConfig(backend="cuda", dtype="float32", host_kv_gib=1))
    memory.restart()
    for _ in range(30):
        memory.sample()
    (leak,) = memory.leaks(30, 64)
    assert leak.startswith("gpu still grew by 200 MiB") and "torch.cuda.memory_summary()" in leak
    row = memory.row(30)
    assert [row[f"gpu_{when}_bytes"] // MIB for when in ("start", "middle", "end")] == [10, 160, 310]
    assert row["pinned_end_bytes"] == 1027 * MIB and row["pinned_growth_bytes"] == 0

    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "mem_get_info", lost)
    assert list(memory.now()) == ["rss"]


def test_where_results_depend_on_the_batch_a_canary_that_differs_is_counted() -> None:
    answers = iter([[1, 2, 3], [1, 2, 3], [1, 2, 4]])

    class Answers:
        def generate(self, *_: Any) -> list[GenerationResult]:
            return [GenerationResult(token_ids=next(answers), finish_reason="length", stats={"preemptions": 1})]

    ledger, report = Ledger(), Report(None)
    canary = Canary(Request([1], SamplingParams(max_tokens=3, ignore_eos=True)), False, Answers(), ledger, report)  # type: ignore[arg-type]
    for _ in range(3):
        canary.ask()
    counts = ledger.counts()
    assert (counts["canaries"], counts["canary_mismatches"], counts["canary_preemptions"]) == (3, 1, 3)
    assert not report.failures and not ledger.in_flight()


def test_failures_are_told_at_once_and_not_after_the_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(str(tmp_path / "soak.jsonl"))
    for i in range(20):
        report.fail(f"fault {i}")
    assert report.stop.is_set() and len(report.failures) == len(rows(tmp_path / "soak.jsonl")) == 8
    assert "soak failed: fault 0" in capsys.readouterr().err
    report = Report(None)
    report.close()
    report.fail("what closing cancels")
    assert report.failures == [] and capsys.readouterr().err == ""


def test_traffic_is_the_same_for_the_same_seed() -> None:
    limits = Limits(max_prompt=100, max_output=50, max_seq_len=200, vocab_size=500, cancel_within_s=5.0)
    text = [i % 500 for i in range(5000)]

    def draw(seed: int, host_sampling: bool = True) -> list[Request]:
        client = Client(seed, "a", text, limits)
        return [r for _ in range(600) for r in client.arrivals(host_sampling)]

    requests = draw(1)
    assert requests == draw(1) != draw(2)
    assert [r.prompt_ids for r in requests] == [r.prompt_ids for r in draw(1, host_sampling=False)]
    assert not any(r.params.sampled_on_host for r in draw(1, host_sampling=False))
    served = [r for r in requests if not r.refused]
    assert all(1 <= len(r.prompt_ids) <= 100 and 1 <= r.params.max_tokens <= 50 for r in served)
    for wanted in (
        any(r.params.sampled_on_host for r in served),
        any(r.params.logprobs is not None for r in served),
        any(r.params.temperature and r.params.top_p < 1 for r in served),
        any(r.params.stop_token_ids for r in served),
        any(r.cancel_after_s == (0.0, 0.0) for r in served),
        any(r.cancel_after_outputs for r in served),
        any(r.refused for r in requests),
    ):
        assert wanted
    schedule = Schedule(3, 300)
    assert schedule.at(0) == PHASES[0]
    assert {schedule.at(s).name for s in range(300)} == {p.name for p in PHASES}
    assert [schedule.at(s) for s in range(400)] == [Schedule(3, 300).at(s) for s in range(400)]


@pytest.mark.parametrize(
    ("options", "result", "why"),
    [
        ({}, {"finish_reason": "error", "error": "boom"}, "'boom'"),
        ({}, {"finish_reason": "lost"}, "'lost'"),
        ({}, {"finish_reason": "cancelled"}, "nobody had asked"),
        ({}, {"finish_reason": "length", "token_ids": [1, 2]}, "2 tokens of 3"),
        ({}, {"finish_reason": "stop", "token_ids": [1, 2, 3, 4]}, "4 tokens of 3"),
        ({"stop_token_ids": (7,)}, {"finish_reason": "stop", "token_ids": [1]}, "not one of its stop tokens"),
        ({"stop_token_ids": (7,)}, {"finish_reason": "length", "token_ids": [1, 7, 1]}, "after its stop token 7"),
        ({"ignore_eos": True}, {"finish_reason": "stop", "token_ids": [0]}, "not one of its stop tokens"),
        ({"logprobs": 1}, {"finish_reason": "length", "token_ids": [1, 2, 3]}, "0 logprobs for 3"),
        ({}, {"finish_reason": "length", "token_ids": [1, 2, 3], "stats": {}}, "without statistics"),
        ({}, {"finish_reason": "stop", "token_ids": [0]}, None),
        ({}, {"finish_reason": "length", "token_ids": [1, 2, 3]}, None),
        ({"stop": ("x",)}, {"finish_reason": "stop", "token_ids": [5]}, None),
    ],
)
def test_wrong_answers_are_seen(options: dict[str, Any], result: dict[str, Any], why: str | None) -> None:
    request = Request([1, 2], SamplingParams(max_tokens=3, **options))
    found = wrong(request, GenerationResult(**STATS | result), frozenset({0}))
    assert found is None if why is None else why in (found or "")
