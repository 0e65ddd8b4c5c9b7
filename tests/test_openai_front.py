"""The OpenAI-compatible front of a real service, through OpenAI's own client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest

from oasiskv.serve.local import free_ports
from oasiskv.serve.openai import link
from oasiskv.serve.openai.errors import ApiError
from oasiskv.serve.openai.link import ExecutorLink, InFlight
from oasiskv.tokenizer import Tokenizer
from reference.service import Service, eventually

MODEL = "smollm2-135m"
MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]
STORY = "Once upon a time"
MAX_SEQ_LEN = 2048  # of Service
RECOVERY_S = 30.0


class Front(Service):
    def __init__(self, *more: str) -> None:
        self.port = free_ports(1)[0]
        super().__init__("--openai-port", str(self.port), *more)
        self.client = openai.OpenAI(base_url=f"{self.address}/v1", api_key="none", max_retries=0, timeout=120)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def chat(self, messages: list[dict[str, Any]] = MESSAGES, **options: Any) -> Any:
        return self.client.chat.completions.create(model=MODEL, messages=messages, **{"temperature": 0, "max_tokens": 24, **options})

    def complete(self, prompt: Any = STORY, **options: Any) -> Any:
        return self.client.completions.create(model=MODEL, prompt=prompt, **{"temperature": 0, **options})

    def health(self) -> int:
        try:
            return urllib.request.urlopen(f"{self.address}/health", timeout=10).status
        except urllib.error.HTTPError as error:
            return error.code

    def works(self) -> bool:
        with contextlib.suppress(openai.APIError):
            return bool(self.complete(max_tokens=1).choices)
        return False

    def idle(self) -> bool:
        """Nothing but the supervisor's probes, which are done at once, holds anything."""
        with self.executor() as executor:
            usage = executor.usage()
            return executor.ping()["in_flight"] == 0 and all(
                usage[f"{pool}_free"] == usage[pool] for pool in ("device_pages", "host_blocks", "summary_pages")
            )


@pytest.fixture(scope="module")
def front() -> Iterator[Front]:
    running = Front()
    yield running
    running.stop()


def test_a_streamed_chat_is_the_whole_one(front: Front, tokenizer: Tokenizer) -> None:
    whole = front.chat()
    chunks = list(front.chat(stream=True, stream_options={"include_usage": True}))
    *deltas, last = chunks
    assert deltas[0].choices[0].delta.role == "assistant" and not any(c.choices[0].delta.role for c in deltas[1:])
    assert len(deltas) > 10, "it came at once"
    assert "".join(c.choices[0].delta.content or "" for c in deltas) == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in deltas] == [None] * (len(deltas) - 1) + ["length"]
    assert last.choices == [] and last.usage == whole.usage and not any(c.usage for c in deltas)
    assert len({c.id for c in chunks}) == 1 and chunks[0].object == "chat.completion.chunk" and whole.object == "chat.completion"
    prompt = tokenizer.encode(tokenizer.apply_chat(MESSAGES))
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(prompt), 24)
    assert front.complete(prompt, max_tokens=24).choices[0].text == whole.choices[0].message.content


def test_a_streamed_completion_is_the_whole_one(front: Front, tokenizer: Tokenizer) -> None:
    whole = front.complete()
    chunks = list(front.complete(stream=True))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert not any(c.usage for c in chunks)
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (len(tokenizer.encode(STORY)), 16), "OpenAI's default"


def test_prompts_in_all_forms_answer_alike(front: Front, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(STORY)
    single = front.complete().choices[0].text
    assert front.complete(ids).choices[0].text == single
    for many in (["Hello", STORY], [tokenizer.encode("Hello"), ids]):
        answer = front.complete(many)
        assert [c.index for c in answer.choices] == [0, 1] and answer.choices[1].text == single != answer.choices[0].text
        assert answer.usage.prompt_tokens == len(ids) + len(tokenizer.encode("Hello")) and answer.usage.completion_tokens == 32


def test_content_parts_are_put_together(front: Front) -> None:
    parts = [{"type": "text", "text": "Tell me "}, {"type": "text", "text": "about the sea."}]
    assert front.chat([{"role": "user", "content": parts}]).choices == front.chat().choices


@pytest.mark.parametrize("stream", [False, True])
def test_stop_cuts_the_text(front: Front, stream: bool) -> None:
    text = front.complete(max_tokens=24).choices[0].text
    stop = text[20:24]
    answer = front.complete(max_tokens=24, stop=[stop], stream=stream)
    choices = [c.choices[0] for c in answer] if stream else answer.choices
    assert "".join(c.text for c in choices) == text[: text.index(stop)] and choices[-1].finish_reason == "stop"


def test_sequence_i_is_the_answer_of_seed_plus_i(front: Front) -> None:
    def ask(**options: Any) -> list[str]:
        return [c.message.content for c in front.chat(temperature=1, **options).choices]

    each = [ask(seed=40 + i)[0] for i in range(3)]
    assert len(set(each)) == 3
    assert ask(seed=40, n=3) == each
    texts = ["", "", ""]
    for chunk in front.chat(temperature=1, seed=40, n=3, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == each
    assert ask() != ask(), "without a seed each request has another"


def test_our_own_fields_reach_the_engine(front: Front) -> None:
    assert front.chat(temperature=1, extra_body={"top_k": 1}).choices == front.chat().choices
    filled = front.chat(max_tokens=openai.NOT_GIVEN, messages=[{"role": "user", "content": "sea " * 1980}], extra_body={"ignore_eos": True})
    assert filled.usage.total_tokens == MAX_SEQ_LEN, "without max_tokens it may take what the context leaves"
    assert filled.choices[0].finish_reason == "length"


def test_logprobs_are_those_of_the_tokens(front: Front, tokenizer: Tokenizer) -> None:
    whole = front.chat(logprobs=True, top_logprobs=3).choices[0]
    entries = whole.logprobs.content
    assert len(entries) == 24 and "".join(e.token for e in entries) == whole.message.content
    assert all(len(e.top_logprobs) == 3 and e.top_logprobs[0].token == e.token for e in entries), "greedy takes the likeliest"
    assert all(e.logprob == e.top_logprobs[0].logprob >= e.top_logprobs[1].logprob and e.logprob <= 0 for e in entries)
    chunks = front.chat(logprobs=True, top_logprobs=3, stream=True)
    assert [e for c in chunks for e in (c.choices[0].logprobs.content if c.choices[0].logprobs else [])] == entries
    legacy = front.complete(logprobs=2).choices[0]
    assert "".join(legacy.logprobs.tokens) == legacy.text and len(legacy.logprobs.token_logprobs) == 16
    pieces = [c.choices[0].logprobs for c in front.complete(logprobs=2, stream=True)]
    assert [o for p in pieces if p for o in p.text_offset] == legacy.logprobs.text_offset
    assert [t for p in pieces if p for t in p.top_logprobs] == legacy.logprobs.top_logprobs
    assert front.chat().choices[0].logprobs is None


def test_a_bias_rules_a_token_out(front: Front, tokenizer: Tokenizer) -> None:
    first = front.complete(max_tokens=1, logprobs=0).choices[0].text
    (token,) = tokenizer.encode(first)
    assert front.complete(max_tokens=1, logit_bias={str(token): -100}).choices[0].text != first
    with pytest.raises(openai.BadRequestError) as caught:
        front.complete(max_tokens=1, logit_bias={"999999999": 1})
    assert caught.value.param == "logit_bias"


def test_guides_hold_the_answer_to_their_form(front: Front) -> None:
    class Place(pydantic.BaseModel):
        name: str = pydantic.Field(max_length=12)
        old: bool

    asked = front.client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Place, max_tokens=200, temperature=0)
    assert isinstance(asked.choices[0].message.parsed, Place) and asked.choices[0].finish_reason == "stop"
    assert front.chat(extra_body={"guided_choice": ["north", "south"]}).choices[0].message.content in ("north", "south")
    assert re.fullmatch("[0-9]{3}x", front.complete(extra_body={"guided_regex": "[0-9]{3}x"}).choices[0].text)
    assert front.complete(extra_body={"guided_grammar": 'root ::= "a" "b"'}).choices[0].text == "ab"
    text = "".join(c.choices[0].text for c in front.complete(stream=True, extra_body={"guided_json": {"const": "sea"}}))
    assert json.loads(text) == "sea"
    with pytest.raises(openai.BadRequestError, match="guide"):
        front.complete(extra_body={"guided_regex": "("})


def test_json_object_begins_an_object(front: Front) -> None:
    assert front.chat(response_format={"type": "json_object"}).choices[0].message.content.lstrip().startswith("{")


def test_the_model_is_listed(front: Front) -> None:
    (model,) = front.client.models.list().data
    assert model.id == MODEL and model.max_model_len == MAX_SEQ_LEN
    assert front.client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError):
        front.client.models.retrieve("another")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("options", "kind", "param", "code"),
    [
        ({"top_p": 7}, openai.BadRequestError, "top_p", None),
        ({"max_tokens": 10**6}, openai.BadRequestError, None, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "word " * 100_000}]}, openai.BadRequestError, None, "context_length_exceeded"),
        ({"tools": []}, openai.BadRequestError, "tools", None),
        ({"extra_body": {"nonsense": 1}}, openai.BadRequestError, "nonsense", None),
        ({"model": "another"}, openai.NotFoundError, "model", "model_not_found"),
    ],
)
def test_refusals_have_openais_form(
    front: Front, stream: bool, options: dict[str, Any], kind: type[openai.APIStatusError], param: str | None, code: str | None
) -> None:
    with pytest.raises(kind) as caught:
        front.client.chat.completions.create(**{"model": MODEL, "messages": MESSAGES, "max_tokens": 3, "stream": stream, **options})
    assert (caught.value.param, caught.value.code, caught.value.type) == (param, code, "invalid_request_error")


def test_a_body_over_the_limit_is_413(front: Front) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        front.complete("x" * (17 << 20))
    assert caught.value.status_code == 413 and caught.value.code == "request_too_large"
    assert front.works()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_cancels_its_requests(front: Front, stream: bool) -> None:
    # Left running, they would take more than a minute.
    options = {"max_tokens": 1500, "n": 3, "stream": stream, "extra_body": {"ignore_eos": True}}
    if stream:
        answer = front.chat(**options)
        assert len([next(answer) for _ in range(6)]) == 6
        with front.executor() as executor:
            assert executor.ping()["in_flight"] >= 3
        answer.close()
    else:
        with pytest.raises(openai.APITimeoutError):
            front.chat(**options, timeout=2)
    eventually(front.idle, 5)


def test_concurrent_streams_equal_their_serial_answers(front: Front) -> None:
    def ask(i: int) -> str:
        question = [{"role": "user", "content": f"Tell me {i} things about the number {i * 7}."}]
        return "".join(c.choices[0].delta.content or "" for c in front.chat(question, stream=True, max_tokens=16 + i))

    serial = [ask(i) for i in range(16)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == serial
    assert len(set(serial)) == 16


def test_what_nobody_reads_is_given_up(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the front's own classes: the kernel's buffers would hide a client that reads slowly for long."""
    monkeypatch.setattr(link, "MAX_UNREAD", 20)
    socket_path, key = endpoint(front)

    async def read_nothing() -> None:
        connection = ExecutorLink(socket_path, key)
        try:
            async with InFlight(connection, [[500]], [{"max_tokens": 1500, "ignore_eos": True}]) as outputs:
                for _ in range(600):
                    await asyncio.sleep(0.1)
                    if outputs._closed:
                        break
                await asyncio.to_thread(eventually, front.idle, 5)  # of more than a minute, were it left running
                with pytest.raises(ApiError, match="not read in time"):
                    await anext(outputs)
        finally:
            connection.close()

    asyncio.run(read_nothing())


def endpoint(front: Front) -> tuple[Path, Path]:
    command = Path(f"/proc/{front.descendants('oasiskv.serve.openai')[0]}/cmdline").read_text().split("\0")
    return Path(command[command.index("--socket") + 1]), Path(command[command.index("--authkey-file") + 1])


def recovered(front: Front) -> int:
    return sum("recovered" in line for line in front.log)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])  # one that is stopped hangs: only the probe can tell
def test_a_front_that_dies_or_hangs_comes_back_alone(front: Front, number: signal.Signals) -> None:
    before, others = recovered(front), front.descendants("oasiskv.executor") + front.descendants("bin/tritonserver")
    (pid,) = front.descendants("oasiskv.serve.openai")
    os.kill(pid, number)
    eventually(lambda: recovered(front) > before, RECOVERY_S)
    assert front.works() and front.descendants("oasiskv.serve.openai") != [pid]
    assert front.descendants("oasiskv.executor") + front.descendants("bin/tritonserver") == others
    eventually(front.idle, 5)


def test_a_stream_ends_with_an_error_when_the_executor_dies_and_the_front_reconnects(front: Front) -> None:
    before, pid = recovered(front), front.descendants("oasiskv.serve.openai")
    options = {"max_tokens": 1500, "extra_body": {"ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        whole = pool.submit(front.chat, **options)
        answer = front.chat(**options, stream=True)
        assert len([next(answer) for _ in range(3)]) == 3
        os.kill(front.descendants("oasiskv.executor")[0], signal.SIGKILL)
        with pytest.raises(openai.APIError, match="the request was lost"):
            list(answer)
        with pytest.raises(openai.InternalServerError) as caught:
            whole.result()
    assert caught.value.status_code == 503 and caught.value.code == "service_unavailable"
    assert front.health() == 503
    with pytest.raises(openai.InternalServerError, match="no connection to the executor"):
        front.complete()
    eventually(lambda: recovered(front) > before, RECOVERY_S)
    assert front.works() and front.health() == 200
    assert front.descendants("oasiskv.serve.openai") == pid


def test_its_end_ends_streams_with_an_error_and_leaves_nothing() -> None:
    running = Front("--drain", "0")
    below = running.descendants()
    answer = running.chat(max_tokens=1500, stream=True, extra_body={"ignore_eos": True})
    next(answer)
    running.process.terminate()
    with pytest.raises(openai.APIError, match="shut down"):
        list(answer)
    assert running.process.wait(40) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in below)
    with socket.socket() as port:
        port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        port.bind(("127.0.0.1", running.port))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "oasiskv.cli", "serve", "--openai-port", str(port)]
        ports = free_ports(3)
        command += [x for name, p in zip(("grpc", "http", "metrics"), ports, strict=True) for x in (f"--{name}-port", str(p))]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith(f"oasiskv: error: --openai-port {port}") and done.stderr.count("\n") == 1
