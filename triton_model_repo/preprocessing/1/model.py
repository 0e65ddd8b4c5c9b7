"""Text to token ids."""

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
        for name in ("multimodal_model_path", "max_num_images"):
            contract.forbid(config, name)
        tokenizer = Tokenizer.from_dir(contract.needed(config, "tokenizer_dir"))
        longest = contract.whole(config, "oasis_max_seq_len", 1 << 20, 1, 1 << 24)
        self._preprocess = contract.Preprocessor(tokenizer, contract.flag(config, "add_special_tokens", default=True), longest)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def _answer(self, request: Any) -> Any:
        try:
            outputs = self._preprocess({tensor.name(): tensor.as_numpy() for tensor in request.inputs()})
        except RequestError as error:
            message = contract.marked("INVALID_ARG", str(error)) if "oasis_call" in request.parameters() else str(error)
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(message, pb_utils.TritonError.INVALID_ARG))
        wanted = request.requested_output_names()
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, value) for name, value in outputs.items() if name in wanted])
