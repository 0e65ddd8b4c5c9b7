"""Token ids in, token ids out, through the executor's socket. `execute` never waits for a token."""

from __future__ import annotations

import json
import os
import threading
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.errors import OasisError, RequestError
from oasiskv.executor import protocol
from oasiskv.executor.client import ExecutorClient
from oasiskv.serve import contract
from oasiskv.serve.call import Call

from .metrics import MetricsExporter

# By name: the stub adds its classes to pb_utils only after it has imported this file.
_CODES = {protocol.INVALID: "INVALID_ARG", protocol.UNAVAILABLE: "UNAVAILABLE", protocol.INTERNAL: "INTERNAL"}
_FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
_CONNECT_S = 1.0
_CALL = "oasis_call"  # request parameter of a BLS: a name for this call alone, where several may have the same request id


class _Reply:
    def __init__(self, sender: Any, marked: bool) -> None:
        self._sender = sender
        self._marked = marked  # errors go to a BLS

    def send(self, tensors: contract.Tensors, final: bool) -> None:
        response = pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()])
        self._sender.send(response, flags=_FINAL if final else 0)

    def fail(self, code: str, message: str) -> None:
        message = contract.marked(_CODES[code], message) if self._marked else message
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, _CODES[code]))
        self._sender.send(pb_utils.InferenceResponse(error=error), flags=_FINAL)

    def is_cancelled(self) -> bool:
        return self._sender.is_cancelled()


class TritonPythonModel:
    """Holds one connection to the executor; a thread watches for cancelled requests and reconnects after a loss."""

    def initialize(self, args: dict[str, str]) -> None:
        self._parameters = contract.CoreParameters.of(json.loads(args["model_config"]))
        self._endpoint = self._parameters.socket, self._parameters.authkey_file
        self._client = ExecutorClient(*self._endpoint)
        self._parameters.check_executor(self._client.ping()["options"])
        if self._parameters.idle:
            pb_utils.Logger.log_warn(f"the executor's own options count, not these parameters: {', '.join(self._parameters.idle)}")
        self._calls: dict[Call, tuple[str, str | None]] = {}  # -> request id, oasis_call
        self._lock = threading.Lock()  # guards _calls
        self._stop = threading.Event()
        self._triton = os.getppid()
        self._metrics = MetricsExporter(args)
        self._watcher = threading.Thread(target=self._watch, name="oasiskv-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            name = json.loads(request.parameters() or "{}").get(_CALL)
            reply = _Reply(request.get_response_sender(), name is not None)
            try:
                self._start(request, name, reply)
            except (RequestError, protocol.ProtocolError) as error:
                reply.fail(protocol.INVALID, str(error))
            except OasisError as error:
                reply.fail(protocol.UNAVAILABLE, str(error))
            except Exception as error:  # Triton answers nothing for a decoupled model that raises
                pb_utils.Logger.log_error(f"a request could not be started: {type(error).__name__}: {error}")
                reply.fail(protocol.INTERNAL, f"{type(error).__name__}: {error}")

    def finalize(self) -> None:
        self._stop.set()
        self._watcher.join()
        self._metrics.close()
        self._client.close()

    def _start(self, request: Any, name: str | None, reply: _Reply) -> None:
        inputs = {tensor.name(): _array(tensor) for tensor in request.inputs()}
        if contract.is_stop(inputs):
            self._stop_calls(request.request_id(), name)
            reply.send({}, final=True)
            return
        p = self._parameters
        wanted = contract.core_requests(inputs, p.decoupled, p.exclude_prompt)
        call = Call(wanted, frozenset(request.requested_output_names()), p.logits, reply, self._forget)
        with self._lock:
            self._calls[call] = request.request_id(), name
        try:
            call.start(self._client)
        except OasisError:
            self._forget(call)
            raise

    def _forget(self, call: Call) -> None:
        with self._lock:
            self._calls.pop(call, None)

    def _stop_calls(self, request_id: str, name: str | None) -> None:
        if not request_id and not name:
            raise RequestError("stop: give the id of the request to stop as this request's id")
        for call, (its_id, its_name) in self._running():
            if its_name == name if name else its_id == request_id:
                call.cancel()

    def _running(self) -> list[tuple[Call, tuple[str, str | None]]]:
        with self._lock:
            return list(self._calls.items())

    def _watch(self) -> None:
        while not self._stop.wait(self._parameters.cancel_check_s):
            if os.getppid() != self._triton:  # it was killed: a metric that is being set would wait for it for ever
                os._exit(1)
            if self._client.closed:
                self._reconnect()
            for call, _ in self._running():
                if call.abandoned():
                    call.cancel()

    def _reconnect(self) -> None:
        try:
            self._client = ExecutorClient(*self._endpoint, deadline_s=_CONNECT_S)
        except OasisError:
            return  # the next round tries again; requests get UNAVAILABLE meanwhile
        pb_utils.Logger.log_info("reconnected to the executor")


def _array(tensor: Any) -> np.ndarray:
    try:
        return tensor.as_numpy()
    except pb_utils.TritonModelException as error:  # BF16, which numpy has not
        raise RequestError(f"{tensor.name()}: {error}; leave it out") from None
