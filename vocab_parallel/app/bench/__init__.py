"""Benchmarks of the loss step: ours, other libraries' and the bare matrix products, interleaved in one run."""

from vocab_parallel.app.bench.command import add_arguments, main

__all__ = ["add_arguments", "main"]
