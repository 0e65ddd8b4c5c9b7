"""NVIDIA's tensors and templates as pure functions, without a server."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oasiskv.errors import RequestError
from oasiskv.executor.protocol import INTERNAL, INVALID, Output
from oasiskv.serve import contract
from oasiskv.serve.call import Call
from oasiskv.serve.contract import bls
from oasiskv.serve.contract.refused import NEUTRAL, REFUSED
from oasiskv.tokenizer import Tokenizer


def inputs(**more: Any) -> dict[str, np.ndarray]:
    base = {"input_ids": [[5, 6, 7]], "input_lengths": [3], "request_output_len": [4]}
    return {name: np.asarray(value, dtype=np.int32 if name in base else None) for name, value in {**base, **more}.items()}


def one(**more: Any) -> contract.CoreRequest:
    return contract.core_requests(inputs(**more), decoupled=True, exclude_prompt=False)[0]


def test_a_request_of_several_rows() -> None:
    rows = contract.core_requests(
        inputs(input_ids=[[5, 6, 7], [8, 9, 0]], input_lengths=[3, 2], request_output_len=[4, 6], seed=np.array([1, 2**64 - 1], np.uint64)),
        decoupled=True, exclude_prompt=True,
    )  # fmt: skip
    assert [r.prompt for r in rows] == [[5, 6, 7], [8, 9]] and [r.params["max_tokens"] for r in rows] == [4, 6]
    assert [rows[1].sequence(i)["seed"] for i in range(2)] == [2**64 - 1, 0], "the seed wraps"


def test_who_gets_the_prompt_back() -> None:
    assert one().with_prompt and not one(streaming=[True]).with_prompt and not one(exclude_input_in_output=[True]).with_prompt
    assert not contract.core_requests(inputs(), True, exclude_prompt=True)[0].with_prompt
    assert contract.core_requests(inputs(exclude_input_in_output=[False]), True, exclude_prompt=True)[0].with_prompt


def test_what_a_request_asks_of_the_executor() -> None:
    bias = np.zeros((1, 9), np.float32)
    bias[0, 4] = -2
    guide = {name: np.array([[text]], object) for name, text in (("guided_decoding_guide_type", b"json"), ("guided_decoding_guide", b""))}
    words = np.array([[[1, 2, 3], [1, 3, -1]]], np.int32)
    params = one(embedding_bias=bias, bad_words_list=words, return_log_probs=[True], return_context_logits=[True], **guide).params
    assert params["logit_bias"] == [[4, -2.0]] and params["bad_word_ids"] == [[1], [2, 3]] and params["logprobs"] == 0
    assert params["guide"] == {"kind": "json", "text": ""} and params["return_context_logits"] is True
    plain = one().params
    assert not plain.keys() & {"logit_bias", "bad_word_ids", "guide", "logprobs", "return_context_logits"}
    assert "return_context_logits" not in one(return_context_logits=[True]).sequence(1)


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"input_ids": np.zeros((0, 3), np.int32)}, "input_ids"),
        ({"input_lengths": [4]}, "input_lengths = 4"),
        ({"input_lengths": [-1]}, "input_lengths"),
        ({"seed": [1, 2]}, "seed: shape"),
        ({"temperature": [[1.0, 2.0]]}, "temperature"),
        ({"num_return_sequences": [0]}, "num_return_sequences"),
        ({"embedding_bias": [[float("inf")]]}, "embedding_bias"),
        ({"guided_decoding_guide": np.array([[b"x"]], object)}, "guided_decoding_guide_type"),
        ({"guided_decoding_guide_type": np.array([[b"\xff"]], object)}, "not UTF-8"),
    ],
)
def test_malformed_requests_are_refused_by_name(more: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        one(**more)


@given(st.sampled_from(sorted(REFUSED)), hnp.arrays(np.float32, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=3)))
def test_a_refused_input_passes_only_if_it_is_empty_or_neutral(name: str, values: np.ndarray) -> None:
    values = values[np.newaxis]
    if values.size == 0 or np.isin(values, NEUTRAL.get(name, ())).all():
        one(**{name: values})
    else:
        with pytest.raises(RequestError, match=name):
            one(**{name: values})


SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=3)
KINDS = {  # Triton has checked the types
    **dict.fromkeys(("input_ids", "input_lengths", "request_output_len", "runtime_top_k", "stop_words_list", "bad_words_list"), np.int32),
    **dict.fromkeys(("num_return_sequences", "end_id", "decoder_input_ids"), np.int32),
    **dict.fromkeys(("embedding_bias", "temperature", "runtime_top_p"), np.float32),
    **dict.fromkeys(("streaming", "stop", "return_log_probs"), np.bool_),
    "seed": np.uint64,
}


@given(st.fixed_dictionaries({}, optional={name: hnp.arrays(kind, SHAPES) for name, kind in KINDS.items()}))
def test_arrays_of_any_shape_are_taken_or_refused(arrays: dict[str, np.ndarray]) -> None:
    try:
        contract.is_stop(arrays)
        requests = contract.core_requests(arrays, decoupled=True, exclude_prompt=True)
    except RequestError:
        return
    assert len(requests) == arrays["input_ids"].shape[0] and all(isinstance(r.prompt, list) for r in requests)


@given(st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=5), max_size=6), st.integers(1, 40))
def test_word_lists_round_trip_at_any_width(words: list[list[int]], width: int) -> None:
    packed = contract.pack_words(words, width)
    assert packed.shape[1] >= width and contract.unpack_words(packed, "x") == words


# ---------------------------------------------------------------- responses


class Reply:
    def __init__(self) -> None:
        self.sent: list[tuple[dict[str, np.ndarray], bool]] = []
        self.failed: list[tuple[str, str]] = []

    def send(self, tensors: contract.Tensors, final: bool) -> None:
        self.sent.append((tensors, final))

    def fail(self, code: str, message: str) -> None:
        self.failed.append((code, message))

    def is_cancelled(self) -> bool:
        return False


class Client:
    """Takes requests and cancels; the test answers."""

    def __init__(self) -> None:
        self.listeners: list[Any] = []
        self.cancelled: list[int] = []

    def submit(self, prompt: list[int], params: dict[str, Any], listener: Any) -> int:
        self.listeners.append(listener)
        return len(self.listeners) - 1

    def cancel(self, number: int) -> None:
        self.cancelled.append(number)


def call(wanted: str, **more: Any) -> tuple[Client, Reply, list[Call]]:
    client, reply, ended = Client(), Reply(), []
    Call([one(**more)], frozenset(wanted.split()), np.float32, reply, ended.append).start(client)
    return client, reply, ended


STATS = {"draft_tokens": 4, "draft_accepted": 1, "kv_blocks_new": 2, "kv_blocks_reused": 3, "kv_blocks_total": 5} | {
    f"{name}_ns": 10**12 for name in ("arrival", "first_scheduled", "first_token", "last_token")
}


def output(tokens: list[int], finished: bool = False, **more: Any) -> Output:
    return Output(0, tokens, "x" * len(tokens), finished, "length" if finished else None, stats=STATS, **more)


def test_final_is_on_the_last_response_of_the_last_sequence() -> None:
    client, reply, ended = call("output_ids sequence_index", streaming=[True], num_return_sequences=[2])
    client.listeners[1](output([1]))
    client.listeners[1](output([]))  # nothing to tell: no response
    client.listeners[1](output([2], finished=True))
    assert not ended
    client.listeners[0](output([3], finished=True))
    assert [(t["sequence_index"].item(), t["output_ids"].tolist(), final) for t, final in reply.sent] == [
        (1, [[[1]]], False), (1, [[[2]]], False), (0, [[[3]]], True),
    ]  # fmt: skip
    assert len(ended) == 1 and not client.cancelled


@pytest.mark.parametrize(
    "final", [Output(0, finished=True, finish_reason="error", code=INVALID, error="why"), output([1], True, logprobs=[[0]])]
)
def test_when_one_sequence_fails_the_others_are_cancelled_and_nothing_more_is_sent(final: Output) -> None:
    """The second: an output that cannot be made into a response."""
    client, reply, ended = call("output_ids output_log_probs", num_return_sequences=[3], return_log_probs=[True])
    client.listeners[1](final)
    client.listeners[0](output([5], finished=True, logprobs=[[-1.0, []]]))
    assert [code for code, _ in reply.failed] == [final.code or INTERNAL] and not reply.sent and len(ended) == 1
    assert {0, 2} <= set(client.cancelled)


def test_a_response_has_what_was_asked_and_wanted() -> None:
    names = "output_ids sequence_length oasis_text oasis_stats oasis_prompt_length acceptance_rate arrival_time_ns kv_cache_reused_blocks"
    client, reply, _ = call(names)
    client.listeners[0](output([8, 9], finished=True))
    tensors = reply.sent[0][0]
    assert set(tensors) == {"output_ids", "sequence_length", "oasis_text", "oasis_stats", "oasis_prompt_length"}
    assert tensors["output_ids"].tolist() == [[[5, 6, 7, 8, 9]]] and tensors["oasis_prompt_length"].tolist() == [[3]]
    assert tensors["oasis_text"].tolist() == [[b"xx"]] and json.loads(tensors["oasis_stats"].item()) == STATS
    client, reply, _ = call(names, return_perf_metrics=[True])
    client.listeners[0](output([8], finished=True))
    tensors = reply.sent[0][0]
    assert tensors["acceptance_rate"].tolist() == [[0.25]] and tensors["kv_cache_reused_blocks"].tolist() == [[3]]
    assert tensors["arrival_time_ns"].dtype == np.int64
    client, reply, _ = call("output_ids")
    client.listeners[0](output([8], finished=True))
    assert set(reply.sent[0][0]) == {"output_ids"}


def test_logits_are_joined_from_their_parts() -> None:
    asked = {"return_context_logits": [True], "return_generation_logits": [True]}
    client, reply, _ = call("context_logits generation_logits", **asked)
    part = np.arange(8, dtype=np.float32).reshape(2, 4)
    client.listeners[0](output([], context_logits=part[:1]))
    client.listeners[0](output([1], context_logits=part[1:], generation_logits=part[:1]))
    client.listeners[0](output([2], finished=True, generation_logits=part[1:]))
    tensors = reply.sent[0][0]
    assert tensors["context_logits"].tolist() == [part.tolist()] and tensors["generation_logits"].tolist() == [[part.tolist()]]


# ---------------------------------------------------------------- text


def preprocess(tokenizer: Tokenizer, max_tokens: int = 100, **more: Any) -> dict[str, np.ndarray]:
    base = {"QUERY": np.array([[b"Hello"], [b"Once upon a time"]], object), "REQUEST_OUTPUT_LEN": np.array([[3], [4]], np.int32)}
    return contract.Preprocessor(tokenizer, True, max_tokens)({**base, **more})


def test_preprocessing_pads_rows_and_packs_words(tokenizer: Tokenizer) -> None:
    words = np.array([[b"a, b", b""], [b"stop here now", b"c"]], object)
    made = preprocess(tokenizer, STOP_WORDS_DICT=words, PAD_ID=np.array([[9], [8]], np.int32))
    long = tokenizer.encode("Once upon a time")
    assert made["INPUT_ID"].tolist() == [[*tokenizer.encode("Hello"), *[9] * (len(long) - 1)], long]
    assert made["REQUEST_INPUT_LEN"].tolist() == [[1], [len(long)]] and made["DECODER_INPUT_ID"].tolist() == [[9], [8]]
    lists = [contract.unpack_words(row, "x") for row in made["STOP_WORDS_IDS"]]
    assert lists == [[tokenizer.encode("a, b")], [tokenizer.encode("stop here now"), tokenizer.encode("c")]], "a comma is a character"
    assert made["EMBEDDING_BIAS"].shape == (2, 0) and contract.unpack_words(made["BAD_WORDS_IDS"][0], "x") == []
    assert made["OUT_END_ID"].tolist() == [[min(tokenizer.eos_ids)]] * 2


def test_a_bias_adds_up_over_the_tokens_of_its_words(tokenizer: Tokenizer) -> None:
    words, weights = np.array([[b" a", b" a"], [b" b", b""]], object), np.array([[1.5, 2], [4, 9]], np.float32)
    bias = preprocess(tokenizer, EMBEDDING_BIAS_WORDS=words, EMBEDDING_BIAS_WEIGHTS=weights)["EMBEDDING_BIAS"]
    assert bias.shape == (2, tokenizer.vocab_size)
    assert [{int(i): float(row[i]) for i in np.flatnonzero(row)} for row in bias] == [
        {tokenizer.encode(" a")[0]: 3.5}, {tokenizer.encode(" b")[0]: 4.0},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"DECODER_QUERY": np.array([[b"x"], [b""]], object)}, "DECODER_QUERY"),
        ({"IMAGE_BYTES": np.zeros((2, 1), np.uint8)}, "IMAGE_BYTES"),
        ({"PROMPT_TABLE_EXTRA_ID": np.ones((2, 1), np.uint64)}, "PROMPT_TABLE_EXTRA_ID"),
        ({"END_ID": np.ones((1, 1), np.int32)}, "END_ID"),
        ({"STOP_WORDS_DICT": np.array([[b"x"] * 65] * 2, object)}, "at most 64 words"),
        ({"QUERY": np.array([[b"\xff"]] * 2, object)}, "not UTF-8"),
        ({"EMBEDDING_BIAS_WORDS": np.array([[b"x"]] * 2, object)}, "EMBEDDING_BIAS_WEIGHTS"),
        ({"EMBEDDING_BIAS_WORDS": np.array([[b"x"]] * 2, object), "EMBEDDING_BIAS_WEIGHTS": np.full((2, 1), np.nan, np.float32)}, "finite"),
        ({"QUERY": np.array([[b"lorem ipsum " * 10**6]] * 2, object)}, "cannot fit"),
    ],
)
def test_texts_that_cannot_be_served_are_refused_by_name(tokenizer: Tokenizer, more: dict[str, Any], named: str) -> None:
    with pytest.raises(RequestError, match=named):
        preprocess(tokenizer, **more)


def test_postprocessing(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Once upon a time")
    tokens = {"TOKENS_BATCH": np.array([[[*ids, 7]]], np.int32), "SEQUENCE_LENGTH": np.array([[len(ids)]], np.int32)}
    assert contract.postprocess(tokenizer, tokens, True).tolist() == [b"Once upon a time"]
    exact = tokens | {"OASIS_TEXT": np.array([[b" a ti"]], object)}
    assert contract.postprocess(tokenizer, exact, True).tolist() == [b" a ti"]
    assert contract.postprocess(tokenizer, exact | {"OASIS_PROMPT_LENGTH": np.array([[2]], np.int32)}, True).tolist() == [b"Once upon a ti"]
    assert contract.postprocess(tokenizer, exact, False).tolist() == [b"Once upon a time"]
    end = {"TOKENS_BATCH": np.array([[[min(tokenizer.eos_ids)]]], np.int32), "SEQUENCE_LENGTH": np.array([[1]], np.int32)}
    assert contract.postprocess(tokenizer, end, True).tolist() == [b""] != contract.postprocess(tokenizer, end, False).tolist()
    for bad in (
        {"TOKENS_BATCH": np.array([[[-1]]], np.int32), "SEQUENCE_LENGTH": np.ones((1, 1), np.int32)},
        {**end, "SEQUENCE_LENGTH": np.ones(1)},
    ):
        with pytest.raises(RequestError, match="TOKENS_BATCH"):
            contract.postprocess(tokenizer, bad, True)


def test_the_bls_accumulates_text_by_row_and_sequence() -> None:
    texts = bls.Texts(accumulate=True)
    wanted = frozenset(["text_output", "batch_index"])

    def answer(row: int, text: bytes) -> bytes:
        return texts.answer({"batch_index": np.array([[row]])}, np.array([text], object), wanted)["text_output"].item()

    assert [answer(0, b"a"), answer(1, b"x"), answer(0, "é".encode())] == [b"a", b"x", "aé".encode()]
    assert bls.Texts(accumulate=False).answer({}, np.array([b"a"], object), wanted)["text_output"].tolist() == [b"a"]


def test_the_bls_passes_inputs_on_by_the_cores_names() -> None:
    given_ = {
        "text_input": np.array([[b"a"]], object),
        "top_k": np.ones((1, 1)),
        "length_penalty": np.ones((1, 1)),
        "return_log_probs": np.ones(1),
    }
    made = bls.core_inputs(given_, {"INPUT_ID": np.ones((1, 2)), "DECODER_INPUT_ID": np.ones((1, 1))})
    assert {name: array.shape for name, array in made.items()} == {
        "runtime_top_k": (1, 1), "len_penalty": (1, 1), "return_log_probs": (1, 1), "input_ids": (1, 2),
    }  # fmt: skip
    assert set(bls.preprocessing_inputs(given_)) == {"QUERY"}
    with pytest.raises(RequestError, match="num_draft_tokens"):
        bls.preprocessing_inputs({"num_draft_tokens": np.ones((1, 1))})


def test_an_errors_code_survives_a_bls() -> None:
    assert contract.unmarked(f"in model x: {contract.marked('UNAVAILABLE', 'no executor')}") == ("UNAVAILABLE", "in model x: no executor")
    assert contract.unmarked("plain") == ("INTERNAL", "plain")
