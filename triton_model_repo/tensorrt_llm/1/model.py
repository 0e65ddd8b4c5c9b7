"""TensorRT-LLM's core model contract over the executor: `execute` only submits; answers come from the client's thread."""

import json
import threading
import time

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.errors import EngineError
from oasiskv.executor.client import ExecutorClient, Output

_FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
_CANCEL_POLL_S = 0.02


def _value(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy()


def _scalar(request, name):
    value = _value(request, name)
    return None if value is None or value.size == 0 else value.reshape(-1)[0].item()


def sampling(request):
    """Triton's inputs as our sampling parameters; temperature 0 or top_k 1, and TensorRT-LLM's defaults, are greedy."""
    params = {"max_tokens": int(_scalar(request, "request_output_len"))}
    top_k, top_p, temperature = (_scalar(request, n) for n in ("runtime_top_k", "runtime_top_p", "temperature"))
    if top_k not in (None, 0):
        params["top_k"] = top_k
    if top_p not in (None, 0):
        params["top_p"] = top_p
    # TensorRT-LLM samples with temperature 1 once a filter asks for more than the best token.
    samples = (top_k or 0) > 1 or top_p not in (None, 0, 1)
    params["temperature"] = temperature if temperature is not None else 1.0 if samples else 0.0
    if top_k == 1:
        params["temperature"] = 0.0
    if (seed := _scalar(request, "seed")) is not None:
        params["seed"] = seed
    if (end_id := _scalar(request, "end_id")) is not None and end_id >= 0:
        params["stop_token_ids"] = [end_id]
    return params


def stop_lists(request):
    """TensorRT-LLM's [2, n] form: ids back to back, and the end of each word."""
    value = _value(request, "stop_words_list")
    if value is None or value.size == 0:
        return []
    ids, ends = value.reshape(2, -1)
    words, start = [], 0
    for end in ends[ends > 0]:
        words.append(ids[start:end].tolist())
        start = end
    return [w for w in words if w]


class _Answer:
    """One request's way back: streamed pieces, or all of it at the end. FINAL rides on the last."""

    def __init__(self, request, streaming):
        self.sender = request.get_response_sender()
        self.id = request.request_id()
        self.streaming = streaming
        self.number = None
        self.done = False
        self._ids = []

    def take(self, output: Output):
        self._ids += output.token_ids
        if not output.finished:
            if self.streaming and output.token_ids:
                self._send(output, 0)
                self._ids = []
            return
        self.done = True
        if output.error:
            code = {"request": pb_utils.TritonError.INVALID_ARG, "capacity": pb_utils.TritonError.INVALID_ARG}
            error = pb_utils.TritonError(output.error, code.get(output.kind, pb_utils.TritonError.UNAVAILABLE))
            self.sender.send(pb_utils.InferenceResponse(error=error), flags=_FINAL)
        elif output.finish_reason == "cancelled":
            self.sender.send(flags=_FINAL)
        else:
            self._send(output, _FINAL)

    def _send(self, output: Output, flags):
        tensors = [
            pb_utils.Tensor("output_ids", np.array([self._ids], dtype=np.int32)),
            pb_utils.Tensor("sequence_length", np.array([len(self._ids)], dtype=np.int32)),
            pb_utils.Tensor("oasis_stats", np.array([json.dumps(output.stats or {}).encode()], dtype=np.object_)),
        ]
        self.sender.send(pb_utils.InferenceResponse(tensors), flags=flags)


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        socket, key = (parameters[n]["string_value"] for n in ("oasis_executor_socket", "oasis_executor_key_file"))
        self._connect = lambda: ExecutorClient(socket, key, deadline_s=10)
        self._client = self._connect()
        self._answers = {}
        self._lock = threading.Lock()
        self._open = True
        threading.Thread(target=self._poll_cancels, daemon=True).start()

    def execute(self, requests):
        for request in requests:
            if _scalar(request, "stop"):
                self._stop(request)
            else:
                self._submit(request)

    def finalize(self):
        self._open = False
        self._client.close()

    def _submit(self, request):
        answer = _Answer(request, bool(_scalar(request, "streaming")))
        try:
            length = _scalar(request, "input_lengths")
            ids = _value(request, "input_ids").reshape(-1).tolist()
            if self._client.lost:
                self._client = self._connect()
            with self._lock:
                answer.number = self._client.submit(ids[:length], sampling(request), answer.take, stop_lists(request))
                self._answers[answer.number] = answer
        except EngineError as error:
            answer.take(Output(finished=True, error=str(error)))

    def _stop(self, request):
        with self._lock:
            numbers = [n for n, a in self._answers.items() if a.id and a.id == request.request_id()]
        for number in numbers:
            self._client.cancel(number)
        request.get_response_sender().send(flags=_FINAL)

    def _poll_cancels(self):
        while self._open:
            time.sleep(_CANCEL_POLL_S)
            with self._lock:
                self._answers = {n: a for n, a in self._answers.items() if not a.done}
                answers = list(self._answers.values())
            for answer in answers:
                if answer.sender.is_cancelled():
                    self._client.cancel(answer.number)
