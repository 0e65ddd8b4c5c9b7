"""The supervised service under faults: what is killed comes back, what is stopped leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from oasiskv.config import EngineConfig
from oasiskv.errors import ConfigError, RequestError, ServeError
from oasiskv.serve import contract, repo, runtime
from oasiskv.serve.child import Child
from oasiskv.serve.grpc_client import RemoteError, generate
from oasiskv.serve.options import ServeOptions
from reference.service import Service, alive, eventually, read

RECOVERY_S = 30.0


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    running = Service()
    yield running
    running.stop()


def core_inputs(**values: np.ndarray) -> list[grpcclient.InferInput]:
    kinds = {"int32": "INT32", "bool": "BOOL"}
    tensors = []
    for name, value in values.items():
        tensor = grpcclient.InferInput(name, list(value.shape), kinds[str(value.dtype)])
        tensor.set_data_from_numpy(value)
        tensors.append(tensor)
    return tensors


def core_request(tokens: int, **more: np.ndarray) -> list[grpcclient.InferInput]:
    one = np.ones((1, 1), np.int32)
    return core_inputs(
        input_ids=np.full((1, 4), 500, np.int32), input_lengths=one * 4, request_output_len=one * tokens, end_id=-one, **more
    )


class Stream:
    """A gRPC stream to the core model; `answers` are (response, error)."""

    def __init__(self, url: str) -> None:
        self.answers: list[tuple[object, object]] = []
        self.client = grpcclient.InferenceServerClient(url)
        self.client.start_stream(lambda result, error: self.answers.append((result, error)))

    def send(self, inputs: list[grpcclient.InferInput], request_id: str = "") -> None:
        self.client.async_stream_infer("tensorrt_llm", inputs, request_id=request_id, enable_empty_final_response=True)

    def final(self) -> bool:
        last = self.answers[-1:] and self.answers[-1][0]
        return bool(last) and last.get_response().parameters["triton_final_response"].bool_param

    def close(self) -> None:
        self.client.stop_stream(cancel_requests=True)
        self.client.close()


TRUE = np.ones((1, 1), np.bool_)


def test_core_streams_deltas_and_ends_on_the_last_token(service: Service) -> None:
    stream = Stream(service.url)
    stream.send(core_request(6, streaming=TRUE))
    eventually(stream.final, 30)
    ids = [result.as_numpy("output_ids") for result, _ in stream.answers]
    assert all(i is not None and i.shape[:2] == (1, 1) and i.dtype == np.int32 for i in ids), "an empty response"
    streamed = np.concatenate(ids, axis=2).reshape(-1).tolist()
    stream.answers.clear()
    stream.send(core_request(6))
    eventually(stream.final, 30)
    assert len(stream.answers) == 1 and len(streamed) == 6
    assert stream.answers[0][0].as_numpy("output_ids").reshape(-1).tolist() == streamed
    assert stream.answers[0][0].as_numpy("sequence_length").tolist() == [[6]]
    stream.close()


def test_stop_with_the_same_id_ends_core_and_ensemble(service: Service) -> None:
    pieces = []

    def ask() -> None:
        pieces.extend(generate(service.url, "Once upon a time", max_tokens=1500, stream=True, request_id="a", deadline_s=60, end_id=-1))

    thread = threading.Thread(target=ask)
    thread.start()
    stream = Stream(service.url)
    time.sleep(1.0)
    stream.send(core_request(1, stop=TRUE), request_id="a")
    thread.join(20)
    assert not thread.is_alive() and pieces[-1].final and 0 < pieces[-1].stats["generated_tokens"] < 1500
    eventually(stream.final, 10)
    stream.close()


def test_a_dropped_stream_cancels_its_request(service: Service) -> None:
    stream = Stream(service.url)
    stream.send(core_request(2000, streaming=TRUE))
    eventually(lambda: len(stream.answers) > 2, 20)
    stream.close()
    # Left running, it would take more than a minute.
    with service.executor() as executor:
        eventually(lambda: executor.ping()["in_flight"] == 0, 5)


def test_errors_of_the_ensemble_name_what_is_wrong(service: Service) -> None:
    for options, named in (
        ({"max_tokens": 0}, "max_tokens = 0"),
        ({"max_tokens": 10**6}, "max_seq_len"),
        ({"max_tokens": 3, "top_p": 3.0}, "top_p"),
    ):
        with pytest.raises(RemoteError, match=named):
            list(generate(service.url, "a", deadline_s=20, **options))


def test_errors_of_the_core_have_their_grpc_status_for_clients_that_ask(service: Service) -> None:
    answers: list[tuple[object, Any]] = []
    client = grpcclient.InferenceServerClient(service.url)
    client.start_stream(lambda result, error: answers.append((result, error)), headers={"triton_grpc_error": "true"})
    client.async_stream_infer("tensorrt_llm", core_request(0))
    eventually(lambda: bool(answers), 20)
    assert answers[0][1].status() == "StatusCode.INVALID_ARGUMENT"
    client.stop_stream()
    client.close()


def _works(service: Service) -> bool:
    with contextlib.suppress(RemoteError):
        return bool(list(generate(service.url, "a", max_tokens=1, deadline_s=3)))
    return False


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("triton_python_backend_stub", signal.SIGKILL),
        ("oasiskv.executor", signal.SIGKILL),
        ("bin/tritonserver", signal.SIGSTOP),  # hangs: only the probe can tell
        ("oasiskv.executor", signal.SIGSTOP),
    ],
)
def test_what_is_killed_or_hangs_comes_back(service: Service, victim: str, number: signal.Signals) -> None:
    pids, before = service.descendants(victim), len([line for line in service.log if "recovered" in line])
    assert pids
    os.kill(pids[-1], number)
    eventually(lambda: len([line for line in service.log if "recovered" in line]) > before, RECOVERY_S)
    assert _works(service)
    assert any("fault:" in line for line in service.log)


def test_a_request_in_flight_ends_with_unavailable_when_the_executor_dies(service: Service) -> None:
    pieces = generate(service.url, "Once upon a time", max_tokens=1500, stream=True, deadline_s=20, end_id=-1)
    next(pieces)
    os.kill(service.descendants("oasiskv.executor")[0], signal.SIGKILL)
    with pytest.raises(RemoteError, match="the request was lost: the executor closed the connection"):
        list(pieces)
    eventually(lambda: _works(service), RECOVERY_S)


def test_faults_during_a_recovery_and_giving_up() -> None:
    """On a service of its own: five recoveries within ten minutes are the limit."""
    running = Service()
    below = running.descendants()
    os.kill(running.descendants("bin/tritonserver")[0], signal.SIGKILL)
    time.sleep(0.7)
    os.kill(running.descendants("oasiskv.executor")[0], signal.SIGKILL)
    eventually(lambda: any("recovered" in line for line in running.log) and _works(running), RECOVERY_S)
    for _ in range(6):
        recovered = sum("recovered" in line for line in running.log)
        stubs = running.descendants("triton_python_backend_stub")
        if running.process.poll() is not None or not stubs:
            break
        below += running.descendants()
        os.kill(stubs[-1], signal.SIGKILL)
        eventually(
            lambda n=recovered: running.process.poll() is not None or sum("recovered" in line for line in running.log) > n, RECOVERY_S
        )
    assert running.process.wait(40) == 1
    eventually(lambda: "giving up" in running.log[-1] and running.log[-1].startswith("oasiskv: error: 5 recoveries"), 5)
    assert not any(map(alive, below))


def test_a_taken_port_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "oasiskv.cli", "serve", "--grpc-port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 2
    assert done.stderr.startswith(f"oasiskv: error: --grpc-port {port}") and done.stderr.count("\n") == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_its_end_leaves_nothing(number: signal.Signals) -> None:
    running = Service()
    below = running.descendants()
    assert len(below) >= 5
    folders = [
        f for f in Path(tempfile.gettempdir()).glob("oasiskv-*") if str(f) in "".join(read(Path(f"/proc/{p}/cmdline")) for p in below)
    ]
    assert len(folders) == 1
    running.process.send_signal(number)
    assert running.process.wait(30) == (130 if number == signal.SIGINT else -number)
    eventually(lambda: not any(map(alive, below)), 15)
    if number == signal.SIGKILL:
        runtime.sweep()  # as the next start does
    assert not folders[0].exists()
    assert not list(Path("/dev/shm").glob(f"{folders[0].name}*"))
    ServeOptions(EngineConfig(), "127.0.0.1", *running.ports).check_ports()


def test_contract_words_round_trip() -> None:
    words = [[5], [6, 7], [8, 9, 10]]
    assert contract.unpack_words(contract.pack_words(words)[np.newaxis], "x") == words
    assert contract.unpack_words(contract.pack_words([])[np.newaxis], "x") == []
    with pytest.raises(RequestError, match=r"x: need ids"):
        contract.unpack_words(np.array([[[1, 2], [2, 1]]], np.int32), "x")


@pytest.mark.parametrize(
    ("inputs", "temperature"),
    [
        ({}, 0.0),
        ({"runtime_top_k": 1, "temperature": 1.0}, 0.0),
        ({"runtime_top_k": 5}, 1.0),
        ({"runtime_top_p": 0.9, "temperature": 0.5}, 0.5),
    ],
)
def test_contract_defaults_follow_tensorrt_llm(inputs: dict[str, float], temperature: float) -> None:
    tensors = {"request_output_len": np.array([3]), **{k: np.array([v]) for k, v in inputs.items()}}
    assert contract.sampling(tensors.get)["temperature"] == temperature


def test_templates_need_every_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no value for the parameter"):
        repo.fill(tmp_path / "r", {"triton_max_batch_size": "1"})


def test_running_streams_are_answered_before_it_stops() -> None:
    """With --drain; and a service without requests stops at once, also after one was cancelled."""
    service = Service("--drain", "30")
    answers: list[str] = []
    first = threading.Barrier(4)

    def ask(streaming: bool) -> None:
        pieces = generate(service.url, "Once upon a time", deadline_s=60, max_tokens=60, end_id=-1, stream=streaming)
        head = [next(pieces)] if streaming else []
        first.wait(30)
        answers.append("".join(p.text for p in [*head, *pieces]))

    threads = [threading.Thread(target=ask, args=(i < 2,)) for i in range(3)]
    for t in threads[:2]:
        t.start()
    threads[2].start()
    first.wait(30)
    time.sleep(0.3)
    service.process.terminate()
    for t in threads:
        t.join(60)
    assert service.process.wait(60) == 0
    assert len(answers) == 3 and len(set(answers)) == 1, answers

    service = Service("--drain", "30")
    for _ in range(3):
        list(generate(service.url, "Hi", deadline_s=60, max_tokens=2))
    begin = time.monotonic()
    service.process.terminate()
    assert service.process.wait(60) == 0
    assert time.monotonic() - begin < 15  # of a drain of 30 s


def test_a_text_that_can_never_fit_is_refused_unread(service: Service) -> None:
    faults = [line for line in service.log if "fault" in line]
    for text, options, named in (
        ("lorem ipsum " * 2_000_000, {}, "cannot fit"),
        ("Hi", {"stop_words": ["x"] * 100_000}, "at most 64 words"),
    ):
        with pytest.raises(RemoteError, match=named):
            list(generate(service.url, text, deadline_s=60, max_tokens=2, **options))
    assert [line for line in service.log if "fault" in line] == faults


def test_what_was_left_is_swept_by_its_exact_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any local user can choose names there: one with wildcards in it must neither reach further nor end the start."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    other = Path(f"/dev/shm/oasiskv-{os.getpid()}-other")
    other.touch()
    for name in ("oasiskv-[", "oasiskv-*", "oasiskv-**"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    try:
        runtime.sweep()
        assert other.exists() and not list(tmp_path.iterdir())
    finally:
        other.unlink()


def test_a_child_whose_folder_is_gone_is_an_error_with_advice(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match=r"the executor cannot be started in .*gone.*start the server anew"):
        Child("executor", [sys.executable], tmp_path / "gone", {}, verbose=False)
