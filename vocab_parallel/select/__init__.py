"""Token selection from sharded logits, without gathering them."""

from vocab_parallel.select.greedy import greedy
from vocab_parallel.select.top_k import TopK, top_k

__all__ = ["TopK", "greedy", "top_k"]
