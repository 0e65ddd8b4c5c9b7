"""`oasiskv bench soak`: a short one passes on the CPU, and each planted fault makes it fail with a message that names it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oasiskv.bench.soak_run import growth
from oasiskv.bench.soak_traffic import PHASES, Client, Limits, Request, Schedule, wrong
from oasiskv.cli.main import main
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


def test_a_short_soak_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "soak.jsonl"
    code = soak(12, json=out)
    told = capsys.readouterr().err
    assert code == 0, told
    *progress, end = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(progress) >= 5 and all(row["kind"] == "progress" and row["device_pages"] == 10 for row in progress)
    assert end["kind"] == "end" and end["failures"] == [] and end["closed"]
    assert end["preemptions"] > 0 and end["cancelled"] > 0 and end["sparse_steps"] > 0 and end["canaries"] > 2, end
    assert "soak passed" in told and "tok/s; RSS" in told and "of 10 device pages" in told


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
    assert leaked and "the engine still holds {'device_pages': " in told and "'decoding': 1" in told and "look at Engine._end" in told


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


def test_sizes_that_refuse_everything_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert soak(1, max_prompt=90) == 2
    assert "the largest request or the canary does not fit" in capsys.readouterr().err
    assert soak(1, canary_prompt=20) == 2
    assert "the canary never turns sparse" in capsys.readouterr().err


def test_growth_is_that_of_the_last_two_thirds() -> None:
    warm = [(float(t), 1000 if t >= 20 else 50 * t) for t in range(60)]
    assert growth(warm, 60) == 0
    assert growth([(t, size + 10 * t) for t, size in warm], 60) == pytest.approx(390)  # 39 s of it
    assert growth(warm[:2], 60) == 0


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
