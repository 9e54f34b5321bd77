"""What a loss step will cost on a cluster, from a model; checked against measurements."""

from vocab_parallel.app.plan.command import add_arguments, main

__all__ = ["add_arguments", "main"]
