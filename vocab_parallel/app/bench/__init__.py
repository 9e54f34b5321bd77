"""Benchmarks, each interleaved in one run: the loss beside other libraries, selection beside gathering."""

from vocab_parallel.app.bench.command import add_arguments, main

__all__ = ["add_arguments", "main"]
