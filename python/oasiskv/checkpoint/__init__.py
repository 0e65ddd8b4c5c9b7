"""Checkpoints: a TensorRT-LLM style folder (config.json, rank0.safetensors) and what can be imported into one."""

from oasiskv.checkpoint.convert import convert
from oasiskv.checkpoint.model_config import ModelConfig
from oasiskv.checkpoint.resolve import resolve_model
from oasiskv.checkpoint.store import load_checkpoint

__all__ = ["ModelConfig", "convert", "load_checkpoint", "resolve_model"]
