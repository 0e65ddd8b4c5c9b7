"""Streamed outputs: whole tokens with their text; joined, they are the answer; stop strings are found across tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from oasiskv.engine.sampler import Sampled
from oasiskv.engine.sampling import SamplingParams
from oasiskv.engine.sequence import RequestOutput, Sequence
from oasiskv.tokenizer import IncrementalDetokenizer, Tokenizer

PIECES = st.sampled_from(["the quick ", "brown", "\n\n", "🙂", "é", "数", " a", "ab", "aba", "\ufffd", "🇩🇪"])


def outputs_of(tokenizer: Tokenizer, ids: list[int], params: SamplingParams, cut_at: int | None = None) -> list[RequestOutput]:
    """What a client sees of a model that generates `ids`, cancelled after `cut_at` of them."""
    sequence = Sequence(1, [1], params, IncrementalDetokenizer(tokenizer), tokenizer.eos_ids, 0)
    outputs = []
    for token in ids[:cut_at]:
        output = RequestOutput(1)
        sequence.take(Sampled(token, 0.0, ()))
        sequence.show(output)
        if output.token_ids or sequence.finish_reason:
            outputs.append(output)
        assert output.token_ids or not output.text, "text without the tokens it stands for"
        if sequence.finish_reason:
            return outputs
    return [*outputs, sequence.cut_short("cancelled", None, {})]


@settings(max_examples=300, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=12), st.lists(st.integers(0, 40), max_size=3), st.integers(1, 5), st.booleans(), st.booleans())
def test_joined_outputs_are_the_answer(
    tokenizer: Tokenizer, pieces: list[str], stop_starts: list[int], stop_length: int, include: bool, by_character: bool
) -> None:
    whole = "".join(pieces)
    ids = [t for part in (whole if by_character else [whole]) for t in tokenizer.encode(part)]
    stops = (*(s for start in stop_starts if (s := whole[start : start + stop_length])), "aZZ", "\nZ", "🙂Z")
    params = SamplingParams(max_tokens=len(ids), stop=stops, include_stop_text=include, ignore_eos=True)
    outputs = outputs_of(tokenizer, ids, params)
    text, shown = "".join(o.text for o in outputs), [t for o in outputs for t in o.token_ids]
    hits = [(at + len(s), at) for s in stops if (at := whole.find(s)) >= 0]
    assert shown == ids[: len(shown)]
    if hits:
        end, start = min(hits)
        assert text == whole[: end if include else start]
        assert len(tokenizer.decode(shown)) >= end and outputs[-1].finish_reason is None
    else:
        assert shown == ids and text == whole


@settings(max_examples=100, deadline=None)
@given(st.lists(PIECES, min_size=1, max_size=8), st.data())
def test_a_cancelled_request_shows_all_it_generated(tokenizer: Tokenizer, pieces: list[str], data: st.DataObject) -> None:
    ids = tokenizer.encode("".join(pieces))
    cut = data.draw(st.integers(0, len(ids)))
    outputs = outputs_of(tokenizer, ids, SamplingParams(max_tokens=len(ids) + 1, stop=("abZ", "quick Z", "🇩🇪Z"), ignore_eos=True), cut)
    assert [t for o in outputs for t in o.token_ids] == ids[:cut]
    assert "".join(o.text for o in outputs) == tokenizer.decode(ids[:cut])
