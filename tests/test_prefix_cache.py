"""The prefix cache through the engine, on the embedded model: the same tokens as without it, and fewer of them computed."""

from __future__ import annotations

import hashlib
import random
import struct
from collections.abc import Iterator
from dataclasses import replace

import pytest

from oasiskv.checkpoint import load_checkpoint, resolve_model
from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.llm import LLM, GenerationResult
from oasiskv.engine.loaded import LoadedModel
from oasiskv.engine.prefix import BlockNames
from oasiskv.engine.runner import Runner
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import RequestError
from oasiskv.tokenizer import Tokenizer
from reference.late_runner import LateRunner

OPTIONS = {"top_k_blocks": 8, "sparse_from": 64, "device_kv_gib": 0.3, "host_kv_gib": 0.3, "max_seq_len": 4096}
SIX = SamplingParams(max_tokens=6, ignore_eos=True)
BLOCK_GIB = 3 * 2 * 16 * 64 * 4 / 2**30  # of one layer


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """For tests whose prompts begin at different places."""
    with LLM(**OPTIONS) as made:
        yield made


def ask(llm: LLM, prompt: list[int], params: SamplingParams = SIX) -> GenerationResult:
    result = llm.generate([prompt], params)[0]
    assert result.error is None
    return result


def reused(result: GenerationResult) -> int:
    stats = result.stats
    assert stats["kv_blocks_new"] + stats["kv_blocks_reused"] == stats["kv_blocks_total"]
    tokens = stats["prompt_tokens"] + stats["generated_tokens"] - 1  # the last one's keys and values are not computed
    assert stats["kv_blocks_total"] == -(-tokens // 16)
    return stats["kv_blocks_reused"]


# ---------------------------------------------------------------- names


def test_a_name_is_the_chained_hash_of_salt_and_tokens() -> None:
    ids = [(i * 7919) % 49152 for i in range(70)]
    parent = hashlib.blake2b(b"a salt", digest_size=16, person=b"oasiskv salt").digest()
    expected = b""
    for block in range(4):
        parent = hashlib.blake2b(parent + struct.pack("<16I", *ids[16 * block : 16 * block + 16]), digest_size=16).digest()
        expected += parent
    assert BlockNames("a salt").of(ids) == expected
    grown = BlockNames("a salt")
    for n in (5, 16, 17, 47, 70):
        assert grown.of(ids[:n]) == expected[: n // 16 * 16]
    assert BlockNames("").of(ids)[:16] != expected[:16]


def test_each_token_and_the_order_of_blocks_count() -> None:
    ids = list(range(48))
    names = BlockNames("").of(ids)
    assert len({names[i : i + 16] for i in range(0, 48, 16)}) == 3
    for i in range(48):
        changed = BlockNames("").of([*ids[:i], 49151, *ids[i + 1 :]])
        same = i // 16 * 16
        assert changed[:same] == names[:same] and all(changed[b : b + 16] != names[b : b + 16] for b in range(same, 48, 16))
    assert BlockNames("").of(ids[16:32] + ids[:16])[16:] != names[16:32]


def test_salts_are_bounded_text() -> None:
    SamplingParams(cache_salt="é" * 256)
    for salt in ("x" * 257, None, 5, "\ud800"):
        with pytest.raises(RequestError, match="cache_salt"):
            SamplingParams(cache_salt=salt)
    with pytest.raises(RequestError, match="use_cache"):
        SamplingParams(use_cache=1)


# ---------------------------------------------------------------- one after another


def test_at_least_one_token_of_the_prompt_is_computed(llm: LLM, prose_ids: list[int]) -> None:
    prompt = prose_ids[10_000:10_064]
    assert [reused(ask(llm, prompt)) for _ in range(2)] == [0, 3]
    assert reused(ask(llm, [*prompt, 5])) == 4


def test_what_was_generated_is_reused_too(llm: LLM, prose_ids: list[int]) -> None:
    """The next turn of a conversation begins with the last one's prompt and answer."""
    prompt = prose_ids[11_000:11_050]
    answer = ask(llm, prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    turn = prompt + answer.token_ids + prose_ids[:9]
    result = ask(llm, turn)
    assert reused(result) == (50 + 39) // 16
    assert result.token_ids == ask(llm, turn, replace(SIX, use_cache=False)).token_ids


def test_what_sparse_steps_computed_is_not_reused(llm: LLM, prose_ids: list[int]) -> None:
    """They attend to fewer tokens than a prompt's prefill does: from one layer on, keys and values are others."""
    prompt = prose_ids[21_000:21_200]
    answer = ask(llm, prompt, SamplingParams(max_tokens=60, ignore_eos=True))
    assert answer.stats["sparse_steps"] > 50
    turn = prompt + answer.token_ids + prose_ids[:9]
    scored = replace(SIX, logprobs=0)
    result = ask(llm, turn, scored)
    assert reused(result) == 200 // 16
    fresh = ask(llm, turn, replace(scored, use_cache=False))
    assert [(s.token_id, s.logprob) for s in result.logprobs] == [(s.token_id, s.logprob) for s in fresh.logprobs]


def test_a_prompt_that_yields_one_token_leaves_all_its_blocks(llm: LLM, prose_ids: list[int]) -> None:
    """No step comes after the one that completes them."""
    prompt = prose_ids[12_000:12_100]
    ask(llm, prompt, SamplingParams(max_tokens=1))
    assert reused(ask(llm, prompt)) == 6


def test_salts_keep_requests_apart(llm: LLM, prose_ids: list[int]) -> None:
    prompt = prose_ids[13_000:13_100]
    params = [replace(SIX, cache_salt=salt) for salt in ("a", "b", "", "a", "b", "")]
    results = [ask(llm, prompt, p) for p in params]
    assert [reused(r) for r in results] == [0, 0, 0, 6, 6, 6]
    assert len({tuple(r.token_ids) for r in results}) == 1


def test_a_request_without_the_cache_neither_reads_nor_leaves(llm: LLM, prose_ids: list[int]) -> None:
    prompt, without = prose_ids[14_000:14_100], replace(SIX, use_cache=False)
    before = llm.usage()["prefix_blocks_cached"]
    assert reused(ask(llm, prompt, without)) == 0
    assert llm.usage()["prefix_blocks_cached"] == before
    assert reused(ask(llm, prompt)) == 0
    assert reused(ask(llm, prompt, without)) == 0
    assert reused(ask(llm, prompt)) == 6


def test_an_engine_without_it_caches_nothing(prose_ids: list[int]) -> None:
    with LLM(**OPTIONS, enable_prefix_caching=False) as llm:
        assert [reused(ask(llm, prose_ids[:100])) for _ in range(2)] == [0, 0]
        assert llm.usage()["prefix_blocks_cached"] == llm.usage()["prefix_blocks_reused"] == 0


def test_usage_counts_what_is_cached_as_free(llm: LLM, prose_ids: list[int]) -> None:
    before = llm.usage()
    result = ask(llm, prose_ids[15_000:15_100])
    again = ask(llm, prose_ids[15_000:15_100])
    after = llm.usage()
    assert after["host_blocks_free"] == after["host_blocks"]
    assert after["prefix_blocks_cached"] - before["prefix_blocks_cached"] == 105 // 16
    assert after["prefix_blocks_reused"] - before["prefix_blocks_reused"] == reused(result) + reused(again) == 6
    assert after["prefix_blocks_evicted"] == 0


@pytest.fixture(scope="module")
def small(tokenizer: Tokenizer) -> LoadedModel:
    """Two layers of the embedded model: fast, and every key still depends on all tokens before it."""
    config, weights = load_checkpoint(resolve_model("smollm2-135m"))
    return LoadedModel(replace(config, num_hidden_layers=2), weights, tokenizer)


def engine_of(small: LoadedModel, runner: type[Runner] | None = None, **options: object) -> Engine:
    sizes = {"device_kv_gib": 200.5 * 2 * BLOCK_GIB, "host_kv_gib": 200.5 * 2 * BLOCK_GIB, "max_seq_len": 512, "num_threads": 1}
    config = EngineConfig(**OPTIONS | {"top_k_blocks": 4} | sizes | options)
    return Engine(config, model=LoadedModel(small.config, dict(small.weights), small.tokenizer), runner=runner)


def run(engine: Engine, request: int, steps: int = 1000) -> RequestOutput:
    """Steps until it ends; its answer as one output."""
    answer = RequestOutput(request)
    for _ in range(steps):
        for o in engine.step():
            if o.request_id == request:
                answer.token_ids += o.token_ids
                answer.finished, answer.finish_reason, answer.stats = o.finished, o.finish_reason, o.stats
        if answer.finished:
            return answer
    raise AssertionError(f"request {request} has not ended after {steps} steps")


def add(engine: Engine, prompt: list[int], params: SamplingParams = SIX) -> int:
    request = engine.next_id()
    engine.add(request, prompt, params)
    return request


def test_a_long_prefix_is_computed_once(small: LoadedModel, prose_ids: list[int]) -> None:
    engine = engine_of(small, max_seq_len=4096)
    prefix, tails = prose_ids[:3000], [prose_ids[5000:5020], prose_ids[6000:6020]]
    first, again, other = (run(engine, add(engine, prefix + tail)) for tail in (tails[0], *tails))
    assert [r.stats["kv_blocks_reused"] for r in (first, again, other)] == [0, 3019 // 16, 3000 // 16]
    assert again.token_ids == first.token_ids
    alone = run(engine, add(engine, prefix + tails[1], replace(SIX, use_cache=False)))
    assert alone.stats["kv_blocks_reused"] == 0 and alone.token_ids == other.token_ids
    for name in ("blocks_predicted", "blocks_admitted", "bytes_fetched", "sparse_steps"):
        assert other.stats[name] == alone.stats[name] > 0, name


# ---------------------------------------------------------------- while others run


@pytest.mark.parametrize("runner", [None, LateRunner], ids=["whole", "pipelined"])
def test_reuse_begins_while_the_first_still_runs(small: LoadedModel, prose_ids: list[int], runner: type[Runner] | None) -> None:
    engine = engine_of(small, runner, drafter="previous")
    add(engine, prose_ids[:100], replace(SIX, max_tokens=60))
    for _ in range(4):
        engine.step()
    second = add(engine, prose_ids[:100])
    answer = run(engine, second)
    assert answer.stats["kv_blocks_reused"] == 6 and len(engine.request_ids()) == 1
    alone = engine_of(small, enable_prefix_caching=False, drafter="previous")
    assert run(alone, add(alone, prose_ids[:100])).token_ids == answer.token_ids


def test_a_request_cancelled_in_its_prefill_leaves_what_it_has(small: LoadedModel, prose_ids: list[int]) -> None:
    engine = engine_of(small, max_num_tokens=128)
    first = add(engine, prose_ids[:400])
    engine.step()
    engine.step()
    engine.stop(first, "cancelled")
    answer = run(engine, add(engine, prose_ids[:400]))
    assert answer.stats["kv_blocks_reused"] == 2 * 128 // 16
    alone = engine_of(small, enable_prefix_caching=False)
    assert run(alone, add(alone, prose_ids[:400])).token_ids == answer.token_ids


def test_a_step_that_breaks_off_leaves_what_was_there_before(small: LoadedModel, prose_ids: list[int]) -> None:
    engine = engine_of(small, max_num_tokens=128)
    first = add(engine, prose_ids[:400])
    engine.step()
    forward = engine.runner._model.forward

    def fails_after_a_layer(tokens: object, attend: object, rows: object) -> None:
        def attend_once(layer: int, qkv: object) -> object:
            if layer == 1:
                raise RuntimeError("injected")
            return attend(layer, qkv)

        return forward(tokens, attend_once, rows)

    engine.runner._model.forward = fails_after_a_layer
    with pytest.raises(RuntimeError, match="injected"):
        engine.step()
    engine.stop(first, "error", "injected")
    engine.runner._model.forward = forward
    answer = run(engine, add(engine, prose_ids[:400]))
    assert answer.stats["kv_blocks_reused"] == 128 // 16
    alone = engine_of(small, enable_prefix_caching=False)
    assert run(alone, add(alone, prose_ids[:400])).token_ids == answer.token_ids


def test_blocks_of_logits_that_are_not_finite_are_not_reused(small: LoadedModel, prose_ids: list[int]) -> None:
    """Neither its own nor those that it began with; what others left under other names stays."""
    engine = engine_of(small)
    run(engine, add(engine, prose_ids[:100]))
    run(engine, add(engine, prose_ids[1000:1100]))
    forward = engine.runner._model.forward
    engine.runner._model.forward = lambda *args: forward(*args) * float("nan")
    broken = add(engine, prose_ids[:120])
    assert engine.step()[0].finish_reason == "error" and not engine.request_ids() and broken
    engine.runner._model.forward = forward
    assert run(engine, add(engine, prose_ids[:100])).stats["kv_blocks_reused"] == 0
    assert run(engine, add(engine, prose_ids[1000:1100])).stats["kv_blocks_reused"] == 6


# ---------------------------------------------------------------- many


def random_requests(rng: random.Random, ids: list[int], count: int, greedy: bool) -> list[tuple[list[int], SamplingParams]]:
    """Prompts that begin with one of some prefixes, or with another's prompt."""
    random_sampling = {} if greedy else {"temperature": 1.0}
    prefixes = [ids[i * 500 : i * 500 + n] for i, n in enumerate((16, 32, 60, 128))]
    requests: list[tuple[list[int], SamplingParams]] = []
    for i in range(count):
        base = rng.choice(prefixes) if not requests or rng.random() < 0.7 else rng.choice(requests[-20:])[0][:140]
        start = rng.randrange(5000, 60_000)
        prompt = base[: rng.choice([len(base), rng.randint(1, len(base))])] + ids[start : start + rng.choice([0, 1, 15, 40])]
        options = rng.choice([{}, {}, {}, {**random_sampling, "seed": i}, {"use_cache": False}, {"cache_salt": "other"}])
        requests.append((prompt, SamplingParams(max_tokens=rng.choice([1, 8, 30, 80]), ignore_eos=True, **options)))
    return requests


def answers(engine: Engine, requests: list[tuple[list[int], SamplingParams]], rng: random.Random, cancel: float) -> list[RequestOutput]:
    """Requests come at random, and some are cancelled."""
    found: dict[int, RequestOutput] = {}
    coming = list(requests)
    while coming or engine.request_ids():
        while coming and len(engine.request_ids()) < 14 and rng.random() < 0.5:
            request = add(engine, *coming.pop(0))
            found[request] = RequestOutput(request)
        outputs = engine.step()
        if engine.request_ids() and rng.random() < cancel:
            outputs.append(engine.stop(rng.choice(engine.request_ids()), "cancelled"))
        for o in outputs:
            answer = found[o.request_id]
            answer.token_ids += o.token_ids
            answer.finished, answer.finish_reason, answer.stats = o.finished, o.finish_reason, o.stats
    engine.step()
    return list(found.values())


def compare_with_and_without(small: LoadedModel, ids: list[int], seed: int, count: int, runner: type[Runner] | None) -> dict[str, int]:
    """`count` random requests over pools so small that blocks are evicted and requests preempted all the time: each answers as it does with
    room for all and no cache. What went on.
    """
    rng = random.Random(seed)
    requests = random_requests(rng, ids, count, greedy=runner is LateRunner)
    common = {"max_batch_size": 8, "max_num_tokens": 64, "drafter": "previous", "sparse_from": 160}
    expected = answers(engine_of(small, enable_prefix_caching=False, **common), requests, rng, 0.0)
    tight = {"device_kv_gib": 20.5 * 2 * BLOCK_GIB, "host_kv_gib": 80.5 * 2 * BLOCK_GIB, "transfer_delay_us": 200}
    engine = engine_of(small, runner, **common, **tight)
    got = answers(engine, requests, rng, 0.03)
    for i, (e, g) in enumerate(zip(expected, got, strict=True)):
        whole = g.finish_reason != "cancelled"
        assert g.token_ids == (e.token_ids if whole else e.token_ids[: len(g.token_ids)]), (seed, i)
    usage = engine.usage()
    for pool in ("device_pages", "host_blocks", "summary_pages"):
        assert usage[f"{pool}_free"] == usage[pool], usage
    assert usage["prefix_blocks_reused"] == sum(g.stats["kv_blocks_reused"] for g in got)
    return {
        "preemptions": sum(g.stats["preemptions"] for g in got),
        "cancelled": sum(g.finish_reason == "cancelled" for g in got),
        "sparse_steps": sum(g.stats["sparse_steps"] for g in got),
        "reused": usage["prefix_blocks_reused"],
        "evicted": usage["prefix_blocks_evicted"],
    }


@pytest.mark.parametrize("runner", [None, LateRunner], ids=["whole", "pipelined"])
def test_random_requests_answer_as_without_it(small: LoadedModel, prose_ids: list[int], runner: type[Runner] | None) -> None:
    seen = compare_with_and_without(small, prose_ids, 1, 100, runner)
    assert seen["preemptions"] > 4 and min(seen["cancelled"], seen["evicted"]) > 10, seen
    assert seen["reused"] > 100 and seen["sparse_steps"] > 100, seen
