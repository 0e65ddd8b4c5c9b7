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
    loop = EngineLoop(EngineConfig(**SMALL))
    ends: Counter[int] = Counter()
    reasons: Counter[str] = Counter()
    preemptions = 0
    room = threading.Semaphore(24)
    over = threading.Event()
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
        start, length = rng.randrange(50_000), rng.randrange(1, 160)
        params = SamplingParams(max_tokens=rng.randrange(1, 40), temperature=rng.choice([0.0, 1.0]), seed=i, stop=("the",) if i % 7 == 0 else ())
        submitted.append(loop.submit(prose_ids[start : start + length], params, guarded))
        if rng.random() < 0.1:
            loop.cancel(rng.choice(submitted))
    for _ in range(24):
        assert room.acquire(timeout=120), "hang"
    over.set()
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

    model = loop._engine._model
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
