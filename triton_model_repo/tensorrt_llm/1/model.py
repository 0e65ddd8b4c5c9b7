"""Token ids in, token ids out, through the executor's socket. `execute` never waits for a token."""

from __future__ import annotations

import json
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.errors import OasisError, RequestError
from oasiskv.executor import protocol
from oasiskv.executor.client import ExecutorClient
from oasiskv.serve import contract

from .metrics import MetricsExporter

# By name: the stub adds its classes to pb_utils only after it has imported this file.
_CODES = {protocol.INVALID: "INVALID_ARG", protocol.UNAVAILABLE: "UNAVAILABLE", protocol.INTERNAL: "INTERNAL"}
_FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
_CONNECT_S = 1.0


def _send_error(sender: Any, code: str, message: str) -> None:
    error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, _CODES[code]))
    sender.send(pb_utils.InferenceResponse(error=error), flags=_FINAL)


class _Stream:
    """One request's way back. FINAL travels on the last token's response: an empty one after it breaks NVIDIA's BLS."""

    def __init__(self, request_id: str, sender: Any, streaming: bool) -> None:
        self.request_id = request_id
        self.handle: tuple[ExecutorClient, int] | None = None
        self.ended = False
        self._sender = sender
        self._streaming = streaming
        self._tokens: list[int] = []
        self._text: list[str] = []
        self._lock = threading.Lock()  # the sender must not be asked anything after FINAL

    def take(self, output: protocol.Output) -> None:
        """On the client's reader thread."""
        self._tokens += output.token_ids
        self._text.append(output.text)
        if not (self._streaming or output.finished):
            return
        with self._lock:
            self.ended = output.finished
            if output.code:
                _send_error(self._sender, output.code, output.error or "the request failed")
            else:
                self._sender.send(self._response(output.stats), flags=_FINAL if output.finished else 0)
        self._tokens, self._text = [], []

    def _response(self, stats: dict[str, Any] | None) -> Any:
        tensors = {
            "output_ids": np.array(self._tokens, dtype=np.int32).reshape(1, 1, -1),
            "sequence_length": np.array([[len(self._tokens)]], dtype=np.int32),
            "oasis_text": np.array([["".join(self._text).encode()]], dtype=np.object_),
            "oasis_stats": np.array([[json.dumps(stats).encode() if stats else b""]], dtype=np.object_),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in tensors.items()])

    def abandoned(self) -> bool:
        with self._lock:
            return not self.ended and self._sender.is_cancelled()

    def cancel(self) -> None:
        if self.handle:
            client, number = self.handle
            client.cancel(number)


class TritonPythonModel:
    """Holds one connection to the executor; a thread watches for cancelled requests and reconnects after a loss."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = {k: v["string_value"] for k, v in json.loads(args["model_config"])["parameters"].items()}
        self._endpoint = parameters["oasis_executor_socket"], parameters["oasis_executor_authkey_file"]
        self._period_s = int(parameters["cancellation_check_period_ms"]) / 1e3
        self._client = ExecutorClient(*self._endpoint)
        self._streams: set[_Stream] = set()
        self._lock = threading.Lock()  # guards _streams
        self._stop = threading.Event()
        self._metrics = MetricsExporter(args)
        self._watcher = threading.Thread(target=self._watch, name="oasiskv-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                self._start(request, sender)
            except (RequestError, protocol.ProtocolError) as error:
                _send_error(sender, protocol.INVALID, str(error))
            except OasisError as error:
                _send_error(sender, protocol.UNAVAILABLE, str(error))

    def finalize(self) -> None:
        self._stop.set()
        self._watcher.join()
        self._metrics.close()
        self._client.close()

    def _start(self, request: Any, sender: Any) -> None:
        def get(name: str) -> np.ndarray | None:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        if contract.scalar(get, "stop"):
            self._stop_requests(request.request_id())
            sender.send(flags=_FINAL)
            return
        prompt, params = contract.prompt(get), contract.sampling(get)
        stream = _Stream(request.request_id(), sender, bool(contract.scalar(get, "streaming")))
        with self._lock:
            self._streams.add(stream)
        try:
            client = self._client
            stream.handle = client, client.submit(prompt, params, lambda output: self._deliver(stream, output))
        except OasisError:
            self._forget(stream)
            raise

    def _deliver(self, stream: _Stream, output: protocol.Output) -> None:
        try:
            stream.take(output)
        finally:
            if output.finished:
                self._forget(stream)

    def _forget(self, stream: _Stream) -> None:
        with self._lock:
            self._streams.discard(stream)

    def _stop_requests(self, request_id: str) -> None:
        if not request_id:
            raise RequestError("stop: give the id of the request to stop as this request's id")
        for stream in self._running():
            if stream.request_id == request_id:
                stream.cancel()

    def _running(self) -> list[_Stream]:
        with self._lock:
            return list(self._streams)

    def _watch(self) -> None:
        while not self._stop.wait(self._period_s):
            if self._client.closed:
                self._reconnect()
            for stream in self._running():
                if stream.handle and stream.abandoned():
                    stream.cancel()

    def _reconnect(self) -> None:
        try:
            self._client = ExecutorClient(*self._endpoint, deadline_s=_CONNECT_S)
        except OasisError:
            return  # the next round tries again; requests get UNAVAILABLE meanwhile
        pb_utils.Logger.log_info("reconnected to the executor")
