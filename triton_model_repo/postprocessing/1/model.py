"""Token ids to text."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.tokenizer import Tokenizer


class TritonPythonModel:
    """Passes OASIS_TEXT on where the core gives it; decodes the tokens for callers that have only those."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = Tokenizer.from_dir(parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", self._text(request))])
        except (ValueError, OverflowError) as error:  # ids and lengths that do not go together, or are none
            message = f"TOKENS_BATCH, SEQUENCE_LENGTH: {error}"
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))

    def _text(self, request: Any) -> np.ndarray:
        exact = pb_utils.get_input_tensor_by_name(request, "OASIS_TEXT")
        if exact is not None:
            return exact.as_numpy()
        tokens = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        rows = [
            [self._tokenizer.decode(beam[: max(0, n)].tolist()).encode() for beam, n in zip(beams, counts, strict=True)]
            for beams, counts in zip(tokens, lengths, strict=True)
        ]
        return np.array(rows, dtype=np.object_)
