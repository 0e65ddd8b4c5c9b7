"""The OpenAI-compatible front: a process of its own that translates HTTP requests for the executor and holds nothing else."""
