"""Benchmarks: always paired in one process, medians of repeated runs, reported as ratios."""
