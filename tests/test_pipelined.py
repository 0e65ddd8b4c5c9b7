"""Pipelined steps without a GPU: a runner that keeps its own tokens and hands them out one step late, as CUDA's does."""

from __future__ import annotations

import pytest

from oasiskv.bench.arm import Arm
from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import EngineError
from reference.late_runner import LateRunner

OPTIONS = {"drafter": "previous", "top_k_blocks": 4, "sparse_from": 64, "device_kv_gib": 0.1, "host_kv_gib": 0.2, "max_batch_size": 8}
LENGTHS = (5, 70, 33, 150, 16, 64)


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    """All answers, each as one output."""
    answers = {}
    for prompt, params in requests:
        request = engine.next_id()
        engine.add(request, prompt, params)
        answers[request] = RequestOutput(request)
    for _ in range(2000):
        for o in engine.step():
            answer = answers[o.request_id]
            assert not answer.finished
            answer.token_ids += o.token_ids
            answer.text += o.text
            answer.finished, answer.finish_reason, answer.stats = o.finished, o.finish_reason, o.stats
        if all(a.finished for a in answers.values()):
            break
    engine.step()  # what was launched for requests that have stopped
    usage = engine.usage()
    for pool in ("device_pages", "host_blocks", "summary_pages"):
        assert usage[f"{pool}_free"] == usage[pool], usage
    return list(answers.values())


@pytest.fixture(scope="module")
def prompts(prose_ids: list[int]) -> list[list[int]]:
    return [prose_ids[i * 700 : i * 700 + n] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[RequestOutput]:
    return run(Engine(EngineConfig(**OPTIONS)), [(p, SamplingParams(max_tokens=20, ignore_eos=True)) for p in prompts])


def test_tokens_and_statistics_are_those_of_whole_steps(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    got = run(engine, [(p, SamplingParams(max_tokens=20, ignore_eos=True)) for p in prompts])
    assert sum(e.stats["sparse_steps"] for e in expected) > 50
    for e, g in zip(expected, got, strict=True):
        assert g.token_ids == e.token_ids and g.text == e.text and g.finish_reason == "length"
        for name in ("dense_steps", "sparse_steps", "blocks_admitted", "resident_tokens_max", "generated_tokens"):
            assert g.stats[name] == e.stats[name], name


def test_a_stop_is_seen_one_step_late_and_leaves_no_trace(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    requests = [
        (p, SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(e.token_ids[3 * i],)))
        for i, (p, e) in enumerate(zip(prompts, expected, strict=True))
    ]
    for (_, params), e, g in zip(requests, expected, run(Engine(EngineConfig(**OPTIONS), runner=LateRunner), requests), strict=True):
        end = e.token_ids.index(params.stop_token_ids[0]) + 1
        assert g.token_ids == e.token_ids[:end] and g.finish_reason == "stop"
        assert g.stats["dense_steps"] + g.stats["sparse_steps"] == end - 1  # the step beyond its stop does not count


def test_one_token_requests_and_steps_sampled_on_the_host(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    options = [{"max_tokens": 1}, {"max_tokens": 20}, {"max_tokens": 7, "repetition_penalty": 1.5}, {"max_tokens": 20}]
    requests = [(p, SamplingParams(ignore_eos=True, **o)) for p, o in zip(prompts, options, strict=False)]
    got = run(Engine(EngineConfig(**OPTIONS), runner=LateRunner), requests)
    for i in (0, 1, 3):
        assert got[i].token_ids == expected[i].token_ids[: options[i]["max_tokens"]]
    assert len(got[2].token_ids) == 7


def test_a_cancel_between_launch_and_tokens(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    first, second = engine.next_id(), engine.next_id()
    for request, prompt in ((first, prompts[1]), (second, prompts[2])):
        engine.add(request, prompt, SamplingParams(max_tokens=20, ignore_eos=True))
    tokens: list[int] = []
    for step in range(60):
        tokens += [t for o in engine.step() if o.request_id == second for t in o.token_ids]
        if step == 5:
            assert engine.stop(first, "cancelled").finish_reason == "cancelled"
    assert tokens == expected[2].token_ids
    assert engine.usage()["device_pages_free"] == engine.usage()["device_pages"]


def test_logits_that_are_not_finite_end_the_requests_of_that_step(prompts: list[list[int]]) -> None:
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    engine.runner.broken_at = 4
    request = engine.next_id()
    engine.add(request, prompts[0], SamplingParams(max_tokens=20, ignore_eos=True))
    outputs = [o for _ in range(12) for o in engine.step()]
    assert outputs[-1].finish_reason == "error" and "not finite" in outputs[-1].error
    assert sum(len(o.token_ids) for o in outputs) == 3
    assert engine.usage()["device_pages_free"] == engine.usage()["device_pages"]


def test_a_launch_that_fails_takes_no_token_with_it(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    """What was launched before is still read and told; then the error is raised, once, and steps go on."""
    for fails_at in (1, 2, 3, 9):
        engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
        launch, steps = engine.runner.launch, iter(range(1, 1000))

        def failing(*args: object, launch: object = launch, steps: object = steps, fails_at: int = fails_at) -> None:
            if next(steps) == fails_at:
                raise RuntimeError("no memory")
            launch(*args)

        engine.runner.launch = failing
        request = engine.next_id()
        engine.add(request, prompts[0], SamplingParams(max_tokens=20, ignore_eos=True))
        tokens: list[int] = []
        raised = []
        for _ in range(60):
            try:
                tokens += [t for o in engine.step() for t in o.token_ids]
            except RuntimeError as error:
                raised.append(str(error))
                assert len(tokens) == fails_at - 1
        assert raised == ["no memory"]
        assert tokens == expected[0].token_ids


def test_stop_strings_end_requests_as_in_whole_steps(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    requests = [(p, SamplingParams(max_tokens=20, ignore_eos=True, stop=(e.text[9:12],))) for p, e in zip(prompts, expected, strict=True)]
    whole = run(Engine(EngineConfig(**OPTIONS)), requests)
    assert sum(w.finish_reason == "stop" for w in whole) > 3
    for w, g in zip(whole, run(Engine(EngineConfig(**OPTIONS), runner=LateRunner), requests), strict=True):
        assert (g.text, g.token_ids, g.finish_reason) == (w.text, w.token_ids, w.finish_reason)


def test_preempted_requests_resume_with_tokens_that_the_host_has_not_read(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    page_gib = 30 * 3 * 2 * 16 * 64 * 4 / 2**30
    engine = Engine(EngineConfig(**OPTIONS | {"dense": True, "device_kv_gib": 13.5 * page_gib}), runner=LateRunner)
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    whole = run(Engine(EngineConfig(**OPTIONS | {"dense": True})), [(p, long) for p in prompts[:3]])
    got = run(engine, [(p, long) for p in prompts[:3]])
    assert [g.token_ids for g in got] == [w.token_ids for w in whole]
    assert sum(g.stats["preemptions"] for g in got) > 0


def test_the_benchmark_times_the_same_requests_throughout(prompts: list[list[int]]) -> None:
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    arm = Arm("oasis", engine)
    assert arm.fill(requests=3, context=70, output=40)["running"] == 3
    row = arm.measure(steps=6)
    assert row["turn_ms"] > 0 and 0 < row["tpot_ms"] <= row["tpot_p99_ms"] and row["link_mb_step"] > 0
    with pytest.raises(EngineError, match="3 requests ran"):
        arm.measure(steps=40)
    arm.empty()
