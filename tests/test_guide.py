"""Guided decoding: which tokens may come next, against plain Python; whole answers of the embedded model; what is refused."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.config import EngineConfig
from oasiskv.engine.engine import Engine
from oasiskv.engine.guide import Guides, RowGuide
from oasiskv.engine.llm import LLM
from oasiskv.engine.sampler import Sampler, SampleRow
from oasiskv.engine.sampling import Guide, SamplingParams
from oasiskv.errors import RequestError
from oasiskv.tokenizer import Tokenizer
from reference import sampler as slow
from reference.late_runner import HashRunner, LateHashRunner

CHOICES = ["yes", "no", "not at all", '🙂 "quoted"\n', "", "ye"]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "home": {
            "type": "object", "properties": {"town": {"type": "string", "maxLength": 10}},
            "required": ["town"], "additionalProperties": False,
        },
    },
    "required": ["name", "age", "tags", "home"],
    "additionalProperties": False,
}  # fmt: skip
BY_SCHEMA = Guide("json_schema", json.dumps(SCHEMA))


def is_of_schema(text: str) -> bool:
    v = json.loads(text)
    return (
        v.keys() == SCHEMA["properties"].keys()
        and isinstance(v["name"], str) and len(v["name"]) <= 12
        and type(v["age"]) is int and 0 <= v["age"] <= 150
        and len(v["tags"]) <= 3 and set(v["tags"]) <= {"red", "green", "blue"}
        and v["home"].keys() == {"town"} and len(v["home"]["town"]) <= 10
    )  # fmt: skip


def is_json(text: str) -> bool:
    return isinstance(json.loads(text), dict | list)


DATE = re.compile(r"(0[1-9]|[12][0-9]) (Jan|Feb)( [0-9]{4})?")
DATE_EBNF = 'root ::= day " " month (" " [0-9] [0-9] [0-9] [0-9])?\nday ::= "0" [1-9] | [12] [0-9]\nmonth ::= "Jan" | "Feb"'
DATE_LARK = 'start: DAY " " MONTH (" " YEAR)?\nDAY: /0[1-9]|[12][0-9]/\nMONTH: "Jan" | "Feb"\nYEAR: /[0-9]{4}/'
FORMS: list[tuple[Guide, Callable[[str], object]]] = [
    (Guide("json"), is_json), (BY_SCHEMA, is_of_schema), (Guide("choice", json.dumps(CHOICES)), CHOICES.__contains__),
    (Guide("regex", DATE.pattern), DATE.fullmatch), (Guide("ebnf_grammar", DATE_EBNF), DATE.fullmatch),
    (Guide("lark_grammar", DATE_LARK), DATE.fullmatch),
]  # fmt: skip


@pytest.fixture(scope="module")
def guides(tokenizer: Tokenizer) -> Guides:
    return Guides(tokenizer, tokenizer.vocab_size + 100)


def end_of(tokenizer: Tokenizer) -> int:
    return next(iter(tokenizer.eos_ids))


@pytest.mark.parametrize(("guide", "fits"), FORMS, ids=[g.kind for g, _ in FORMS])
def test_whatever_is_chosen_has_the_form(tokenizer: Tokenizer, guides: Guides, guide: Guide, fits: Callable[[str], object]) -> None:
    """Tokens at random, of those allowed; an end exactly where plain Python finds the text whole."""
    rng, ended = np.random.default_rng(5), 0
    is_short = np.array([len(tokenizer.decode([t])) < 3 for t in range(tokenizer.vocab_size)])
    for _ in range(20):
        row, tokens = guides.start(guide, tokenizer.eos_ids, 2), [1, 1]
        while len(tokens) < 120:
            allowed = row.allowed(tokens)
            text = tokenizer.decode(tokens[2:])
            assert (end_of(tokenizer) in allowed) == fits_quietly(fits, text), text
            assert len(allowed) and allowed.max() < tokenizer.vocab_size, "an id of the padding"
            if end_of(tokenizer) in allowed and rng.random() < 0.8 / min(5, len(allowed)):
                break
            if list(allowed) == [end_of(tokenizer)]:
                assert row.complete(tokens)
                break
            further = allowed[allowed != end_of(tokenizer)]
            short = further[is_short[further]]
            tokens.append(int(rng.choice(short if len(short) else further)))
        ended += len(tokens) < 120
    assert ended > 5


def fits_quietly(fits: Callable[[str], object], text: str) -> bool:
    try:
        return bool(fits(text))
    except ValueError:
        return False


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text('ab \n"\\é🙂<|>', max_size=6), min_size=1, max_size=5, unique=True), st.data())
def test_the_tokens_allowed_are_those_that_begin_a_rest(
    tokenizer: Tokenizer, guides: Guides, choices: list[str], data: st.DataObject
) -> None:
    row, tokens = guides.start(Guide("choice", json.dumps(choices)), frozenset({7}), 0), []
    pieces = {t: b for t in range(tokenizer.vocab_size) if (b := tokenizer.token_bytes(t))}
    whole, text = [c.encode() for c in choices], b""
    while True:
        rests = [w[len(text) :] for w in whole if w.startswith(text)]
        expected = {t for t, b in pieces.items() if any(r.startswith(b) for r in rests)} | ({7} if b"" in rests else set())
        allowed = set(row.allowed(tokens).tolist())
        assert allowed <= expected and allowed
        # Where the next bytes are the same for all, the library may insist on the tokens that the tokenizer would choose for them.
        assert allowed == expected or len({r[:1] for r in rests}) == 1
        further = sorted(allowed - {7})
        if not further:
            return
        tokens.append(data.draw(st.sampled_from(further)))
        text += pieces[tokens[-1]]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_sampled_as_if_all_others_were_impossible(tokenizer: Tokenizer, guides: Guides, temperature: float) -> None:
    rng, vocab = np.random.default_rng(3), tokenizer.vocab_size + 100
    sampler, few = Sampler(tokenizer.eos_ids), Guide("choice", '["yes", "no", "yellow"]')
    for i in range(30):
        params = SamplingParams(
            temperature=temperature,
            seed=i,
            logprobs=5,
            top_p=0.9,
            guide=BY_SCHEMA if i % 2 else few,
            repetition_penalty=1.1,
            bad_words=((i % 5 + 300,),),
        )
        row = SampleRow(params, [5, 6], 2, guides.start(params.guide, tokenizer.eos_ids, 2))
        logits = rng.standard_normal(vocab).astype(np.float32) * 3
        got = sampler.sample(torch.from_numpy(logits)[None], [row])[0]
        x = slow.adjusted(logits, row, [])
        masked = np.full(vocab, -np.inf)
        allowed = guides.start(params.guide, tokenizer.eos_ids, 2).allowed([5, 6])
        masked[allowed] = x[allowed]
        assert got.token_id == (int(masked.argmax()) if temperature == 0 else slow.token_at(masked, params, slow.philox(params, row)))
        want = slow.logprobs_of(masked, got.token_id, 5)
        assert got.logprob == pytest.approx(want.logprob, abs=1e-9)
        assert [t for t, _ in got.top_logprobs] == [t for t, _ in want.top_logprobs]
        assert [p for _, p in got.top_logprobs] == pytest.approx([p for _, p in want.top_logprobs], abs=1e-9)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [("yaml", "x", "kind"), ("json", "{}", "takes no text"), ("regex", "", "takes a text"), ("regex", "a" * 70_000, "65536"),
     ("regex", "\ud800", "Unicode"), ("regex", 5, "string")],
)  # fmt: skip
def test_what_no_guide_can_be(kind: str, text: str, named: str) -> None:
    with pytest.raises(RequestError, match=f"guide.*{named}"):
        Guide(kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [("json_schema", "{", ""), ("json_schema", '{"type": "person"}', "person"), 
     ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
     ("json_schema", '{"$ref": "#"}', "no text has this form"), ("regex", "(a", ""),
     ("choice", "[]", "JSON list"), ("choice", '["a", 1]', "JSON list"), ("choice", "yes", ""), ("choice", r'["\ud800"]', ""),
     ("ebnf_grammar", "word ::= [a-z]+", "root"), ("ebnf_grammar", 'root ::= "a', ""), ("ebnf_grammar", "root ::= " + "(" * 20_000, ""),
     ("ebnf_grammar", "a ::= b\n" * 1001, "1000 rules"), ("lark_grammar", "begin: /a/", ""),
     ("lark_grammar", "start: " + "(" * 30_000, "deep")],
)  # fmt: skip
def test_a_guide_that_does_not_compile_is_refused_by_name(guides: Guides, kind: str, text: str, named: str) -> None:
    with pytest.raises(RequestError, match=rf"(?s)guide \({kind}\) does not compile: .*({named})") as refused:
        guides.start(Guide(kind, text), frozenset({2}), 1)
    assert len(str(refused.value)) < 600


def test_min_tokens_is_refused_with_a_guide() -> None:
    with pytest.raises(RequestError, match="min_tokens"):
        SamplingParams(guide=Guide("json"), min_tokens=1)


def test_a_text_that_nests_deeper_than_a_stack_does_not_end_the_process() -> None:
    program = (
        "from oasiskv.checkpoint import resolve_model\nfrom oasiskv.engine.guide import Guides\nfrom oasiskv.engine.sampling import Guide\n"
        "from oasiskv.tokenizer import Tokenizer\n"
        "rules = ['start: a0', *(f'a{i}:a{i + 1}' for i in range(5000)), 'a5000: \"x\"']\n"
        "tokenizer = Tokenizer.from_dir(resolve_model('smollm2-135m'))\n"
        "row = Guides(tokenizer, tokenizer.vocab_size).start(Guide('lark_grammar', '\\n'.join(rules)), frozenset({2}), 0)\n"
        "print([tokenizer.decode([int(t)]) for t in row.allowed([])][:1])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "['x']\n"), done.stderr


PROMPTS = [f"Person {i}, as JSON: " for i in range(8)]
GUIDED = [SamplingParams(max_tokens=150, temperature=i % 2, seed=i, guide=BY_SCHEMA) for i in range(8)]
SMALL = {"device_kv_gib": 0.1, "host_kv_gib": 0.2, "max_seq_len": 512}


@pytest.fixture(scope="module")
def answers() -> list[tuple[list[int], str]]:
    with LLM(**SMALL) as llm:
        results = llm.generate(PROMPTS, GUIDED)
    assert [r.finish_reason for r in results] == ["stop"] * 8 and all(is_of_schema(r.text) for r in results), results
    assert len({r.text for r in results}) > 2
    return [(r.token_ids, r.text) for r in results]


def test_accepted_drafts_and_preemption_change_no_guided_answer(answers: list[tuple[list[int], str]]) -> None:
    page_gib = 30 * 3 * 2 * 16 * 64 * 4 / 2**30
    for options, counted in (
        ({"dense": True, "accept_drafts": True, "draft_len": 4}, "draft_accepted"),
        ({"dense": True, "device_kv_gib": 20.5 * page_gib}, "preemptions"),
    ):
        with LLM(**SMALL | options) as llm:
            results = llm.generate(PROMPTS, GUIDED)
        assert [(r.token_ids, r.text) for r in results] == answers
        assert sum(r.stats[counted] for r in results) > 0, counted


def test_pipelined_steps_follow_a_guide(tokenizer: Tokenizer) -> None:
    """Beside requests whose tokens are the device's."""
    requests = [
        (tokenizer.encode(p), g if i % 3 else SamplingParams(max_tokens=30)) for i, (p, g) in enumerate(zip(PROMPTS, GUIDED, strict=True))
    ]
    answers = []
    for runner in (HashRunner, LateHashRunner):
        engine = Engine(EngineConfig(drafter="previous", **SMALL), runner=runner)
        texts = dict.fromkeys([engine.next_id() for _ in requests], "")
        for number, request in zip(texts, requests, strict=True):
            engine.add(number, *request)
        while engine.request_ids():
            for output in engine.step():
                texts[output.request_id] += output.text
        answers.append(list(texts.values()))
    assert answers[0] == answers[1]
    assert all(is_of_schema(text) for i, text in enumerate(answers[0]) if i % 3)


def test_what_ends_a_guided_answer(tokenizer: Tokenizer) -> None:
    eos, one = end_of(tokenizer), Guide("choice", '["certainly not"]')
    whole = tokenizer.encode("certainly not", bos=False)
    cases = [
        ({"max_tokens": 9}, "stop", [*whole, eos]),
        ({"max_tokens": 9, "ignore_eos": True}, "stop", whole),
        ({"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (300,)}, "stop", [*whole, 300]),
        ({"max_tokens": len(whole)}, "stop", whole),
        ({"max_tokens": len(whole) - 1}, "length", whole[:-1]),
        ({"max_tokens": 9, "stop": "ly"}, "stop", None),
        ({"max_tokens": 9, "bad_words": ((eos,),)}, "error", whole),
    ]
    favoured = tuple((t, 1000.0) for t in whole)  # however the model would split the text
    with LLM(**SMALL) as llm:
        results = llm.generate([[1, 2]] * len(cases), [SamplingParams(guide=one, logit_bias=favoured, **o) for o, _, _ in cases])
        usage = llm.usage()
    for (options, reason, tokens), r in zip(cases, results, strict=True):
        assert r.finish_reason == reason, (options, r)
        assert tokens is None or r.token_ids == tokens, (options, r)
    assert "no token can be sampled" in results[-1].error
    assert usage["device_pages_free"] == usage["device_pages"]


def test_a_guide_that_goes_over_a_limit_ends_its_request_alone(guides: Guides, tokenizer: Tokenizer) -> None:
    """Rows of more than 2,000 alternatives compile, and fail when the first token has been taken."""
    wide = Guide("lark_grammar", "start: (" + " | ".join(f'"a" "b{i}"' for i in range(3000)) + ")")
    with LLM(**SMALL) as llm:
        bad, good = llm.generate(PROMPTS[:2], [SamplingParams(guide=wide, max_tokens=8), GUIDED[1]])
    assert bad.finish_reason == "error" and "guide: " in bad.error and good.finish_reason == "stop"


def test_a_request_starts_where_the_guide_does(guides: Guides, tokenizer: Tokenizer) -> None:
    """A compiled guide is kept, and what one request took has no part in another's."""
    guide = Guide("choice", '["ab", "cd"]')
    first, second = (guides.start(guide, tokenizer.eos_ids, 1) for _ in range(2))
    before: RowGuide = guides.start(guide, tokenizer.eos_ids, 1)
    expected = second.allowed([9]).tolist()
    first.allowed([9, expected[0]])
    assert before.allowed([9]).tolist() == expected == guides.start(guide, tokenizer.eos_ids, 1).allowed([9]).tolist()
