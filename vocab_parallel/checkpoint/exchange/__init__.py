"""Checkpoints of other libraries, to ours and back, block by block."""

from vocab_parallel.checkpoint.exchange.hugging_face import from_hugging_face, to_hugging_face
from vocab_parallel.checkpoint.exchange.megatron import from_megatron, to_megatron

__all__ = ["from_hugging_face", "from_megatron", "to_hugging_face", "to_megatron"]
