"""OasisKV: long-context LLM serving out of a small GPU working set, the full KV cache in host memory."""

__version__ = "0.1.0"
