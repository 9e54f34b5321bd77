"""Checkpoints of sharded vocabularies, keyed by global row."""

from vocab_parallel.checkpoint.files import open_checkpoint, read_state
from vocab_parallel.checkpoint.folders import latest_checkpoint
from vocab_parallel.checkpoint.resharding import reshard_checkpoint
from vocab_parallel.checkpoint.saver import AsyncSaver
from vocab_parallel.checkpoint.store import load_checkpoint, save_checkpoint

__all__ = [
    "AsyncSaver",
    "latest_checkpoint",
    "load_checkpoint",
    "open_checkpoint",
    "read_state",
    "reshard_checkpoint",
    "save_checkpoint",
]
