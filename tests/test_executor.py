"""A real executor process: what its clients may do to it, and what becomes of them."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from oasiskv.config import EngineConfig
from oasiskv.engine.loop import EngineLoop
from oasiskv.engine.sequence import RequestOutput
from oasiskv.errors import ConfigError, EngineError
from oasiskv.executor import protocol, server, transport
from oasiskv.executor.client import ExecutorClient
from oasiskv.executor.protocol import Output

CONFIG = {"max_seq_len": 1024, "device_kv_gib": 0.25, "host_kv_gib": 0.5}


class Executor:
    def __init__(self, folder: Path, *flags: str) -> None:
        self.socket, self.key = folder / "e.sock", folder / "key"
        if not self.key.exists():
            transport.write_key(self.key)
        command = [sys.executable, "-m", "oasiskv.executor", "--socket", str(self.socket), "--authkey-file", str(self.key)]
        self.process = subprocess.Popen([*command, "--config-json", json.dumps(CONFIG), *flags])

    def client(self, deadline_s: float = 60) -> ExecutorClient:
        return ExecutorClient(self.socket, self.key, deadline_s)


class Collector:
    """Takes a request's outputs; `finals` counts how often it was told that it ended."""

    def __init__(self) -> None:
        self.outputs: list[Output] = []
        self.finals = 0
        self.first, self.done = threading.Event(), threading.Event()

    def __call__(self, output: Output) -> None:
        self.outputs.append(output)
        self.first.set()
        if output.finished:
            self.finals += 1
            self.done.set()

    def wait(self) -> Output:
        assert self.done.wait(60), "the request did not end"
        return self.outputs[-1]


@pytest.fixture(scope="module")
def executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    running = Executor(tmp_path_factory.mktemp("x"))
    with running.client():
        pass
    yield running
    running.process.terminate()
    assert running.process.wait(30) == 0
    assert not running.socket.exists()


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.05)


def submit(client: ExecutorClient, prompt: list[int] | str = "Once upon a time", **params: object) -> tuple[int, Collector]:
    collector = Collector()
    return client.submit(prompt, {"max_tokens": 8, "ignore_eos": True, **params}, collector), collector


def test_text_and_token_prompts_answer_alike(executor: Executor) -> None:
    with executor.client() as client:
        many = [submit(client)[1] for _ in range(4)]
        texts = {c.wait().finish_reason and "".join(o.text for o in c.outputs) for c in many}
    assert len(texts) == 1
    assert all(c.wait().stats["generated_tokens"] == 8 and c.finals == 1 for c in many)


@pytest.mark.parametrize(
    ("params", "named"),
    [({"max_tokens": 0}, "max_tokens"), ({"max_tokens": 10**6}, "max_seq_len"), ({"nonsense": 1}, "nonsense"), ({"top_p": "x"}, "top_p"),
     ({"stop_word_ids": [[-1]]}, "stop_word_ids"), ({"stop": 5}, "stop"), ({"stop": 0}, "stop"),
     ({"stop_word_ids": False}, "stop_word_ids"), ({"stop": ["x"] * 65}, "stop"),
     ({"stop_word_ids": [[1]] * 65}, "stop_word_ids"), ({"logprobs": 21}, "logprobs"), ({"bad_word_ids": [5]}, "bad_words"),
     ({"bad_word_ids": [[10**6]]}, "bad_words"), ({"logit_bias": [[10**6, 1.0]]}, "logit_bias"), ({"end_id": 10**6}, "end_id"),
     ({"top_p": "x" * 10**7}, "top_p"), ({"end_id": "x"}, "end_id")],
)  # fmt: skip
def test_a_bad_request_fails_alone(executor: Executor, params: dict[str, object], named: str) -> None:
    with executor.client() as client:
        bad, good = submit(client, **params)[1], submit(client)[1]
        assert bad.wait().code == protocol.INVALID and named in bad.wait().error
        assert good.wait().finish_reason == "length"


def test_it_accepts_again_after_it_ran_out_of_descriptors(executor: Executor) -> None:
    limits = resource.prlimit(executor.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(executor.process.pid, resource.RLIMIT_NOFILE, (3, limits[1]))  # no new one, whatever it closes meanwhile
    try:
        with pytest.raises(EngineError, match="no executor answers"):
            executor.client(deadline_s=1.0)
    finally:
        resource.prlimit(executor.process.pid, resource.RLIMIT_NOFILE, limits)
    with executor.client() as client:
        assert submit(client)[1].wait().finish_reason == "length"


def test_stop_words_given_as_ids_match_across_tokens(executor: Executor) -> None:
    with executor.client() as client:
        whole = submit(client, max_tokens=16)[1]
        whole.wait()
        text, ids = "".join(o.text for o in whole.outputs), [t for o in whole.outputs for t in o.token_ids]
        cut = submit(client, max_tokens=16, stop_word_ids=[ids[5:8]])[1]
        assert cut.wait().finish_reason == "stop"
    shown = "".join(o.text for o in cut.outputs)
    assert text.startswith(shown) and len(shown) < len(text)


def test_log_probabilities_and_bad_words_travel(executor: Executor) -> None:
    with executor.client() as client:
        plain = submit(client, logprobs=2)[1]
        plain.wait()
        ids, logprobs = ([v for o in plain.outputs for v in getattr(o, name)] for name in ("token_ids", "logprobs"))
        assert [top[0] for _, top in logprobs] == [[t, p] for t, (p, _) in zip(ids, logprobs, strict=True)], "greedy: each is the best"
        assert all(top[1][1] <= own <= 0 for own, top in logprobs)
        _, bad = submit(client, bad_word_ids=[[ids[0]], ids[:2]], logit_bias=[[7, 1000.0]], logprobs=0)
        bad.wait()
        assert [t for o in bad.outputs for t in o.token_ids] == [7] * 8
        assert [v for o in bad.outputs for v in o.logprobs] == [[0.0, []]] * 8


LOGPROBS = b'{"v":2,"op":"output","id":1,"token_ids":[1],"text":"","finished":false,"logprobs":%s}'


@pytest.mark.parametrize(
    "value", [b"[1]", b"[[-1.0]]", b"[[NaN,[]]]", b"[[-1.0,[[1,1e999]]]]", b"[[-1.0,[]],[-1.0,[]]]", b"[[-1.0,[[0.5,-1.0]]]]"]
)
def test_log_probabilities_of_another_form_are_refused(value: bytes) -> None:
    assert protocol.decode_answer(LOGPROBS % b"[[-1.0,[[3,-1.0]]]]").logprobs == [[-1.0, [[3, -1.0]]]]
    with pytest.raises(protocol.ProtocolError, match="logprobs"):
        protocol.decode_answer(LOGPROBS % value)


def test_logits_travel_in_parts(executor: Executor) -> None:
    """Every frame keeps to the limit, and the parts are the whole, in order: the same as of the prompts' ends alone."""
    prompt = list(range(1000, 1300))
    with executor.client() as client:
        asked = submit(client, prompt, return_context_logits=True, return_generation_logits=True, stop=["never there"])[1]
        asked.wait()
        parts = [o.context_logits for o in asked.outputs if o.context_logits is not None]
        generated = np.concatenate([o.generation_logits for o in asked.outputs if o.generation_logits is not None])
        short = submit(client, prompt[:200], return_context_logits=True, max_tokens=1)[1]
        short.wait()
    whole = np.concatenate(parts)
    tokens = [t for o in asked.outputs for t in o.token_ids]
    assert whole.shape == (300, 49152) and generated.shape == (8, 49152) and generated.argmax(axis=1).tolist() == tokens
    assert len(parts) > 3 and max(p.nbytes for p in parts) <= protocol.MAX_ARRAY_BYTES
    assert np.array_equal(np.concatenate([o.context_logits for o in short.outputs if o.context_logits is not None]), whole[:200])
    first_token = next(i for i, o in enumerate(asked.outputs) if o.token_ids)
    assert all(o.context_logits is None for o in asked.outputs[first_token:])


@pytest.mark.parametrize("tokens", [1, 100, 400])
def test_an_output_of_any_length_fits_its_frames(tokens: int) -> None:
    logits = np.arange(tokens * 50_000, dtype=np.float32).reshape(tokens, 50_000)
    output = RequestOutput(3, [1] * tokens, "text", context_logits=logits, generation_logits=-logits, finished=True, finish_reason="stop")
    answers = [protocol.decode_answer(protocol.encode(a)) for a in server._answers(5, output)]
    assert [a.finished for a in answers] == [False] * (len(answers) - 1) + [True] and {a.id for a in answers} == {5}
    assert answers[-1].text == "text" and answers[-1].token_ids == [1] * tokens
    for name, expected in (("context_logits", logits), ("generation_logits", -logits)):
        assert np.array_equal(np.concatenate([v for a in answers if (v := getattr(a, name)) is not None]), expected)


HEAD = '{"v":2,"op":"output","id":1,"token_ids":[],"text":"","finished":false,"logprobs":[],"arrays":%s}\n'


@pytest.mark.parametrize(
    ("arrays", "size"),
    [("[]", 4), ('[["context_logits","float32",[1,2]]]', 4), ('[["context_logits","float32",[1,2]]]', 12), ("7", 8),
     ('[["context_logits","float64",[1,1]]]', 8), ('[["stats","float32",[1,2]]]', 8), ('[["context_logits","float32",[2]]]', 8),
     ('[["context_logits","float32",[-1,-2]]]', 8), ('[["context_logits","float32",[1.0,2]]]', 8), ('[[["x"],"float32",[1,2]]]', 8),
     ('[["context_logits","float32",[1,1]],["context_logits","float32",[1,1]]]', 8), ('[["context_logits","float32"]]', 8),
     ('[["context_logits","float32",[99999999,99999999]]]', 8), ('[["context_logits","float32",[0,2]]]', 0)],
)  # fmt: skip
def test_arrays_of_another_form_are_refused(arrays: str, size: int) -> None:
    good = protocol.decode_answer((HEAD % '[["context_logits","float32",[1,2]]]').encode() + np.array([1, 2], "<f4").tobytes())
    assert good.context_logits.tolist() == [[1.0, 2.0]]
    with pytest.raises(protocol.ProtocolError, match="arrays"):
        protocol.decode_answer((HEAD % arrays).encode() + bytes(size))


def test_a_guide_travels(executor: Executor) -> None:
    with executor.client() as client:
        bad = [
            submit(client, guide=g)[1]
            for g in ({"kind": "regex", "text": "("}, {"kind": "x"}, "json", {"text": "a"}, {"kind": "json", "more": 1})
        ]
        good = submit(client, guide={"kind": "choice", "text": '["violet"]'}, ignore_eos=False)[1]
        assert all(b.wait().code == protocol.INVALID and "guide" in b.wait().error for b in bad)
        assert good.wait().finish_reason == "stop" and "".join(o.text for o in good.outputs) == "violet"


def test_cancel(executor: Executor) -> None:
    with executor.client() as client:
        number, collector = submit(client, max_tokens=900)
        assert collector.first.wait(30)
        client.cancel(number)
        assert collector.wait().finish_reason == "cancelled"
        client.cancel(number)  # ended: nothing happens
        eventually(lambda: client.usage()["device_pages_free"] == client.usage()["device_pages"])


def test_a_client_that_dies_gives_its_pages_back(executor: Executor) -> None:
    with executor.client() as other:
        dying = executor.client()
        _, lost = submit(dying, max_tokens=900)
        assert lost.first.wait(30)
        dying.close()
        assert lost.wait().code == protocol.UNAVAILABLE and lost.finals == 1
        eventually(lambda: other.ping()["in_flight"] == 0)
        eventually(lambda: other.usage()["host_blocks_free"] == other.usage()["host_blocks"])
    with pytest.raises(EngineError, match="no connection"):
        submit(dying)


@pytest.mark.parametrize(
    "frame", [b"\xff", b"[]", b'{"v":1,"op":"ping","id":1}', b'{"v":2,"op":"ping","id":-1}', b'{"v":2,"op":"steal","id":1}',
              b'{"v":2,"op":"submit","id":1,"prompt":[1.5],"params":{}}', b"[" * 100_000],
)  # fmt: skip
def test_a_bad_frame_drops_only_its_sender(executor: Executor, frame: bytes) -> None:
    with executor.client() as bystander:
        raw = transport.connect(executor.socket, transport.read_key(executor.key), 5)
        raw.send_bytes(frame)
        assert isinstance(protocol.decode_answer(raw.recv_bytes()), protocol.Fault)
        with pytest.raises((EOFError, OSError)):
            raw.recv_bytes()
        assert submit(bystander)[1].wait().finish_reason == "length"


def test_only_a_dead_executors_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="not a socket"):
        transport.listen(path)
    assert path.read_text() == "mine"
    living = transport.listen(tmp_path / "s")
    with pytest.raises(ConfigError, match="another executor"):
        transport.listen(tmp_path / "s")
    living.close()
    transport.listen(tmp_path / "s").close()


def test_strangers_are_kept_out(executor: Executor, tmp_path: Path) -> None:
    transport.write_key(tmp_path / "other")
    with pytest.raises(EngineError, match="another key"):
        ExecutorClient(executor.socket, tmp_path / "other", deadline_s=5)
    (tmp_path / "other").chmod(0o644)
    with pytest.raises(ConfigError, match="others can read"):
        ExecutorClient(executor.socket, tmp_path / "other")
    with pytest.raises(EngineError, match="no executor answers"):
        ExecutorClient(tmp_path / "nobody", executor.key, deadline_s=0.2)
    assert executor.socket.stat().st_mode & 0o077 == 0


def test_every_request_ends_once_when_the_executor_is_killed(tmp_path: Path) -> None:
    victim = Executor(tmp_path, "--parent-pid", str(os.getpid()))
    client = victim.client()
    collectors = [submit(client, max_tokens=900)[1] for _ in range(3)]
    assert collectors[0].first.wait(30)
    victim.process.send_signal(signal.SIGKILL)
    victim.process.wait()
    assert all(c.wait().code == protocol.UNAVAILABLE and c.finals == 1 for c in collectors)
    assert client.closed
    # The socket's file is still there: the next one replaces it, drains at SIGTERM, and refuses what comes after.
    successor = Executor(tmp_path, "--drain-s", "30")
    with successor.client() as again:
        running = submit(again, max_tokens=60)[1]
        assert running.first.wait(30)
        successor.process.terminate()
        eventually(lambda: (late := submit(again)[1]).wait() and late.outputs[-1].code == protocol.UNAVAILABLE)
        assert running.wait().finish_reason == "length"
    assert successor.process.wait(30) == 0


def test_it_dies_with_its_parent(tmp_path: Path) -> None:
    transport.write_key(tmp_path / "key")
    program = (
        "import os,subprocess,sys,time;"
        "p=subprocess.Popen([sys.executable,'-m','oasiskv.executor','--socket',sys.argv[1],'--authkey-file',sys.argv[2],"
        "'--parent-pid',str(os.getpid())]);print(p.pid,flush=True);time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "s"), str(tmp_path / "key")], stdout=subprocess.PIPE, text=True
    )
    child = int(parent.stdout.readline())
    # `exit 1` instead of dying with it is fine too: it then came up after the parent was gone.
    parent.kill()
    parent.wait()
    eventually(lambda: _gone(child))


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_a_guide_that_compiles_long_holds_up_nobody(tmp_path: Path) -> None:
    """Not even the requests of its own connection, which may carry many users'."""
    loop = EngineLoop(EngineConfig(**CONFIG))
    transport.write_key(tmp_path / "key")
    serving = server.ExecutorServer(loop, tmp_path / "s", transport.read_key(tmp_path / "key"), {})
    compiling, go = threading.Event(), threading.Event()
    compile_guide = loop._engine._guides._compile

    def slowly(guide: object) -> object:
        compiling.set()
        assert go.wait(60)
        return compile_guide(guide)

    loop._engine._guides._compile = slowly
    with ExecutorClient(tmp_path / "s", tmp_path / "key") as client:
        running = submit(client, max_tokens=40)[1]
        assert running.first.wait(30)
        guided = submit(client, guide={"kind": "regex", "text": "(yes|no)"})[1]
        assert compiling.wait(30)
        try:
            assert running.wait().finish_reason == "length"
        finally:
            go.set()
        assert guided.wait().finish_reason == "stop"
    serving.close(0.0)
