"""NVIDIA's tensors <-> our parameters. Pure functions of numpy arrays, so that the Triton models stay thin."""

from oasiskv.serve.contract.core import CoreRequest, core_requests, is_stop, sampling
from oasiskv.serve.contract.errors import marked, unmarked
from oasiskv.serve.contract.outputs import SequenceOutput, Tensors
from oasiskv.serve.contract.parameters import CoreParameters, flag, forbid, needed, setting, whole
from oasiskv.serve.contract.tensors import pack_words, unpack_words
from oasiskv.serve.contract.text import Preprocessor, postprocess

__all__ = [
    "CoreParameters", "CoreRequest", "Preprocessor", "SequenceOutput", "Tensors", "core_requests", "flag", "forbid", "is_stop",
    "marked", "needed", "pack_words", "postprocess", "sampling", "setting", "unmarked", "unpack_words", "whole",
]  # fmt: skip
