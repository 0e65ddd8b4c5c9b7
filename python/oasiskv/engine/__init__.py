"""The engine: tokens in, tokens out, one batch for all requests."""
