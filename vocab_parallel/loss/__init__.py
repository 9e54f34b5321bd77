"""The loss over a sharded vocabulary: of logits (`cross_entropy`), or fused with the head (`linear_cross_entropy`)."""

from vocab_parallel.loss.cross_entropy import cross_entropy
from vocab_parallel.loss.linear import linear_cross_entropy

__all__ = ["cross_entropy", "linear_cross_entropy"]
