"""Greedy tokens on the embedded model: sparse with everything resident = dense = transformers; a batch = one by one."""

from __future__ import annotations

import pytest
import torch

from oasiskv.bench.reference_model import transformers_llama
from oasiskv.engine.llm import LLM, GenerationResult
from oasiskv.engine.sampling import SamplingParams
from oasiskv.tokenizer import Tokenizer

LENGTHS = [10, 17, 31, 64, 65, 90, 128, 150, 200, 256, 333, 400, 512, 640, 777, 1000, 1300, 1700, 2300, 3000]
CHAT = ["Why is the sky blue?", "Write a haiku about ice.", "List three prime numbers.", "Übersetze 'Guten Morgen' 🙂"]
GREEDY = SamplingParams(max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer, prose_ids: list[int]) -> list[list[int]]:
    """20 prompts of 10 to 3,000 tokens from different places of the essays; the first ones in chat form."""
    found = [prose_ids[i * 4001 : i * 4001 + n] for i, n in enumerate(LENGTHS)]
    found[1:5] = [tokenizer.encode(tokenizer.apply_chat([{"role": "user", "content": c}])) for c in CHAT]
    return found


def ids(results: list[GenerationResult]) -> list[list[int]]:
    assert all(r.error is None for r in results), [r.error for r in results]
    return [r.token_ids for r in results]


@pytest.fixture(scope="module")
def dense(prompts: list[list[int]]) -> list[list[int]]:
    with LLM(dense=True) as llm:
        return ids(llm.generate(prompts, GREEDY))


def test_dense_equals_transformers(prompts: list[list[int]], dense: list[list[int]]) -> None:
    model = transformers_llama("smollm2-135m")
    for prompt, ours in zip(prompts, dense, strict=True):
        with torch.inference_mode():
            out = model.generate(
                torch.tensor([prompt]),
                max_new_tokens=GREEDY.max_tokens,
                min_new_tokens=GREEDY.max_tokens,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            )
        assert out[0, len(prompt) :].tolist() == ours, f"prompt of {len(prompt)} tokens"


def test_sparse_with_everything_resident_equals_dense(prompts: list[list[int]], dense: list[list[int]]) -> None:
    with LLM(top_k_blocks=256, sparse_from=64) as llm:
        results = llm.generate(prompts, GREEDY)
    assert ids(results) == dense
    for prompt, r in zip(prompts, results, strict=True):
        if len(prompt) >= 64:
            assert r.stats["sparse_steps"] > 0
    assert sum(r.stats["sparse_steps"] for r in results) > 200


@pytest.mark.parametrize("options", [{"dense": True}, {"top_k_blocks": 8, "sparse_from": 64}], ids=["dense", "sparse"])
def test_a_batch_equals_one_by_one(prompts: list[list[int]], options: dict) -> None:
    some = prompts[:16:2]
    assert len(some) == 8
    with LLM(**options, enable_prefix_caching=False) as llm:  # each computes all of its own
        together = llm.generate(some, GREEDY)
        alone = [llm.generate([p], GREEDY)[0] for p in some]
    assert ids(together) == ids(alone)
    if "dense" not in options:
        assert sum(r.stats["sparse_steps"] for r in together) > 100


def test_accepted_drafts_do_not_change_the_answer(prompts: list[list[int]], dense: list[list[int]]) -> None:
    with LLM(dense=True, draft_len=4, accept_drafts=True) as llm:
        results = llm.generate(prompts, GREEDY)
    assert ids(results) == dense
    assert sum(r.stats["draft_accepted"] for r in results) > 0


def test_a_slow_transfer_does_not_change_a_bit(prompts: list[list[int]]) -> None:
    answers = []
    for delay in (0, 20_000):  # about 0.3 s a step, more than a step computes: it must stall
        with LLM(top_k_blocks=8, sparse_from=64, transfer_delay_us=delay) as llm:
            answers.append(llm.generate(prompts[5:11], GREEDY))
    assert ids(answers[0]) == ids(answers[1])
    assert sum(r.stats["stall_ms"] for r in answers[1]) > sum(r.stats["stall_ms"] for r in answers[0])
