"""Token ids to text."""

from __future__ import annotations

import json
from typing import Any

import triton_python_backend_utils as pb_utils

from oasiskv.errors import RequestError
from oasiskv.serve import contract
from oasiskv.tokenizer import Tokenizer


class TritonPythonModel:
    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._tokenizer = Tokenizer.from_dir(contract.needed(config, "tokenizer_dir"))
        self._skip_special_tokens = contract.flag(config, "skip_special_tokens", default=True)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            texts = contract.postprocess(self._tokenizer, inputs, self._skip_special_tokens)
        except RequestError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", texts)])
