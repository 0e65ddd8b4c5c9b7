"""Slow, plain references that the fast code is held against."""
