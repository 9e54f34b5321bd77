"""Checkpoints of sharded vocabularies."""

from vocab_parallel.checkpoint.store import latest_checkpoint, load_checkpoint, read_state, save_checkpoint

__all__ = ["latest_checkpoint", "load_checkpoint", "read_state", "save_checkpoint"]
