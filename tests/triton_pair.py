"""An executor and, beside it, Triton servers of one's own with repositories that `oasiskv triton-repo` wrote."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from oasiskv.cli.main import main
from oasiskv.executor.client import ExecutorClient
from oasiskv.serve import triton
from oasiskv.serve.local import free_ports

START_S = 180


@contextlib.contextmanager
def executor(options: dict[str, Any]) -> Iterator[Path]:
    """A running executor; its folder, which has `sock` and `key`. Short: a socket's path has at most 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="oasiskv-test-"))
    (folder / "cwd").mkdir()
    try:
        # The repository's command makes the key.
        assert main(["triton-repo", "--model", options["model"], "--out", str(folder / "first"), *endpoint(folder)]) == 0
        command = [sys.executable, "-m", "oasiskv.executor", "--socket", folder / "sock", "--authkey-file", folder / "key"]
        process = subprocess.Popen([*map(str, command), "--config-json", json.dumps(options)], stderr=subprocess.DEVNULL)
        try:
            with ExecutorClient(folder / "sock", folder / "key", deadline_s=START_S) as client:
                assert client.ping()["in_flight"] == 0
            yield folder
        finally:
            process.terminate()
            process.wait(30)
    finally:
        shutil.rmtree(folder)


def endpoint(folder: Path) -> list[str]:
    return [f"oasis_executor_socket={folder / 'sock'}", f"oasis_executor_authkey_file={folder / 'key'}"]


@contextlib.contextmanager
def server(folder: Path, name: str, *values: str) -> Iterator[int]:
    """A Triton server with a repository of those values; its HTTP port, gRPC's being the next in `grpc`."""
    assert main(["triton-repo", "--model", "smollm2-135m", "--out", str(folder / name), *endpoint(folder), *values]) == 0
    installation = triton.locate()
    backends = installation.make_backend_dir(folder / f"{name}-backends")
    http, grpc, metrics = free_ports(3)
    prefix = f"{folder.name}-{name}"
    command = installation.command(folder / name, backends, "127.0.0.1", (http, grpc, metrics), prefix, 5)
    log = folder / f"{name}.log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, cwd=folder / "cwd", env=installation.environment(), stdout=file, stderr=file)
    try:
        with grpcclient.InferenceServerClient(f"127.0.0.1:{grpc}") as client:
            end = time.monotonic() + START_S
            while not _ready(client):
                assert process.poll() is None and time.monotonic() < end, log.read_text(errors="replace")
                time.sleep(0.2)
        yield grpc
    finally:
        process.terminate()
        process.wait(60)
        for region in Path("/dev/shm").glob(f"{prefix}*"):
            os.unlink(region)


def _ready(client: grpcclient.InferenceServerClient) -> bool:
    try:
        return client.is_server_ready()
    except InferenceServerException:
        return False


def tensor(name: str, value: Any) -> grpcclient.InferInput:
    """A list of a batch row, a text or a number as [1, n]; an array as it is."""
    if not isinstance(value, np.ndarray):
        row = value if isinstance(value, list) else [value]
        if isinstance(row[0], str):
            value = np.array([[v.encode() for v in row]], dtype=np.object_)
        else:
            kinds = {bool: np.bool_, int: np.uint64 if name == "seed" else np.int32, float: np.float32}
            value = np.array([row], dtype=kinds[type(row[0])])
    made = grpcclient.InferInput(name, list(value.shape), np_to_triton_dtype(value.dtype))
    made.set_data_from_numpy(value)
    return made


def core_inputs(ids: list[int], tokens: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": ids, "input_lengths": len(ids), "request_output_len": tokens, "end_id": -1, **more}


def text_inputs(text: str, tokens: int, **more: Any) -> dict[str, Any]:
    return {"text_input": text, "max_tokens": tokens, "end_id": -1, **more}


class Stream:
    """One request over a stream of its own. `responses`: the outputs of each by name; `error` ends it."""

    def __init__(self, port: int, model: str, inputs: dict[str, Any], request_id: str = "") -> None:
        self.responses: list[dict[str, np.ndarray]] = []
        self.finals: list[bool] = []
        self.error: InferenceServerException | None = None
        self._ended = threading.Event()
        self._client = grpcclient.InferenceServerClient(f"127.0.0.1:{port}")
        # Without the header triton_grpc_error, which would give errors a status: with it an ensemble's error can end this Triton (SIGSEGV).
        self._client.start_stream(self._take)
        tensors = [tensor(name, value) for name, value in inputs.items()]
        self._client.async_stream_infer(model, tensors, request_id=request_id, enable_empty_final_response=True)

    def _take(self, result: Any, error: Any) -> None:
        if error is not None:
            self.error = error
            self._ended.set()
            return
        answer = result.get_response()
        self.responses.append({o.name: result.as_numpy(o.name) for o in answer.outputs})
        self.finals.append(answer.parameters["triton_final_response"].bool_param)
        if self.finals[-1]:
            self._ended.set()

    def wait(self, seconds: float = 120) -> Stream:
        assert self._ended.wait(seconds), "no final response"
        self._client.stop_stream()
        self._client.close()
        if self.error is not None:
            raise self.error
        return self

    def drop(self) -> None:
        self._client.stop_stream(cancel_requests=True)
        self._client.close()

    @property
    def text(self) -> str:
        return b"".join(r["text_output"].reshape(-1)[0] for r in self.responses if "text_output" in r).decode()


def infer(port: int, model: str, inputs: dict[str, Any], request_id: str = "") -> dict[str, np.ndarray]:
    """A unary request."""
    with grpcclient.InferenceServerClient(f"127.0.0.1:{port}") as client:
        result = client.infer(model, [tensor(name, value) for name, value in inputs.items()], request_id=request_id)
        return {o.name: result.as_numpy(o.name) for o in result.get_response().outputs}
