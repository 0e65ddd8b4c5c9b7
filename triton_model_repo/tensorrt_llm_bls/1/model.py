"""Text in, text out, by calls to the other models. Each request has a thread of its own, so that none waits for another."""

from __future__ import annotations

import json
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.errors import RequestError
from oasiskv.serve import contract
from oasiskv.serve.contract import bls

_FINAL = 1  # TRITONSERVER_RESPONSE_COMPLETE_FINAL
_MAX_CALLS = 512  # at the same time, a thread each; more are refused
_CANCEL_CHECK_S = 0.05


class _ModelError(Exception):
    """An error that one of the models answered with. code: a name of TritonError's."""

    def __init__(self, message: str) -> None:
        self.code, message = contract.unmarked(message)
        super().__init__(message)


class _Call:
    def __init__(self, request: Any) -> None:
        # Copied: the request's memory is Triton's again when `execute` returns.
        self.inputs = {tensor.name(): np.array(tensor.as_numpy()) for tensor in request.inputs()}
        self.wanted = frozenset(request.requested_output_names())
        self.id = request.request_id()
        self.name = str(uuid.uuid4())  # the core's, since ids need not be unique
        self.sender = request.get_response_sender()
        self.cancelled = False
        self._ended = False
        self._lock = threading.Lock()  # the sender must not be asked anything after FINAL

    def send(self, tensors: contract.Tensors, final: bool) -> None:
        self._finish(pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in tensors.items()]), final)

    def fail(self, code: str, message: str) -> None:
        error = pb_utils.TritonError(message, getattr(pb_utils.TritonError, code))
        self._finish(pb_utils.InferenceResponse(error=error), final=True)

    def end(self) -> None:
        with self._lock:
            if not self._ended:
                self._ended = True
                self.sender.send(flags=_FINAL)

    def abandoned(self) -> bool:
        with self._lock:
            return not self._ended and self.sender.is_cancelled()

    def _finish(self, response: Any, final: bool) -> None:
        with self._lock:
            if not self._ended:
                self._ended = final
                self.sender.send(response, flags=_FINAL if final else 0)


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        for name in ("tensorrt_llm_draft_model_name", "multimodal_encoders_name"):
            contract.forbid(config, name)
        self._decoupled = pb_utils.using_decoupled_model_transaction_policy(config)
        self._accumulate = contract.flag(config, "accumulate_tokens", default=False)
        self._exact = contract.flag(config, "oasis_exact_text", default=False)
        self._core = contract.setting(config, "tensorrt_llm_model_name") or "tensorrt_llm"
        self._pool = ThreadPoolExecutor(_MAX_CALLS, thread_name_prefix="oasiskv-bls")
        self._calls: set[_Call] = set()
        self._lock = threading.Lock()  # guards _calls
        self._stop = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="oasiskv-watch", daemon=True)
        self._watcher.start()

    def execute(self, requests: list[Any]) -> None:
        for request in requests:
            call = _Call(request)
            with self._lock:
                full = len(self._calls) >= _MAX_CALLS
                if not full:
                    self._calls.add(call)
            if full:
                call.fail("UNAVAILABLE", f"{_MAX_CALLS} requests are in flight: try again later")
            else:
                self._pool.submit(self._serve, call)

    def finalize(self) -> None:
        self._stop.set()
        self._watcher.join()
        self._pool.shutdown()

    def _serve(self, call: _Call) -> None:
        try:
            self._answer(call)
        except _ModelError as error:
            call.fail(error.code, str(error))
        except RequestError as error:
            call.fail("INVALID_ARG", str(error))
        except Exception as error:
            pb_utils.Logger.log_error(f"a request failed: {type(error).__name__}: {error}")
            call.fail("INTERNAL", f"{type(error).__name__}: {error}")
        finally:
            with self._lock:
                self._calls.discard(call)

    def _answer(self, call: _Call) -> None:
        preprocessed = self._run("preprocessing", call, bls.preprocessing_inputs(call.inputs), bls.PREPROCESSING_OUTPUTS)
        request = self._ask(self._core, call, bls.core_inputs(call.inputs, preprocessed), bls.core_outputs(call.wanted))
        texts = bls.Texts(self._accumulate)
        if not self._decoupled:
            call.send(self._finished(call, texts, _tensors(request.exec())), final=True)
            return
        for response in request.exec(decoupled=True):
            if tensors := _tensors(response):
                call.send(self._finished(call, texts, tensors), final=False)
        call.end()

    def _finished(self, call: _Call, texts: bls.Texts, response: contract.Tensors) -> contract.Tensors:
        text = self._run("postprocessing", call, bls.postprocessing_inputs(response, self._exact), ["OUTPUT"])["OUTPUT"]
        return texts.answer(response, text, call.wanted)

    def _run(self, model: str, call: _Call, inputs: contract.Tensors, outputs: list[str]) -> contract.Tensors:
        return _tensors(self._ask(model, call, inputs, outputs).exec())

    def _ask(self, model: str, call: _Call, inputs: contract.Tensors, outputs: list[str]) -> Any:
        return pb_utils.InferenceRequest(
            model_name=model,
            request_id=call.id,
            inputs=[pb_utils.Tensor(name, array) for name, array in inputs.items()],
            requested_output_names=outputs,
            parameters={"oasis_call": call.name},
        )

    def _watch(self) -> None:
        """Triton does not pass a cancellation on to the requests that a model makes: the core is asked to stop them."""
        while not self._stop.wait(_CANCEL_CHECK_S):
            with self._lock:
                calls = list(self._calls)
            for call in calls:
                if not call.cancelled and call.abandoned():
                    call.cancelled = True
                    for _ in self._ask(self._core, call, bls.STOP_INPUTS, ["output_ids"]).exec(decoupled=True):
                        pass


def _tensors(response: Any) -> contract.Tensors:
    if response.has_error():
        raise _ModelError(response.error().message())
    return {tensor.name(): tensor.as_numpy() for tensor in response.output_tensors()}
