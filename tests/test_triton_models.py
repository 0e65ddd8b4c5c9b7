"""The model repository on the real Triton server, with both transaction policies, beside one executor and the embedded model."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

import triton_pair
from oasiskv.engine.llm import LLM
from oasiskv.engine.sampling import SamplingParams
from oasiskv.executor.client import ExecutorClient
from oasiskv.tokenizer import Tokenizer
from triton_pair import Stream, core_inputs, infer, text_inputs

OPTIONS = {"model": "smollm2-135m", "max_seq_len": 2048, "device_kv_gib": 0.25, "host_kv_gib": 0.5}
MODELS = ("ensemble", "tensorrt_llm_bls")
PROMPTS = ["Once upon a time", "Grüße aus Köln: ein Straßencafé", "日本の首都は", "I ❤️ emoji 😀🎉, e.g. 🦊 and"]
TOKENS = 16


class Pair(NamedTuple):
    folder: Path
    decoupled: int  # gRPC ports
    unary: int

    def executor(self) -> ExecutorClient:
        return ExecutorClient(self.folder / "sock", self.folder / "key")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with (
        triton_pair.executor(OPTIONS) as folder,
        triton_pair.server(folder, "a", "oasis_top_k_blocks=128", "oasis_max_seq_len=2048") as decoupled,
        triton_pair.server(folder, "b", "decoupled_mode=false", "exclude_input_in_output=true", "max_queue_size=16") as unary,
    ):
        yield Pair(folder, decoupled, unary)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**OPTIONS) as made:
        yield made


def expected(llm: LLM, prompt: str, **options: Any) -> str:
    options = {"max_tokens": TOKENS, "ignore_eos": True, **options}
    return llm.generate([prompt], SamplingParams(**options))[0].text


def stop_in(text: str) -> str:
    """Three characters near its beginning: seldom whole tokens. U+FFFD, of half a character, cannot be in a stop string."""
    return next(text[i : i + 3] for i in range(2, len(text) - 3) if "\ufffd" not in text[i : i + 3])


def eventually(condition: Callable[[], bool], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


@pytest.mark.parametrize("model", MODELS)
def test_text_is_that_of_the_llm_class(pair: Pair, llm: LLM, model: str) -> None:
    for prompt in PROMPTS:
        want = expected(llm, prompt)
        streamed = Stream(pair.decoupled, model, text_inputs(prompt, TOKENS, stream=True)).wait()
        whole = Stream(pair.decoupled, model, text_inputs(prompt, TOKENS, exclude_input_in_output=True)).wait()
        assert streamed.text == whole.text == want and len(streamed.responses) > 2
        assert infer(pair.unary, model, text_inputs(prompt, TOKENS))["text_output"].tolist() == [want.encode()]


@pytest.mark.parametrize("model", MODELS)
def test_stop_strings_split_over_tokens(pair: Pair, llm: LLM, model: str) -> None:
    for prompt in PROMPTS:
        text = expected(llm, prompt)
        stop = stop_in(text)
        want = expected(llm, prompt, stop=[stop])
        assert len(want) < len(text)
        inputs = text_inputs(prompt, TOKENS, stop_words=["", stop, "never, ever"])
        assert Stream(pair.decoupled, model, {**inputs, "stream": True}).wait().text == want
        assert infer(pair.unary, model, inputs)["text_output"].tolist() == [want.encode()]


@pytest.mark.parametrize("model", MODELS)
def test_without_exclude_input_in_output_the_text_begins_with_the_prompt(pair: Pair, llm: LLM, model: str) -> None:
    """As in TensorRT-LLM: unless it is streamed, and cut before a stop string all the same."""
    prompt = PROMPTS[3]
    text = expected(llm, prompt)
    assert Stream(pair.decoupled, model, text_inputs(prompt, TOKENS)).wait().text == prompt + text
    stopped = Stream(pair.decoupled, model, text_inputs(prompt, TOKENS, stop_words=[stop_in(text)])).wait().text
    assert stopped == prompt + expected(llm, prompt, stop=[stop_in(text)])
    answer = infer(pair.unary, model, text_inputs(prompt, TOKENS, exclude_input_in_output=False))
    assert answer["text_output"].tolist() == [(prompt + text).encode()]


@pytest.mark.parametrize("model", MODELS)
def test_sampling_options_are_the_llm_classs(pair: Pair, llm: LLM, tokenizer: Tokenizer, model: str) -> None:
    prompt = PROMPTS[0]
    bad, liked = expected(llm, prompt).split()[0], " queen"
    names = {
        "temperature": 0.75, "top_k": 40, "top_p": 0.875, "seed": 7, "repetition_penalty": 1.25, "presence_penalty": 0.5,
        "frequency_penalty": 0.25, "min_tokens": 3,
    }  # fmt: skip
    bias = [(token, 4.0) for token in tokenizer.encode(liked, bos=False)]
    words = {"bad_words": tuple(tuple(tokenizer.encode(w, bos=False)) for w in (bad, f" {bad}")), "logit_bias": tuple(bias)}
    want = expected(llm, prompt, **names, **words)
    inputs = text_inputs(
        prompt, TOKENS, **names, bad_words=[bad, f" {bad}"], embedding_bias_words=[liked], embedding_bias_weights=[4.0], stream=True
    )
    assert Stream(pair.decoupled, model, inputs).wait().text == want
    assert want != expected(llm, prompt, **names)  # the words count
    assert want != expected(llm, prompt, **{**names, "seed": 8}, **words)


@pytest.mark.parametrize("model", MODELS)
def test_a_guide_of_nvidias_names(pair: Pair, model: str) -> None:
    guide = {"guided_decoding_guide_type": "regex", "guided_decoding_guide": "(yes|no)!"}
    inputs = {name: value for name, value in text_inputs("Is it?", TOKENS, stream=True, **guide).items() if name != "end_id"}
    assert Stream(pair.decoupled, model, inputs).wait().text in ("yes!", "no!")


def test_core_outputs(pair: Pair, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPTS[0])
    stream = Stream(pair.decoupled, "tensorrt_llm", core_inputs(ids, 6, streaming=True, return_log_probs=True)).wait()
    assert stream.finals == [False] * (len(stream.finals) - 1) + [True]
    new = np.concatenate([r["output_ids"] for r in stream.responses], axis=2)
    assert new.shape == (1, 1, 6) and all(r["sequence_length"].tolist() == [[r["output_ids"].shape[2]]] for r in stream.responses)
    log_probs = np.concatenate([r["output_log_probs"] for r in stream.responses], axis=2)
    assert log_probs.shape == (1, 1, 6) and (log_probs < 0).all()
    assert np.isclose(stream.responses[-1]["cum_log_probs"], log_probs.sum())
    assert [("oasis_stats" in r) for r in stream.responses] == stream.finals
    whole = Stream(pair.decoupled, "tensorrt_llm", core_inputs(ids, 6)).wait().responses
    assert len(whole) == 1 and whole[0]["output_ids"].reshape(-1).tolist() == ids + new.reshape(-1).tolist()
    assert whole[0]["oasis_prompt_length"].tolist() == [[len(ids)]] and "output_log_probs" not in whole[0]
    short = infer(pair.unary, "tensorrt_llm", core_inputs(ids, 6, return_log_probs=True))
    assert short["output_ids"].tolist() == new.tolist() and short["output_log_probs"].shape == (1, 1, 6)


def test_logits_and_figures_of_a_request(pair: Pair, tokenizer: Tokenizer) -> None:
    """Through the ensemble and the BLS as from the core; each only where it is asked for."""
    asked = {f"return_{name}": True for name in ("context_logits", "generation_logits", "perf_metrics")}
    text = text_inputs(PROMPTS[0], 3, **asked)
    core = core_inputs(tokenizer.encode(PROMPTS[0]), 3, **asked)
    answers = [infer(pair.unary, model, core if model == "tensorrt_llm" else text) for model in ("tensorrt_llm", *MODELS)]
    tokens = answers[0]["output_ids"].reshape(-1).tolist()
    for answer in answers:
        context, generation = answer["context_logits"], answer["generation_logits"]
        assert context.shape == (1, len(tokenizer.encode(PROMPTS[0])), generation.shape[3]) and generation.shape[:3] == (1, 1, 3)
        assert context[0, -1].argmax() == tokens[0] and generation[0, 0].argmax(axis=1).tolist() == tokens
        times = [int(answer[f"{name}_time_ns"].item()) for name in ("arrival", "first_scheduled", "first_token", "last_token")]
        assert times == sorted(times) and times[0] > 0
        blocks = [int(answer[f"kv_cache_{name}_blocks"].item()) for name in ("alloc_new", "reused", "alloc_total")]
        assert blocks[0] + blocks[1] == blocks[2] > 0
        assert answer["acceptance_rate"].item() == 0
    plain = infer(pair.unary, "ensemble", text_inputs(PROMPTS[0], 3))
    assert set(plain) == {"text_output", "oasis_stats"}


@pytest.mark.parametrize("streaming", [False, True])
def test_rows_and_sequences_of_one_request(pair: Pair, tokenizer: Tokenizer, streaming: bool) -> None:
    rows = [tokenizer.encode(p) for p in ("Once upon a time", "The capital of France is")]
    width = max(map(len, rows))
    one = np.ones((2, 1), dtype=np.int32)
    inputs = {
        "input_ids": np.array([r + [0] * (width - len(r)) for r in rows], dtype=np.int32),
        "input_lengths": np.array([[len(r)] for r in rows], dtype=np.int32),
        "request_output_len": 5 * one, "end_id": -one, "num_return_sequences": 3 * one, "runtime_top_k": 20 * one,
        "seed": np.array([[11], [40]], dtype=np.uint64), "streaming": np.full((2, 1), streaming),
        "exclude_input_in_output": np.full((2, 1), True),
    }  # fmt: skip
    stream = Stream(pair.decoupled, "tensorrt_llm", inputs).wait()
    assert stream.finals.count(True) == 1 and stream.finals[-1]
    got: dict[tuple[int, int], list[int]] = {}
    for r in stream.responses:
        got.setdefault((int(r["batch_index"]), int(r["sequence_index"])), []).extend(r["output_ids"].reshape(-1).tolist())
    assert set(got) == {(b, s) for b in range(2) for s in range(3)} and (streaming or len(stream.responses) == 6)
    for (row, sequence), ids in got.items():
        alone = core_inputs(rows[row], 5, runtime_top_k=20, seed=(11, 40)[row] + sequence)
        assert infer(pair.unary, "tensorrt_llm", alone)["output_ids"].reshape(-1).tolist() == ids


@pytest.mark.parametrize("model", MODELS)
def test_rows_through_text_models(pair: Pair, llm: LLM, model: str) -> None:
    texts = np.array([[p.encode()] for p in PROMPTS], dtype=np.object_)
    one = np.ones((len(PROMPTS), 1), dtype=np.int32)
    inputs = {"text_input": texts, "max_tokens": TOKENS * one, "end_id": -one, "stream": one.astype(np.bool_)}
    got = [""] * len(PROMPTS)
    for r in Stream(pair.decoupled, model, inputs).wait().responses:
        if "text_output" in r:
            got[int(r["batch_index"])] += r["text_output"][0].decode()
    assert got == [expected(llm, p) for p in PROMPTS]


F16, U64 = np.float16, np.uint64


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("beam_width", 2), ("len_penalty", 2.0), ("early_stopping", True), ("beam_search_diversity_rate", 0.5),
        ("runtime_top_p_min", 0.5), ("runtime_top_p_decay", 0.5), ("runtime_top_p_reset_ids", 3), ("draft_input_ids", [1, 2]),
        ("draft_logits", np.ones((1, 1, 4), np.float32)), ("prompt_embedding_table", np.ones((1, 2, 4), F16)), ("prompt_vocab_size", 2),
        ("lora_task_id", np.ones((1, 1), U64)), ("lora_weights", np.ones((1, 1, 4), F16)), ("lora_config", np.ones((1, 1, 3), np.int32)),
        ("lookahead_window_size", 3), ("retention_decode_priority", 1), ("retention_token_range_starts", [0]),
        ("context_phase_params", np.ones((1, 4), np.uint8)), ("decoder_input_ids", [1, 2]),
        ("mrope_position_deltas", np.ones((1, 1), np.int64)), ("num_return_sequences", 65), ("embedding_bias", [float("nan")]),
        ("guided_decoding_guide_type", "xml"), ("stop_words_list", np.array([[[1, 2], [2, 1]]], np.int32)), ("runtime_top_p", 1.5),
        ("temperature", -1.0),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused_by_name(pair: Pair, name: str, value: Any) -> None:
    with pytest.raises(InferenceServerException, match=name.removeprefix("runtime_")) as caught:
        infer(pair.unary, "tensorrt_llm", core_inputs([5, 6, 7], 3, **{name: value}))
    assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("name", "value"),
    [("beam_width", 1), ("len_penalty", 1.0), ("early_stopping", False), ("runtime_top_p_decay", 1.0), ("decoder_input_ids", [2]),
     ("draft_input_ids", np.zeros((1, 0), np.int32)), ("lora_task_id", np.zeros((1, 1), U64)), ("pad_id", 7)],
)  # fmt: skip
def test_values_that_change_nothing_are_taken(pair: Pair, name: str, value: Any) -> None:
    plain = infer(pair.unary, "tensorrt_llm", core_inputs([500, 600, 700], 3))["output_ids"]
    assert infer(pair.unary, "tensorrt_llm", core_inputs([500, 600, 700], 3, **{name: value}))["output_ids"].tolist() == plain.tolist()


@pytest.mark.parametrize("model", MODELS)
def test_refusals_reach_through_the_text_models(pair: Pair, model: str) -> None:
    named = r"beam_width|DECODER_QUERY|STOP_WORDS_DICT|max_tokens"
    for more in ({"beam_width": 2}, {"decoder_text_input": "x"}, {"stop_words": ["x"] * 65}, {"max_tokens": 0}):
        inputs = {**text_inputs("a", 3), **more}
        with pytest.raises(InferenceServerException, match=named):
            Stream(pair.decoupled, model, inputs).wait()
        with pytest.raises(InferenceServerException, match=named) as caught:
            infer(pair.unary, model, inputs)
        assert caught.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_without_decoupling_one_response_is_all_there_is(pair: Pair) -> None:
    for more, named in (({"streaming": True}, "streaming"), ({"num_return_sequences": 2}, "num_return_sequences")):
        with pytest.raises(InferenceServerException, match=f"{named}.*decoupled_mode"):
            infer(pair.unary, "tensorrt_llm", core_inputs([5, 6], 3, **more))


@pytest.mark.parametrize("model", ["tensorrt_llm", *MODELS])
def test_without_decoupling_requests_run_at_the_same_time(pair: Pair, model: str) -> None:
    inputs = core_inputs([5, 6, 7], 60) if model == "tensorrt_llm" else text_inputs("Once upon a time", 60)
    with pair.executor() as client, ThreadPoolExecutor(6) as pool:
        answers = [pool.submit(infer, pair.unary, model, inputs) for _ in range(6)]
        eventually(lambda: client.ping()["in_flight"] == 6 or all(a.done() for a in answers))
        assert not any(a.done() for a in answers), "one at a time"
        assert len({str(a.result()["oasis_stats" if model != "tensorrt_llm" else "output_ids"].shape) for a in answers}) == 1


def long_request(model: str, streaming: bool) -> dict[str, Any]:
    if model == "tensorrt_llm":
        return core_inputs([5, 6, 7], 1800, streaming=streaming)
    return text_inputs("Once upon a time", 1800, stream=streaming)


@pytest.mark.parametrize("model", ["tensorrt_llm", *MODELS])
def test_stop_by_id(pair: Pair, model: str) -> None:
    for port, streaming in ((pair.decoupled, True), (pair.unary, False)):
        stream = Stream(port, model, long_request(model, streaming), request_id="it")
        other = Stream(port, model, long_request(model, streaming), request_id="other")
        with pair.executor() as client:
            eventually(lambda c=client: c.ping()["in_flight"] == 2)
            stop = Stream(port, "tensorrt_llm", core_inputs([1], 1, stop=True), request_id="it").wait(20)
            assert stop.responses == [{}]
            stream.wait(20)
            assert client.ping()["in_flight"] == 1, "the other one runs on"
            Stream(port, "tensorrt_llm", core_inputs([1], 1, stop=True), request_id="other").wait(20)
            other.wait(20)
            eventually(lambda c=client: c.ping()["in_flight"] == 0)


@pytest.mark.parametrize("model", ["tensorrt_llm", "tensorrt_llm_bls"])  # Triton passes no cancellation on through an ensemble
def test_cancelled_requests_end(pair: Pair, model: str) -> None:
    """Those of the same id, which a client that is still there has sent, run on."""
    with pair.executor() as client, grpcclient.InferenceServerClient(f"127.0.0.1:{pair.unary}") as unary:
        kept = Stream(pair.decoupled, model, long_request(model, True), request_id="same")
        dropped = Stream(pair.decoupled, model, long_request(model, True), request_id="same")
        eventually(lambda: client.ping()["in_flight"] == 2 and len(dropped.responses) > 1)
        dropped.drop()
        eventually(lambda: client.ping()["in_flight"] == 1, 10)
        seen = len(kept.responses)
        eventually(lambda: len(kept.responses) > seen + 2, 10)
        kept.drop()
        eventually(lambda: client.ping()["in_flight"] == 0, 10)

        tensors = [triton_pair.tensor(name, value) for name, value in long_request(model, False).items()]
        cancelled = unary.async_infer(model, tensors, callback=lambda result, error: None)
        eventually(lambda: client.ping()["in_flight"] == 1)
        cancelled.cancel()
        eventually(lambda: client.ping()["in_flight"] == 0, 10)
        with pytest.raises(InferenceServerException, match="Deadline"):
            unary.infer(model, tensors, client_timeout=2.0)
        eventually(lambda: client.ping()["in_flight"] == 0, 10)


def test_more_than_the_queue_takes_is_unavailable(pair: Pair) -> None:
    """Preprocessing holds up its callers; its queue has 16 places."""
    inputs = {"QUERY": "many words " * 50_000, "REQUEST_OUTPUT_LEN": 1}
    outcomes: list[str] = []

    def ask() -> None:
        try:
            infer(pair.unary, "preprocessing", inputs)
            outcomes.append("answered")
        except InferenceServerException as error:
            outcomes.append(str(error.status()))

    threads = [threading.Thread(target=ask) for _ in range(64)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(120)
    assert set(outcomes) == {"answered", "StatusCode.UNAVAILABLE"} and len(outcomes) == 64
    assert infer(pair.unary, "preprocessing", {**inputs, "QUERY": "fine"})["REQUEST_INPUT_LEN"].tolist() == [[1]]


def test_an_executor_with_other_options_is_refused_at_load(pair: Pair) -> None:
    with (
        pytest.raises(AssertionError, match="oasis_top_k_blocks = '64', but the executor runs with 128"),
        triton_pair.server(pair.folder, "other", "oasis_top_k_blocks=64"),
    ):
        pass
