"""What `tensorrt_llm_bls` passes between the models: the ensemble's names on its outside, the core's within."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from oasiskv.errors import RequestError
from oasiskv.serve.contract.outputs import Tensors

_PREPROCESSING = {
    "text_input": "QUERY",
    "decoder_text_input": "DECODER_QUERY",
    "image_bytes_input": "IMAGE_BYTES",
    "image_url_input": "IMAGE_URL",
    "video_bytes_input": "VIDEO_BYTES",
    "max_tokens": "REQUEST_OUTPUT_LEN",
    "bad_words": "BAD_WORDS_DICT",
    "stop_words": "STOP_WORDS_DICT",
    "embedding_bias_words": "EMBEDDING_BIAS_WORDS",
    "embedding_bias_weights": "EMBEDDING_BIAS_WEIGHTS",
    "end_id": "END_ID",
    "pad_id": "PAD_ID",
    "prompt_table_extra_id": "PROMPT_TABLE_EXTRA_ID",
}
_PREPROCESSED = {
    "INPUT_ID": "input_ids",
    "REQUEST_INPUT_LEN": "input_lengths",
    "REQUEST_OUTPUT_LEN": "request_output_len",
    "BAD_WORDS_IDS": "bad_words_list",
    "STOP_WORDS_IDS": "stop_words_list",
    "EMBEDDING_BIAS": "embedding_bias",
    "OUT_END_ID": "end_id",
    "OUT_PAD_ID": "pad_id",
}
_RENAMED = {"top_k": "runtime_top_k", "top_p": "runtime_top_p", "length_penalty": "len_penalty", "stream": "streaming"}
_REFUSED = ("image_input", "num_draft_tokens", "use_draft_logits")
_TEXT_SIDE = frozenset(_PREPROCESSING) | frozenset(_REFUSED)
_TOKENS = {"output_ids": "TOKENS_BATCH", "sequence_length": "SEQUENCE_LENGTH"}
_EXACT = {"oasis_text": "OASIS_TEXT", "oasis_prompt_length": "OASIS_PROMPT_LENGTH"}
PREPROCESSING_OUTPUTS = list(_PREPROCESSED)
_ONE = np.ones((1, 1), dtype=np.int32)
STOP_INPUTS: Tensors = {"input_ids": _ONE, "input_lengths": _ONE, "request_output_len": _ONE, "stop": np.ones((1, 1), dtype=np.bool_)}


def preprocessing_inputs(inputs: Tensors) -> Tensors:
    """Raises RequestError for inputs of kinds that are not supported."""
    for name in _REFUSED:
        if name in inputs and np.any(inputs[name]):
            raise RequestError(f"{name}: not supported; leave it out")
    return {_PREPROCESSING[name]: array for name, array in inputs.items() if name in _PREPROCESSING}


def core_inputs(inputs: Tensors, preprocessed: Tensors) -> Tensors:
    """The core's inputs: what preprocessing made, and everything else by its name there."""
    passed = {_RENAMED.get(name, name): _with_row(array) for name, array in inputs.items() if name not in _TEXT_SIDE}
    return passed | {_PREPROCESSED[name]: array for name, array in preprocessed.items() if name in _PREPROCESSED}


def core_outputs(wanted: frozenset[str]) -> list[str]:
    return sorted((wanted - {"text_output"}) | frozenset(_TOKENS) | frozenset(_EXACT) | {"batch_index", "sequence_index"})


def postprocessing_inputs(response: Tensors, exact: bool) -> Tensors:
    """exact: whether `postprocessing` takes the exact text; NVIDIA's takes tokens alone."""
    names = _TOKENS | _EXACT if exact else _TOKENS
    return {names[name]: array for name, array in response.items() if name in names}


def _with_row(array: np.ndarray) -> np.ndarray:
    """An input that Triton reshaped to [rows] as [rows, 1], which is how the core takes it."""
    return array.reshape(-1, 1) if array.ndim == 1 else array


class Texts:
    """Makes the BLS's responses. With accumulate, text_output is all text so far of that row and sequence."""

    def __init__(self, accumulate: bool) -> None:
        self._accumulate = accumulate
        self._so_far: defaultdict[tuple[int, int], bytes] = defaultdict(bytes)

    def answer(self, response: Tensors, text: np.ndarray, wanted: frozenset[str]) -> Tensors:
        """response: the core's; text: what postprocessing made of it, [beams]."""
        if self._accumulate:
            key = _index(response, "batch_index"), _index(response, "sequence_index")
            self._so_far[key] += text[0]
            text = np.array([self._so_far[key]], dtype=np.object_)
        tensors = response | {"text_output": text}
        return {name: array for name, array in tensors.items() if name in wanted}


def _index(response: Tensors, name: str) -> int:
    return int(response[name].reshape(-1)[0]) if name in response else 0
