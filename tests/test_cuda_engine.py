"""The engine on CUDA against the engine on the CPU, on the embedded model: in float32 and batch-invariant the same greedy tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oasiskv.engine import engine as engine_module
from oasiskv.engine.llm import LLM, GenerationResult
from oasiskv.engine.sampling import Guide, SamplingParams
from reference.cuda import needs_gpu

pytestmark = needs_gpu

LENGTHS = [10, 17, 31, 64, 65, 90, 128, 150, 200, 256, 333, 400, 512, 640, 777, 1000, 1300, 1700, 2300, 3000]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)
EXACT = {"backend": "cuda", "dtype": "float32", "batch_invariant": True, "device_kv_gib": 4.0, "host_kv_gib": 4.0}
SPARSE = {"top_k_blocks": 8, "sparse_from": 64}


def ids(results: list[GenerationResult]) -> list[list[int]]:
    assert all(r.error is None for r in results), [r.error for r in results]
    return [r.token_ids for r in results]


@pytest.fixture(scope="module")
def prompts(prose_ids: list[int]) -> list[list[int]]:
    return [prose_ids[i * 4001 : i * 4001 + n] for i, n in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def dense(prompts: list[list[int]]) -> list[list[int]]:
    with LLM(dense=True) as llm:
        return ids(llm.generate(prompts, GREEDY))


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_dense_equals_the_cpu(prompts: list[list[int]], dense: list[list[int]], graphs: bool) -> None:
    with LLM(dense=True, cuda_graphs=graphs, **EXACT) as llm:
        assert ids(llm.generate(prompts, GREEDY)) == dense


@pytest.mark.parametrize("drafter", ["ngram", "previous"])
def test_sparse_with_everything_resident_equals_dense(prompts: list[list[int]], dense: list[list[int]], drafter: str) -> None:
    with LLM(top_k_blocks=256, sparse_from=64, drafter=drafter, **EXACT) as llm:
        results = llm.generate(prompts, GREEDY)
    assert ids(results) == dense
    assert sum(r.stats["sparse_steps"] for r in results) > 200


@pytest.mark.parametrize(
    "options",
    [{"dense": True}, SPARSE, {**SPARSE, "drafter": "previous"}, {**SPARSE, "cuda_graphs": False}],
    ids=["dense", "ngram", "previous", "eager"],
)
def test_64_together_equal_one_by_one(prose_ids: list[int], options: dict) -> None:
    many = [prose_ids[i * 1009 : i * 1009 + 20 + 37 * i % 700] for i in range(64)]
    with LLM(**options, enable_prefix_caching=False, **EXACT) as llm:  # each computes all of its own
        together = llm.generate(many, GREEDY)
        alone = [llm.generate([p], GREEDY)[0] for p in many]
        captured = llm.usage()["captured_steps"]
    assert ids(together) == ids(alone)
    # Two a size: up to 20 numbers of requests, with and without draft rows, all of them of contexts below 8,192 tokens.
    assert captured == 0 if options.get("cuda_graphs") is False else 0 < captured <= 2 * 20 * 2
    if "dense" not in options:
        assert sum(r.stats["sparse_steps"] for r in together) > 500
        assert sum(r.stats["blocks_admitted"] for r in together) > 1000
        assert [r.stats["bytes_fetched"] for r in together] == [r.stats["bytes_fetched"] for r in alone]


def test_few_sizes_are_kept_captured(prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs go while they may still run, and sizes are captured again."""
    sizes = engine_module.core_config

    def few(*args: object) -> object:
        config = sizes(*args)
        config.captured_sizes = 2
        return config

    params = [SamplingParams(max_tokens=10 + i, ignore_eos=True, temperature=i % 2, seed=i) for i in range(len(prompts))]
    with LLM(**SPARSE, **EXACT) as llm:
        expected = ids(llm.generate(prompts, params))
        assert llm.usage()["captured_steps"] > 4
    monkeypatch.setattr(engine_module, "core_config", few)
    with LLM(**SPARSE, **EXACT) as llm:
        assert ids(llm.generate(prompts, params)) == expected
        assert 0 < llm.usage()["captured_steps"] <= 4


def test_sparse_tokens_mostly_equal_the_cpus(prompts: list[list[int]]) -> None:
    """Different only where scores tie within rounding; counted, and rare."""
    with LLM(**SPARSE) as llm:
        cpu = llm.generate(prompts, GREEDY)
    with LLM(**SPARSE, **EXACT) as llm:
        gpu = llm.generate(prompts, GREEDY)
    same = sum(a == b for a, b in zip(ids(cpu), ids(gpu), strict=True))
    assert same >= len(prompts) - 2, same
    for a, b in zip(cpu, gpu, strict=True):
        if a.token_ids == b.token_ids:
            for name in ("sparse_steps", "dense_steps", "blocks_predicted", "draft_tokens"):
                assert a.stats[name] == b.stats[name], name
            # On CUDA a draft row that is planned counts, whether or not the drafter has a guess.
            assert a.stats["resident_tokens_max"] <= b.stats["resident_tokens_max"] <= a.stats["resident_tokens_max"] + 1


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
def test_the_host_samples_for_those_that_need_it_alone(prompts: list[list[int]], dense: list[list[int]], graphs: bool) -> None:
    """Requests with penalties or logprobs among others: all have the CPU's tokens."""
    wanted = {0: {"repetition_penalty": 1.3}, 2: {"logprobs": 3}}
    mixed = [SamplingParams(max_tokens=9, ignore_eos=True, **wanted[i % 4]) if i % 4 in wanted else GREEDY for i in range(len(prompts))]
    hosts = [i for i in range(len(prompts)) if i % 4 in wanted]
    with LLM(dense=True) as llm:
        expected = llm.generate([prompts[i] for i in hosts], [mixed[i] for i in hosts])
    with LLM(dense=True, cuda_graphs=graphs, **EXACT) as llm:
        got = llm.generate(prompts, mixed)
    assert [t for i, t in enumerate(ids(got)) if i not in hosts] == [d for i, d in enumerate(dense) if i not in hosts]
    assert [got[i].token_ids for i in hosts] == ids(expected)
    assert [got[i].token_ids for i in hosts] != [dense[i][:9] for i in hosts], "penalties that change nothing"
    for i, e in zip(hosts, expected, strict=True):
        assert len(got[i].logprobs) == len(e.logprobs) == (0 if i % 4 == 0 else 9)
        for a, b in zip(got[i].logprobs, e.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-3) and len(a.top_logprobs) == 3


@pytest.mark.parametrize("pipelined", [True, False], ids=["pipelined", "whole steps"])
def test_logits_and_guides_are_the_cpus(prompts: list[list[int]], pipelined: bool) -> None:
    """Of prompts in several chunks, in steps beside others that decode; a guided answer, and bad words."""
    asked = {"return_context_logits": True, "return_generation_logits": True}
    wanted = [asked, {"guide": Guide("regex", "[a-z]{3,8}[.!]")}, {"bad_words": ((260,), (284, 253))}, {}]
    mixed = [SamplingParams(max_tokens=12, ignore_eos=i % 4 != 1, **wanted[i % 4]) for i in range(len(prompts))]
    accept = {} if pipelined else {"accept_drafts": True, "draft_len": 2}
    with LLM(dense=True, max_num_tokens=256) as llm:
        expected = llm.generate(prompts, mixed)
    with LLM(dense=True, max_num_tokens=256, **EXACT, **accept) as llm:
        got = llm.generate(prompts, mixed)
    assert ids(got) == ids(expected)
    assert [g.finish_reason for g in got] == [e.finish_reason for e in expected]
    for prompt, e, g in list(zip(prompts, expected, got, strict=True))[::4]:
        assert g.context_logits.shape == (len(prompt), e.context_logits.shape[1])
        assert np.abs(g.context_logits - e.context_logits).max() < 1e-2
        assert np.abs(g.generation_logits - e.generation_logits).max() < 1e-2
        assert np.array_equal(g.context_logits[-1], g.generation_logits[0]), "the last prompt row is what the first token came from"
        assert np.ptp(g.generation_logits, axis=1).min() > 1


def test_accepted_drafts_do_not_change_the_answer(prompts: list[list[int]], dense: list[list[int]]) -> None:
    with LLM(dense=True, draft_len=4, accept_drafts=True, **EXACT) as llm:
        results = llm.generate(prompts, GREEDY)
    assert ids(results) == dense
    assert sum(r.stats["draft_accepted"] for r in results) > 0


def test_seeded_sampling_equals_the_cpus(prompts: list[list[int]]) -> None:
    params = [SamplingParams(max_tokens=16, temperature=0.8, top_k=40, top_p=0.9, seed=i, ignore_eos=True) for i in range(len(prompts))]
    with LLM(dense=True) as llm:
        cpu = ids(llm.generate(prompts, params))
    with LLM(dense=True, **EXACT) as llm:
        gpu = ids(llm.generate(prompts, params))
    assert sum(a == b for a, b in zip(cpu, gpu, strict=True)) >= len(prompts) - 1  # a uniform number at a border


def test_small_pools_preempt_and_answer_the_same(prompts: list[list[int]]) -> None:
    long = SamplingParams(max_tokens=120, ignore_eos=True)
    with LLM(dense=True) as llm:
        expected = ids(llm.generate(prompts[:10], long))
    page_gib = 30 * 3 * 2 * 16 * 64 * 4 / 2**30
    with LLM(dense=True, **EXACT | {"device_kv_gib": 40.5 * page_gib}) as llm:
        results = llm.generate(prompts[:10], long)
    assert ids(results) == expected
    assert sum(r.stats["preemptions"] for r in results) > 0


@pytest.mark.parametrize("options", [{"dense": True}, SPARSE, {**SPARSE, "cuda_graphs": False}], ids=["dense", "sparse", "eager"])
def test_prefixes_are_reused_and_change_nothing(prompts: list[list[int]], options: dict) -> None:
    with LLM(**options, enable_prefix_caching=False, **EXACT) as llm:
        expected = llm.generate(prompts, GREEDY)
    with LLM(**options, **EXACT) as llm:
        first, again = (llm.generate(prompts, GREEDY) for _ in range(2))
        turn = [p + r.token_ids + p[:20] for p, r in zip(prompts, first, strict=True)]
        turns, cold = llm.generate(turn, GREEDY), llm.generate(turn, replace(GREEDY, use_cache=False))
    assert ids(first) == ids(again) == ids(expected) and ids(turns) == ids(cold)
    assert [r.stats["kv_blocks_reused"] for r in first] == [0] * len(prompts)
    assert [r.stats["kv_blocks_reused"] for r in again] == [(len(p) - 1) // 16 for p in prompts]
    exact = [n + 23 if "dense" in options or n + 23 <= 144 else max(n + 1, 144) for n in map(len, prompts)]  # blocks <= K
    assert [r.stats["kv_blocks_reused"] for r in turns] == [n // 16 for n in exact]
    for e, a in zip(expected, again, strict=True):
        assert (a.stats["sparse_steps"], a.stats["bytes_fetched"]) == (e.stats["sparse_steps"], e.stats["bytes_fetched"])


def test_small_pools_evict_preempt_and_answer_the_same(prompts: list[list[int]]) -> None:
    """Requests that begin alike, over a host pool that holds few of them at a time and device pages that hold fewer."""
    alike = [prompts[-1][:700] + p[:200] for p in prompts] * 4
    params = [SamplingParams(max_tokens=20 + i % 60, ignore_eos=True) for i in range(len(alike))]
    with LLM(**SPARSE | {"sparse_from": 1100}, enable_prefix_caching=False, **EXACT) as llm:
        expected = llm.generate(alike, params)
    block_gib = 30 * 3 * 2 * 16 * 64 * 4 / 2**30
    tight = EXACT | {"device_kv_gib": 200.5 * block_gib + 0.1, "host_kv_gib": 330.5 * block_gib, "max_seq_len": 1024}
    with LLM(**SPARSE | {"sparse_from": 1100}, **tight) as llm:
        results = llm.generate(alike, params)
        usage = llm.usage()
    assert ids(results) == ids(expected)
    assert usage["prefix_blocks_reused"] == sum(r.stats["kv_blocks_reused"] for r in results) > 1000
    assert usage["prefix_blocks_evicted"] > 20 and usage["host_blocks_free"] == usage["host_blocks"]


def test_stop_tokens_end_a_request_one_step_late_without_a_trace(prompts: list[list[int]], dense: list[list[int]]) -> None:
    stops = [SamplingParams(max_tokens=24, ignore_eos=True, stop_token_ids=(d[i % 20],)) for i, d in enumerate(dense)]
    with LLM(dense=True, **EXACT) as llm:
        results = llm.generate(prompts, stops)
        usage = llm.usage()
    for r, d, p in zip(results, dense, stops, strict=True):
        assert r.token_ids == d[: d.index(p.stop_token_ids[0]) + 1] and r.finish_reason == "stop"
    assert usage["device_pages_free"] == usage["device_pages"] and usage["host_blocks_free"] == usage["host_blocks"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_parts_from_float32_only_at_close_calls(prompts: list[list[int]], dtype: str) -> None:
    """At the first token that differs, float32's two best are closer than four times what 16 bit adds to the gap between them."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=2)
    with LLM(dense=True) as llm:
        exact = llm.generate(prompts, params)
    with LLM(dense=True, **EXACT | {"dtype": dtype, "batch_invariant": False}) as llm:
        rounded = llm.generate(prompts, params)
    squares, gaps = [], []
    for e, r in zip(exact, rounded, strict=True):
        for a, b in zip(e.logprobs, r.logprobs, strict=True):
            gap = a.top_logprobs[0][1] - a.top_logprobs[1][1]
            if a.token_id != b.token_id:
                gaps.append(gap)
                break
            if a.top_logprobs[1][0] == b.top_logprobs[1][0]:
                squares.append((gap - b.top_logprobs[0][1] + b.top_logprobs[1][1]) ** 2)
    noise = (sum(squares) / len(squares)) ** 0.5
    print(f"{dtype}: noise {noise:.4f}, {len(gaps)} of {len(prompts)} part, at gaps {[round(g, 4) for g in gaps]}")
    assert len(squares) > 200 and noise < 0.3
    assert all(g < 4 * noise for g in gaps), (noise, gaps)
