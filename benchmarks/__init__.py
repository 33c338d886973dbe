"""Benchmarks: each prints its figures, ends with `name=value unit` lines, and writes JSON beside them."""
