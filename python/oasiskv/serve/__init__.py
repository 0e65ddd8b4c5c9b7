"""Serving through Triton: find it, lay out its repository, start, watch and stop it."""
