"""Token ids to text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.errors import RequestError
from oasiskv.serve import contract
from oasiskv.tokenizer import Tokenizer


class TritonPythonModel:
    """Passes OASIS_TEXT on where the core gives it; decodes the tokens for callers that have only those, or want special tokens."""

    def initialize(self, args: dict[str, str]) -> None:
        config = json.loads(args["model_config"])
        self._tokenizer = Tokenizer.from_dir(contract.needed(config, "tokenizer_dir"))
        self._skip_special_tokens = contract.flag(config, "skip_special_tokens", default=True)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        try:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self._text(inputs))])
        except RequestError as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error), pb_utils.TritonError.INVALID_ARG))

    def _text(self, inputs: dict[str, np.ndarray]) -> np.ndarray:
        """One-dimensional, rows and beams in turn, as NVIDIA's clients read it."""
        if self._skip_special_tokens and "OASIS_TEXT" in inputs:
            return inputs["OASIS_TEXT"].reshape(-1)
        texts = contract.decode(self._tokenizer, inputs["TOKENS_BATCH"], inputs["SEQUENCE_LENGTH"], self._skip_special_tokens)
        return np.array([t.encode() for t in texts], dtype=np.object_)
