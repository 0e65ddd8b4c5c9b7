"""Cancel, stop, error and preemption at random times over small pools: every request ends once, nothing leaks, nothing hangs."""

from __future__ import annotations

import random
import threading
from collections import Counter

import pytest

from oasiskv.config import EngineConfig
from oasiskv.engine.loop import EngineLoop
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import CapacityError, EngineError

SMALL = {"top_k_blocks": 4, "sparse_from": 144, "device_kv_gib": 0.018, "host_kv_gib": 0.1, "max_batch_size": 8, "max_seq_len": 256}


def wait_until_baseline(loop: EngineLoop) -> dict:
    """Usage once all requests are gone; a short one flushes what the background still held."""
    done = threading.Event()
    loop.submit([1], SamplingParams(max_tokens=1), lambda o: done.set() if o.finished else None)
    assert done.wait(60)
    loop.close()
    return loop.usage()


def assert_baseline(usage: dict) -> None:
    for pool in ("device_pages", "host_blocks", "summary_pages"):
        assert usage[f"{pool}_free"] == usage[pool], usage
    assert usage["waiting"] == usage["prefilling"] == usage["decoding"] == usage["preempted"] == 0


def test_random_endings_over_small_pools(prose_ids: list[int]) -> None:
    rng = random.Random(5)
    loop = EngineLoop(EngineConfig(**SMALL | {"top_k_blocks": 2, "sparse_from": 48, "device_kv_gib": 0.0075}))
    ends: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    preemptions = 0
    room = threading.Semaphore(24)
    total = 500

    def on_output(output: RequestOutput) -> None:
        nonlocal preemptions
        if rng.random() < 0.03 and not output.finished:
            raise RuntimeError("a client's callback fails")  # the loop must cancel this request and go on
        if not output.finished:
            if rng.random() < 0.05:
                loop.cancel(output.request_id)
            return
        ends[output.request_id] += 1
        reasons[output.finish_reason] += 1
        preemptions += output.stats["preemptions"]
        room.release()

    failed_callbacks: list[int] = []

    def guarded(output: RequestOutput) -> None:
        try:
            on_output(output)
        except RuntimeError:
            failed_callbacks.append(output.request_id)
            room.release()
            raise

    submitted = []
    for i in range(total):
        assert room.acquire(timeout=120), "hang"
        start, length = rng.randrange(50_000), rng.randrange(1, 60)
        params = SamplingParams(
            max_tokens=rng.randrange(1, 24), temperature=rng.choice([0.0, 1.0]), seed=i, stop=("the",) if i % 7 == 0 else ()
        )
        submitted.append(loop.submit(prose_ids[start : start + length], params, guarded))
        if rng.random() < 0.1:
            loop.cancel(rng.choice(submitted))
    for _ in range(24):
        assert room.acquire(timeout=120), "hang"
    grown = [ask(loop, prose_ids[i * 50 : i * 50 + 8], 60) for i in range(6)]  # together they grow to twice the pool
    for outputs, done in grown:
        assert done.wait(120), "hang"
        preemptions += outputs[-1].stats["preemptions"]
    usage = wait_until_baseline(loop)
    assert set(ends.values()) <= {1}
    assert len(ends) + len(failed_callbacks) == total
    assert reasons["cancelled"] > 0 and reasons["length"] > 0 and reasons["stop"] > 0, reasons
    assert preemptions > 0
    assert_baseline(usage)


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(prose_ids: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(EngineConfig(**SMALL))
    outputs: list[RequestOutput] = []
    first, done = threading.Event(), threading.Event()

    def on_output(output: RequestOutput) -> None:
        outputs.append(output)
        first.set()
        if output.finished:
            done.set()

    model = loop._engine._runner._model
    forward = model.forward
    loop.submit(prose_ids[:100], SamplingParams(max_tokens=100, ignore_eos=True), on_output)
    assert first.wait(60)

    def fails_half_way(tokens, attend, rows):
        def attend_some(layer, qkv):
            if layer == 7:
                raise RuntimeError("injected")
            return attend(layer, qkv)

        return forward(tokens, attend_some, rows)

    monkeypatch.setattr(model, "forward", fails_half_way)
    assert done.wait(60)
    assert outputs[-1].finish_reason == "error" and "injected" in outputs[-1].error
    monkeypatch.setattr(model, "forward", forward)
    assert_baseline(wait_until_baseline(loop))


def ask(loop: EngineLoop, prompt: list[int], tokens: int) -> tuple[list[RequestOutput], threading.Event]:
    outputs: list[RequestOutput] = []
    done = threading.Event()

    def on_output(output: RequestOutput) -> None:
        outputs.append(output)
        if output.finished:
            done.set()

    loop.submit(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), on_output)
    return outputs, done


def test_a_failing_sampler_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The step has computed and is not committed: the core must forget it all the same."""
    loop = EngineLoop(EngineConfig(**SMALL))
    with monkeypatch.context() as patch:
        patch.setattr(loop._engine._sampler, "sample", lambda logits, rows: 1 / 0)
        outputs, done = ask(loop, [1, 2, 3], 4)
        assert done.wait(60)
    assert outputs[-1].finish_reason == "error" and "ZeroDivisionError" in outputs[-1].error
    outputs, done = ask(loop, [1, 2, 3], 4)
    assert done.wait(60) and outputs[-1].finish_reason == "length"
    assert_baseline(wait_until_baseline(loop))


def test_a_failing_drafter_only_loses_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(EngineConfig(**SMALL | {"draft_len": 2, "accept_drafts": True}))
    expected, done = ask(loop, [5, 6, 7] * 10, 12)
    assert done.wait(60) and expected[-1].stats["draft_tokens"] > 0
    monkeypatch.setattr(loop._engine._drafter, "propose", lambda requests: 1 / 0)
    outputs, done = ask(loop, [5, 6, 7] * 10, 12)
    assert done.wait(60) and outputs[-1].stats["draft_tokens"] == 0
    assert [t for o in outputs for t in o.token_ids] == [t for o in expected for t in o.token_ids]
    loop.close()


def test_a_step_that_breaks_at_a_draft_row_keeps_the_tokens_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = EngineLoop(EngineConfig(**SMALL | {"draft_len": 3, "accept_drafts": True}))
    repeated = loop.tokenizer.encode("red green blue " * 12)
    expected, done = ask(loop, repeated, 12)
    assert done.wait(60) and expected[-1].stats["draft_accepted"] > 0
    forward = loop._engine._runner._model.forward

    def second_row_is_nan(tokens, attend, rows):
        logits = forward(tokens, attend, rows)
        logits[1:] = float("nan")
        return logits

    monkeypatch.setattr(loop._engine._runner._model, "forward", second_row_is_nan)
    outputs, done = ask(loop, repeated, 12)
    assert done.wait(60) and outputs[-1].finish_reason == "error" and "not finite" in outputs[-1].error
    got = [t for o in outputs for t in o.token_ids]
    assert len(got) == outputs[-1].stats["generated_tokens"] > 0
    assert got == [t for o in expected for t in o.token_ids][: len(got)]
    assert_baseline(wait_until_baseline(loop))


@pytest.mark.parametrize("also", [None, "_stats", "stop"])
def test_a_broken_background_ends_everything_that_was_asked(monkeypatch: pytest.MonkeyPatch, also: str | None) -> None:
    """The engine is lost: what runs, what is queued and what a queued call trips over all end, and later requests are refused."""
    loop = EngineLoop(EngineConfig(**SMALL))
    entered, release = threading.Event(), threading.Event()

    def fails(*_: object) -> None:
        entered.set()
        release.wait(60)
        raise RuntimeError("injected")

    def lost(*_: object) -> None:
        raise EngineError("the background pipeline failed: injected")

    monkeypatch.setattr(loop._engine, "step", fails)
    monkeypatch.setattr(loop._engine, "drain", lost)
    if also:
        monkeypatch.setattr(loop._engine, also, lost)
    running, over = ask(loop, [1, 2, 3], 4)
    assert entered.wait(60)
    loop._inbox.put(lambda: 1 / 0)
    queued = [ask(loop, [1, 2, 3], 4) for _ in range(3)]
    assert loop.quiet_s() > 0
    release.set()
    for outputs, done in [(running, over), *queued]:
        assert done.wait(60) and outputs[-1].finish_reason == "error"
    with pytest.raises(EngineError, match="background pipeline failed"):
        loop.submit([1], SamplingParams(max_tokens=1), lambda o: None)
    loop.close()
    assert loop.quiet_s() == 0
    with pytest.raises(EngineError, match="closed"):
        loop.submit([1], SamplingParams(max_tokens=1), lambda o: None)


def test_refusals_name_the_limit(prose_ids: list[int]) -> None:
    loop = EngineLoop(EngineConfig(**SMALL | {"max_seq_len": 2048}))
    with pytest.raises(CapacityError, match="device pages"):
        loop.submit(prose_ids[:1500], SamplingParams(max_tokens=4), lambda o: None)
    with pytest.raises(CapacityError, match="max_seq_len 2048"):
        loop.submit(prose_ids[:2048], SamplingParams(max_tokens=1), lambda o: None)
    assert_baseline(wait_until_baseline(loop))
    with pytest.raises(EngineError, match="closed"):
        loop.submit([1], SamplingParams(max_tokens=1), lambda o: None)


def test_preempted_requests_give_the_same_answer(prose_ids: list[int]) -> None:
    """Eight requests that do not fit together equal the same eight with room for all."""
    prompts = [prose_ids[i * 500 : i * 500 + 100 + i] for i in range(8)]
    answers, preempted = [], 0
    for gib in (0.018, 0.5):
        loop = EngineLoop(EngineConfig(**SMALL | {"device_kv_gib": gib, "host_kv_gib": 0.5}))
        texts: dict[int, list[int]] = {}
        left = threading.Semaphore(0)

        def on_output(output: RequestOutput, texts: dict[int, list[int]] = texts, left: threading.Semaphore = left) -> None:
            nonlocal preempted
            texts.setdefault(output.request_id, []).extend(output.token_ids)
            if output.finished:
                preempted += output.stats["preemptions"]
                left.release()

        for p in prompts:
            loop.submit(p, SamplingParams(max_tokens=60, ignore_eos=True), on_output)
        for _ in prompts:
            assert left.acquire(timeout=120)
        loop.close()
        answers.append([texts[k] for k in sorted(texts)])
    assert answers[0] == answers[1]
    assert preempted > 0
