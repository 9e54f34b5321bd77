"""The evaluation ladder: one claim after another about the user's own head, proved on the ranks it runs on."""

from vocab_parallel.app.verify.command import add_arguments, main

__all__ = ["add_arguments", "main"]
