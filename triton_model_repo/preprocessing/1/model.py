"""Text to token ids, in TensorRT-LLM's tensor forms."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.errors import OasisError
from oasiskv.tokenizer import Tokenizer


def _input(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return None if tensor is None else tensor.as_numpy().reshape(-1)


def stop_words(tokenizer, words):
    """[2, n]: the ids of all words back to back, and the end of each, padded with -1."""
    encoded = [tokenizer.encode(w.decode()) for w in words if w]
    flat = [i for ids in encoded for i in ids] or [0]
    ends = np.cumsum([len(ids) for ids in encoded]).tolist()
    return np.array([flat, ends + [-1] * (len(flat) - len(ends))], dtype=np.int32)


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = Tokenizer.from_dir(parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests):
        return [self._answer(r) for r in requests]

    def _answer(self, request):
        try:
            ids = self._tokenizer.encode(_input(request, "QUERY")[0].decode())
            stops = stop_words(self._tokenizer, [] if (words := _input(request, "STOP_WORDS_DICT")) is None else words)
        except (OasisError, UnicodeDecodeError) as error:
            message = f"text_input or stop_words cannot be read: {error}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
        end_id = _input(request, "END_ID")
        return pb_utils.InferenceResponse([
            pb_utils.Tensor("INPUT_ID", np.array(ids, dtype=np.int32)),
            pb_utils.Tensor("REQUEST_INPUT_LEN", np.array([len(ids)], dtype=np.int32)),
            pb_utils.Tensor("STOP_WORDS_IDS", stops),
            pb_utils.Tensor("REQUEST_OUTPUT_LEN", _input(request, "REQUEST_OUTPUT_LEN").astype(np.int32)),
            pb_utils.Tensor("OUT_END_ID", np.array([-1], dtype=np.int32) if end_id is None else end_id.astype(np.int32)),
        ])
