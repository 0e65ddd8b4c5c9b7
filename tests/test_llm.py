"""The LLM class against careless callers: bad prompts, forks, scripts that end without closing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from oasiskv.config import EngineConfig
from oasiskv.engine.llm import LLM
from oasiskv.engine.machine import memory_left
from oasiskv.engine.sampling import SamplingParams
from oasiskv.errors import CapacityError, ConfigError, RequestError

SMALL = {"device_kv_gib": 0.1, "host_kv_gib": 0.1, "max_seq_len": 512}


@pytest.fixture(scope="module")
def llm() -> LLM:
    with LLM(**SMALL) as made:
        yield made


@pytest.mark.parametrize(
    ("prompt", "error", "named"),
    [
        ([1.5, 2], RequestError, "float"), ([1, "a"], RequestError, "'a'|str"), ([None], RequestError, "NoneType"),
        (7, RequestError, "int"),
        ([], RequestError, "empty"), ([1, -1], RequestError, "-1"), ([1, 2**70], RequestError, str(2**70)),
        ([1] * 600, CapacityError, "512"),
    ],
)  # fmt: skip
def test_a_bad_prompt_hurts_nobody_else(llm: LLM, prompt: object, error: type[Exception], named: str) -> None:
    running = llm.stream([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
    first = next(running)
    with pytest.raises(error, match=named):
        llm.generate([prompt, "a good one"])  # type: ignore[list-item]
    rest = list(running)
    assert len(first.token_ids) + sum(len(o.token_ids) for o in rest) == 8 and rest[-1].finish_reason == "length"


def test_an_answer_to_a_closed_event_loop_is_dropped(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    async def impatient() -> None:
        await asyncio.wait_for(llm.generate_async([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True)), 0.2)

    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(impatient())
    assert len(llm.generate([[1, 2]], SamplingParams(max_tokens=4, ignore_eos=True))[0].token_ids) == 4
    assert llm.usage()["decoding"] == 0 and not caplog.records


def test_max_tokens_beyond_any_length_is_refused(llm: LLM) -> None:
    with pytest.raises(CapacityError, match="max_seq_len 512"):
        llm.generate([[1]], SamplingParams(max_tokens=2**31 - 1))


def test_numpy_ids_are_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    assert llm.generate([np.array([1, 2, 3])], params)[0].token_ids == llm.generate([[1, 2, 3]], params)[0].token_ids  # type: ignore[list-item]


def test_usage_after_an_answer_counts_no_request(llm: LLM) -> None:
    for _ in range(20):
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
        usage = llm.usage()
        assert usage["waiting"] == usage["prefilling"] == usage["decoding"] == usage["preempted"] == 0, usage


def test_pools_that_no_machine_has_are_refused() -> None:
    for options in ({"host_kv_gib": 1e6}, {"device_kv_gib": 1e6}, {"device_kv_gib": 1.5 * memory_left().bytes / 2**30}):
        with pytest.raises(ConfigError, match=rf"{next(iter(options))}.*this machine has"):
            LLM(EngineConfig(**SMALL | options))


SCRIPT = """
import os, sys
from oasiskv.engine.llm import LLM
from oasiskv.engine.sampling import SamplingParams
llm = LLM(device_kv_gib=0.1, host_kv_gib=0.1)
stream = llm.stream([1] * 20, SamplingParams(max_tokens=1500, ignore_eos=True))
next(stream)
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", SCRIPT + body], capture_output=True, text=True, timeout=60, check=False)


def test_a_script_may_end_without_closing() -> None:
    for body in ("", "raise SystemExit(3)"):
        done = run(body)
        assert (done.returncode, done.stderr) == (3 if body else 0, "")


def test_an_engine_does_not_pass_to_a_forked_child() -> None:
    done = run(
        "if os.fork() == 0:\n"
        "    try: llm.generate([[1, 2]])\n"
        "    except Exception as error: print(type(error).__name__, error)\n"
        "    sys.exit(0)\n"
        "assert os.wait()[1] == 0\n"
        "print(len(llm.generate([[1, 2]], SamplingParams(max_tokens=3, ignore_eos=True))[0].token_ids))\n"
    )
    assert done.returncode == 0, done.stderr
    child, parent = done.stdout.splitlines()
    assert child.startswith("EngineError") and "child" in child and parent == "3"


def test_two_engines_in_one_process(llm: LLM) -> None:
    """Side by side, from two threads, each answers as it does alone."""
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    prompts = [[i, i + 1, i + 2] * 10 for i in range(1, 5)]
    alone = [r.token_ids for r in llm.generate(prompts, params)]
    answers: dict[int, list[list[int]]] = {}

    def ask(number: int, engine: LLM) -> None:
        answers[number] = [r.token_ids for r in engine.generate(prompts, params)]

    with LLM(**SMALL) as other:
        threads = [threading.Thread(target=ask, args=(i, e)) for i, e in enumerate((llm, other))]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert answers == {0: alone, 1: alone}


def test_logits_are_the_models_before_anything_is_applied(llm: LLM, prose_ids: list[int]) -> None:
    """Prompts that take several steps, beside others; generated tokens that wait for a stop string's rest."""
    changed = {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.5, "logit_bias": ((400, 50.0),), "bad_words": ((7,),), "stop": "ZZZ"}
    prompts = [prose_ids[:1], prose_ids[50:450], prose_ids[500:640], prose_ids[700:720]]
    both = {"return_context_logits": True, "return_generation_logits": True, "ignore_eos": True}
    params = [SamplingParams(max_tokens=6, **both, **o) for o in ({}, changed, {"logprobs": 1})] + [
        SamplingParams(max_tokens=6, ignore_eos=True)
    ]
    with LLM(**SMALL, dense=True, max_num_tokens=130) as small_steps:
        results = small_steps.generate(prompts, params)
    for prompt, r in zip(prompts[:3], results[:3], strict=True):
        assert r.context_logits.shape == (len(prompt), 49152) and r.generation_logits.shape == (6, 49152)
        assert r.context_logits.dtype == r.generation_logits.dtype == np.float32
        # The logits behind a token are the same, bit for bit, whether it was generated or stood in a prompt.
        again = llm.generate([prompt + r.token_ids], SamplingParams(max_tokens=1, return_context_logits=True))[0]
        assert again.generation_logits is None
        assert np.array_equal(again.context_logits[: len(prompt)], r.context_logits)
        assert np.array_equal(again.context_logits[len(prompt) - 1 : -1], r.generation_logits)
    assert results[0].token_ids == results[0].generation_logits.argmax(axis=1).tolist()
    assert results[1].token_ids != results[1].generation_logits.argmax(axis=1).tolist()
    top = results[2].generation_logits.astype(np.float64)
    expected = top.max(axis=1) - np.log(np.exp(top).sum(axis=1))
    assert [s.logprob for s in results[2].logprobs] == pytest.approx(expected.tolist(), abs=1e-6)
    assert results[3].context_logits is None and results[3].generation_logits is None


def test_more_logits_than_a_request_may_have_are_refused(llm: LLM) -> None:
    for params in (
        SamplingParams(max_tokens=2**13, return_generation_logits=True),
        SamplingParams(max_tokens=5442, return_generation_logits=True, return_context_logits=True),
    ):
        with pytest.raises(RequestError, match=r"return_generation_logits.*49152 x 4 bytes"):
            llm.generate([[1] * 20], params)
    with pytest.raises(CapacityError):  # 1 GiB of logits would do: the length would not
        llm.generate([[1] * 20], SamplingParams(max_tokens=5441, return_generation_logits=True, return_context_logits=True))


def test_when_a_request_came_was_scheduled_and_answered(llm: LLM) -> None:
    """In this process's monotonic clock: a second request of a batch of one waits for the first to end."""
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    with LLM(**SMALL, max_batch_size=1) as one_at_a_time:
        before = time.monotonic_ns()
        first, second = (r.stats for r in one_at_a_time.generate([[1, 2], [3, 4]], params))
        after = time.monotonic_ns()
    for s in (first, second):
        assert before < s["arrival_ns"] < s["first_scheduled_ns"] < s["first_token_ns"] < s["last_token_ns"] < after
        assert s["ttft_ms"] == (s["first_token_ns"] - s["arrival_ns"]) / 1e6
        assert s["tpot_ms"] == (s["last_token_ns"] - s["first_token_ns"]) / 1e6 / 11
    assert second["first_scheduled_ns"] > first["last_token_ns"] > second["arrival_ns"]
    running = llm.stream([1, 2], params)
    llm.cancel(next(running).request_id)
    assert list(running)[-1].stats["last_token_ns"] > 0
