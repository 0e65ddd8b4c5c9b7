"""Token ids to text. The core model sends ids that end at a whole character, so each piece decodes by itself."""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from oasiskv.tokenizer import Tokenizer


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._tokenizer = Tokenizer.from_dir(parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests):
        return [self._answer(r) for r in requests]

    def _answer(self, request):
        tokens, lengths = (pb_utils.get_input_tensor_by_name(request, n).as_numpy() for n in ("TOKENS_BATCH", "SEQUENCE_LENGTH"))
        texts = [self._tokenizer.decode(row[:n].tolist()).encode() for row, n in zip(tokens, lengths, strict=True)]
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(texts, dtype=np.object_))])
