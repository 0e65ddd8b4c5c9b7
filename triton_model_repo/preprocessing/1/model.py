"""Text to token ids."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.errors import RequestError
from oasiskv.serve import contract
from oasiskv.tokenizer import Tokenizer


class TritonPythonModel:
    """A batch of one a request, as the ensemble sends it."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = Tokenizer.from_dir(parameters["tokenizer_dir"]["string_value"])
        self._max_seq_len = int(parameters["max_seq_len"]["string_value"])
        self._end_id = min(self._tokenizer.eos_ids, default=-1)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        def get(name: str) -> np.ndarray | None:
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return None if tensor is None else tensor.as_numpy()

        try:
            ids = self._tokenizer.encode(contract.text(get, "QUERY") or "", max_tokens=self._max_seq_len)
            words = [self._tokenizer.encode(word, bos=False) for word in contract.stop_words(get, "STOP_WORDS_DICT")]
            end_id = contract.scalar(get, "END_ID")
            outputs = {
                "INPUT_ID": np.array([ids], dtype=np.int32),
                "REQUEST_INPUT_LEN": np.array([[len(ids)]], dtype=np.int32),
                "STOP_WORDS_IDS": contract.pack_words(words)[np.newaxis],
                "REQUEST_OUTPUT_LEN": np.array([[contract.scalar(get, "REQUEST_OUTPUT_LEN")]], dtype=np.int32),
                "OUT_END_ID": np.array([[self._end_id if end_id is None else end_id]], dtype=np.int32),
            }
        except RequestError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items()])
