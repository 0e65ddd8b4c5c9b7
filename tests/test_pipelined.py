"""Pipelined steps without a GPU: a runner that keeps its own tokens and hands them out one step late, as CUDA's does."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from oasiskv.bench.arm import Arm
from oasiskv.checkpoint import load_checkpoint, resolve_model
from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.llm import GenerationResult
from oasiskv.engine.loaded import LoadedModel
from oasiskv.engine.sampling import Guide, SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import EngineError
from oasiskv.tokenizer import Tokenizer
from reference.late_runner import HashRunner, LateHashRunner, LateRunner

OPTIONS = {"drafter": "previous", "top_k_blocks": 4, "sparse_from": 64, "device_kv_gib": 0.1, "host_kv_gib": 0.2, "max_batch_size": 8}
LENGTHS = (5, 70, 33, 150, 16, 64)


def run(engine: Engine, requests: list[tuple[list[int], SamplingParams]], pause: int = 0) -> list[RequestOutput]:
    """All answers, each as one output. Each request comes `pause` steps after the one before."""
    answers = {}
    coming = list(requests)
    for step in range(2000):
        while coming and (pause == 0 or step % pause == 0):
            request = engine.next_id()
            engine.add(request, *coming.pop(0))
            answers[request] = RequestOutput(request)
            if pause:
                break
        for o in engine.step():
            answer = answers[o.request_id]
            assert not answer.finished
            answer.token_ids += o.token_ids
            answer.text += o.text
            answer.logprobs += o.logprobs
            answer.finished, answer.finish_reason, answer.stats = o.finished, o.finish_reason, o.stats
        if not coming and all(a.finished for a in answers.values()):
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


def test_one_token_requests(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    requests = [(p, SamplingParams(ignore_eos=True, max_tokens=1 + 19 * (i % 2))) for i, p in enumerate(prompts)]
    for (_, params), e, g in zip(requests, expected, run(Engine(EngineConfig(**OPTIONS), runner=LateRunner), requests), strict=True):
        assert g.token_ids == e.token_ids[: params.max_tokens]


@pytest.mark.parametrize("pause", [0, 3])
def test_the_host_samples_for_those_that_need_it_alone(prompts: list[list[int]], expected: list[RequestOutput], pause: int) -> None:
    """They come while others run, and go before them; each has the tokens, and logprobs, of whole steps."""
    options = [
        {"max_tokens": 20}, {"max_tokens": 9, "repetition_penalty": 1.5}, {"max_tokens": 20}, {"max_tokens": 5, "logprobs": 2},
        {"max_tokens": 12, "presence_penalty": 1.0, "temperature": 0.8, "seed": 5}, {"max_tokens": 20},
    ]  # fmt: skip
    requests = [(p, SamplingParams(ignore_eos=True, **o)) for p, o in zip(prompts, options, strict=True)]
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    asked, logits_rows = [], engine.runner.logits_rows
    engine.runner.logits_rows = lambda rows, requests: asked.extend(rows) or logits_rows(rows, requests)
    got = run(engine, requests, pause)
    for w, g in zip(run(Engine(EngineConfig(**OPTIONS)), requests), got, strict=True):
        assert (g.token_ids, g.text, g.finish_reason, g.logprobs) == (w.token_ids, w.text, w.finish_reason, w.logprobs)
    assert got[1].token_ids != expected[1].token_ids[:9], "the penalty changes nothing: not a test of who samples"
    assert len(asked) == 9 + 5 + 12


def test_logits_and_requests_that_fail_alone(prompts: list[list[int]]) -> None:
    """Whole steps and pipelined ones give the same, also of a prompt that takes several steps, and to those beside a request that no
    token is left for.
    """
    everything = tuple((t,) for t in range(1024))
    options = [
        {"max_tokens": 6}, {"max_tokens": 3, "return_context_logits": True}, {"max_tokens": 8, "bad_words": everything},
        {"max_tokens": 5, "return_generation_logits": True, "return_context_logits": True},
        {"max_tokens": 9, "guide": Guide("choice", '["a"]'), "bad_words": ((81,),)}, {"max_tokens": 6},
    ]  # fmt: skip
    requests = [(p, SamplingParams(**({} if "guide" in o else {"ignore_eos": True}), **o)) for p, o in zip(prompts, options, strict=True)]
    runs = []
    for runner in (None, LateRunner):
        engine = Engine(EngineConfig(**OPTIONS | {"max_num_tokens": 64}), runner=runner)
        results = {}
        for request in requests:
            number = engine.next_id()
            engine.add(number, *request)
            results[number] = GenerationResult()
        while engine.request_ids():
            for output in engine.step():
                results[output.request_id].take(output)
        runs.append(list(results.values()))
    for (prompt, params), whole, late in zip(requests, *runs, strict=True):
        assert (whole.token_ids, whole.finish_reason, whole.error) == (late.token_ids, late.finish_reason, late.error)
        for asked, name, rows in (
            (params.return_context_logits, "context_logits", len(prompt)),
            (params.return_generation_logits, "generation_logits", params.max_tokens),
        ):
            one, other = getattr(whole, name), getattr(late, name)
            assert (one is not None) == asked
            assert not asked or (one.shape == (rows, 49152) and np.array_equal(one, other))
    assert [w.finish_reason for w in runs[0]] == ["length"] * 4 + ["error", "length"]


def test_tokens_that_cannot_be_sampled_are_sampled_by_the_next_step(prompts: list[list[int]]) -> None:
    """The host's logits, or its sampler, fail once a step: no request takes its token twice, or never."""
    options = [{"max_tokens": 20}, {"max_tokens": 9, "repetition_penalty": 1.5}, {"max_tokens": 5}, {"max_tokens": 12, "logprobs": 2}]
    requests = [(p, SamplingParams(ignore_eos=True, **o)) for p, o in zip(prompts, options, strict=False)]
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    step, failed = engine.step, []

    def failing_every_second_time(call: Callable) -> Callable:
        calls = itertools.count()

        def failing(*args: object) -> object:
            if next(calls) % 2 == 0:
                failed.append(call)
                raise RuntimeError("no memory")
            return call(*args)

        return failing

    engine.runner.logits_rows = failing_every_second_time(engine.runner.logits_rows)
    engine._sampler.sample = failing_every_second_time(engine._sampler.sample)

    def patient() -> list[RequestOutput]:
        while True:
            with contextlib.suppress(RuntimeError):
                return step()

    engine.step = patient
    for w, g in zip(run(Engine(EngineConfig(**OPTIONS)), requests), run(engine, requests), strict=True):
        assert (g.token_ids, g.text, g.finish_reason, g.logprobs) == (w.token_ids, w.text, w.finish_reason, w.logprobs)
    assert len(failed) > 30


def test_what_follows_accepted_drafts_may_fail_to_be_sampled(prompts: list[list[int]], caplog: pytest.LogCaptureFixture) -> None:
    """In a step of several tokens a request, those that it has stay, and are in the cache: the next step goes on behind them."""
    options = OPTIONS | {"drafter": "ngram", "draft_len": 4, "accept_drafts": True, "dense": True}
    requests = [(p, SamplingParams(max_tokens=40, ignore_eos=True)) for p in prompts]
    whole = run(Engine(EngineConfig(**options)), requests)
    assert sum(w.stats["draft_accepted"] for w in whole) > 20
    engine = Engine(EngineConfig(**options))
    sample, steps = engine._sampler.sample, [0]

    def failing(*args: object) -> object:
        steps.append(engine.runner.core.last_step)
        if steps[-1] == steps[-2]:  # not the step's first round
            raise RuntimeError("no memory")
        return sample(*args)

    engine._sampler.sample = failing
    for w, g in zip(whole, run(engine, requests), strict=True):
        assert (g.token_ids, g.text) == (w.token_ids, w.text)
        assert g.stats["draft_accepted"] == 0
    assert "could not be sampled" in caplog.text


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


def test_launches_that_fail_once_each_change_nothing(prompts: list[list[int]]) -> None:
    """Above all the working sets of requests that turn sparse with fewer blocks than they may keep: those grow."""
    options = OPTIONS | {"top_k_blocks": 8}
    requests = [(p, SamplingParams(max_tokens=70, ignore_eos=True)) for p in prompts[:4]]
    whole = run(Engine(EngineConfig(**options)), requests)
    assert max(w.stats["resident_tokens_max"] for w in whole) > 8 * 16
    engine = Engine(EngineConfig(**options), runner=LateRunner)
    launch, tries = engine.runner.launch, iter(range(10000))

    def failing(*args: object) -> None:
        if next(tries) % 2 == 0:
            raise RuntimeError("no memory")
        launch(*args)

    step, engine.runner.launch = engine.step, failing

    def patient() -> list[RequestOutput]:
        try:
            return step()
        except RuntimeError:
            return []

    engine.step = patient
    for w, g in zip(whole, run(engine, requests), strict=True):
        assert (g.token_ids, g.text) == (w.token_ids, w.text)
        assert g.stats["resident_tokens_max"] == w.stats["resident_tokens_max"]


@pytest.mark.parametrize("token", [0, 5], ids=["a block settles", "none does"])
def test_a_step_that_breaks_off_within_ends_its_requests(prompts: list[list[int]], expected: list[RequestOutput], token: int) -> None:
    """What of it ran may have moved a block into a working set, when it settled or was fetched: the core runs no other step with such
    a request. One that is dense goes on.
    """
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    long, short = (engine.next_id() for _ in range(2))
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    engine.add(long, prompts[3], params)
    engine.add(short, prompts[0], params)
    model, logits = engine.runner._model, engine.runner.logits
    forward, broken = model.forward, []

    def breaks(tokens: torch.Tensor, attend: Callable, wanted: torch.Tensor) -> torch.Tensor:
        broken.append(tokens)
        attend(0, torch.zeros(len(tokens), 3 * model.config.hidden_size))
        raise RuntimeError("broke off")

    def watched(groups: list, *args: object) -> torch.Tensor:
        here = any(g.kind == "sparse" and g.start % 16 == token for g in groups)
        model.forward = breaks if here and not broken else forward
        return logits(groups, *args)

    engine.runner.logits = watched
    answer: list[int] = []

    def steps(count: int) -> None:
        for _ in range(count):
            answer.extend(t for o in engine.step() if o.request_id == short for t in o.token_ids)

    with pytest.raises(RuntimeError, match="broke off"):
        steps(60)
    with pytest.raises(RuntimeError, match=f"request {long} .*end it"):
        steps(2)
    engine.stop(long, "error")
    steps(60)
    assert len(answer) == 40 and answer[:20] == expected[0].token_ids
    assert engine.usage()["device_pages_free"] == engine.usage()["device_pages"]


def test_a_launch_that_fails_is_not_told_to_whoever_comes_later(prompts: list[list[int]], expected: list[RequestOutput]) -> None:
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    launch, tokens = engine.runner.launch, expected[0].token_ids
    end = next(i for i in range(2, 20) if tokens.index(tokens[i]) == i)  # where the launch after the last useful one fails
    steps = iter(range(1000))

    def failing(*args: object) -> None:
        if next(steps) == end + 1:
            raise RuntimeError("no memory")
        launch(*args)

    engine.runner.launch = failing
    stops = SamplingParams(max_tokens=20, ignore_eos=True, stop_token_ids=(tokens[end],))
    assert run(engine, [(prompts[0], stops)])[0].token_ids == tokens[: end + 1]
    assert next(steps) == end + 2
    plain = SamplingParams(max_tokens=3, ignore_eos=True)
    assert run(engine, [(prompts[2], plain)])[0].token_ids == expected[2].token_ids[:3]


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


TEXTS = (" the", "a", "b", " c", "ab", "\U0001f600")


@pytest.fixture(scope="module")
def likely(tokenizer: Tokenizer) -> list[int]:
    """Tokens whose text meets stop strings, halves of a character, and the end of a sequence."""
    return list(dict.fromkeys([i for text in TEXTS for i in tokenizer.encode(text)] + sorted(tokenizer.eos_ids)))


def random_params(rng: random.Random) -> SamplingParams:
    stops = ("ab", "aab", "the a", "b c", "\U0001f600", "ba ", " the the")
    options: dict[str, object] = {"max_tokens": rng.choice([1, 2, 7, 20, 60, 60]), "ignore_eos": rng.random() < 0.8}
    if rng.random() < 0.3:
        options |= {"stop": tuple(rng.sample(stops, 2)), "include_stop_text": rng.random() < 0.5}
    if rng.random() < 0.15:
        options |= rng.choice([{"repetition_penalty": 1.3}, {"logprobs": 1}, {"min_tokens": options["max_tokens"]}])
    return SamplingParams(**options)


def test_random_lives_are_those_of_whole_steps(tokenizer: Tokenizer, likely: list[int]) -> None:
    """Requests that come and go, are preempted, cancelled, sampled on the host, and steps that cannot be launched."""
    config, _ = load_checkpoint(resolve_model("smollm2-135m"))
    model = LoadedModel(replace(config, num_hidden_layers=2), {}, tokenizer)
    HashRunner.likely = tuple(likely)
    options = OPTIONS | {"max_num_tokens": 64, "host_kv_gib": 0.02, "num_threads": 1}
    page_gib = 2 * 3 * 2 * 16 * 64 * 4 / 2**30
    preempted = cancelled = failed = 0
    for seed in range(12):
        rng = random.Random(seed)
        roomy, tight = (EngineConfig(**options | {"device_kv_gib": pages * page_gib}) for pages in (200.5, 9.5))
        requests = [
            ([rng.choice(likely[:-1]) for _ in range(rng.choice([1, 5, 16, 30, 70]))], random_params(rng))
            for _ in range(rng.randint(4, 10))
        ]
        whole = run(Engine(roomy, model=model, runner=HashRunner), requests)
        engine = Engine(tight, model=model, runner=LateHashRunner)
        launch = engine.runner.launch

        def failing(*args: object, launch: object = launch, rng: random.Random = rng) -> None:
            nonlocal failed
            if rng.random() < 0.03:
                failed += 1
                raise RuntimeError("no memory")
            launch(*args)

        engine.runner.launch = failing
        answers: dict[int, RequestOutput] = {}
        waiting = list(requests)
        while waiting or engine.request_ids():
            while waiting and rng.random() < 0.6:
                request = engine.next_id()
                engine.add(request, *waiting.pop(0))
                answers[request] = RequestOutput(request)
            outputs = []
            if engine.request_ids() and rng.random() < 0.02:
                outputs.append(engine.stop(rng.choice(engine.request_ids()), "cancelled"))
            with contextlib.suppress(RuntimeError):
                outputs += engine.step()
            for o in outputs:
                answer = answers[o.request_id]
                assert not answer.finished and (o.finished or o.token_ids)
                answer.token_ids, answer.text = answer.token_ids + o.token_ids, answer.text + o.text
                answer.logprobs += o.logprobs
                answer.finished, answer.finish_reason, answer.stats = o.finished, o.finish_reason, o.stats
        assert engine.step() == [] and not engine.runner.tokens
        usage = engine.usage()
        assert all(usage[f"{pool}_free"] == usage[pool] for pool in ("device_pages", "host_blocks", "summary_pages"))
        for w, g in zip(whole, answers.values(), strict=True):
            preempted += g.stats["preemptions"]
            if g.finish_reason == "cancelled":
                cancelled += 1
                assert g.token_ids == w.token_ids[: len(g.token_ids)]
                continue
            assert (g.token_ids, g.text, g.finish_reason) == (w.token_ids, w.text, w.finish_reason), seed
            for name in ("generated_tokens", "dense_steps", "sparse_steps", "resident_tokens_max"):
                assert g.stats[name] == w.stats[name], (seed, name)
    assert min(preempted, cancelled, failed) > 5, (preempted, cancelled, failed)


def test_the_benchmark_times_the_same_requests_throughout(prompts: list[list[int]]) -> None:
    engine = Engine(EngineConfig(**OPTIONS), runner=LateRunner)
    arm = Arm("oasis", engine)
    assert arm.fill(requests=3, context=70, output=40)["running"] == 3
    row = arm.measure(steps=6)
    assert row["turn_ms"] > 0 and 0 < row["tpot_ms"] <= row["tpot_p99_ms"] and row["link_mb_step"] > 0
    with pytest.raises(EngineError, match="3 requests ran"):
        arm.measure(steps=40)
    arm.empty()


def test_the_foreground_is_all_kernels_but_the_lookaheads(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    foreground = ["nvjet_tst_64x8", "attention_kernel<bf16>", "append_kernel"]
    lookahead = ["gather_kernel<4>", "wait_kernel", "set_kernel", "score_kernel", "select_kernel", "write_through_kernel"]
    names = {"gpu": [*foreground, *lookahead, "Memcpy HtoD", "Memset (Device)"], "host": ["cudaGraphLaunch"]}
    rows = [{"where": where, "name": name, "us_step": 10.0**i} for where in names for i, name in enumerate(names[where])]
    arm = Arm("oasis", Engine(EngineConfig(**OPTIONS), runner=LateRunner))
    monkeypatch.setattr(arm, "profile", lambda steps, trace: rows if (steps, trace) == (7, None) else [])
    assert arm.foreground_ms(7) == pytest.approx(0.111)
