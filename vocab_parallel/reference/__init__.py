"""The oracle: every operation on whole tensors on one rank. Slow, short, and float64 when given float64.

Every sharded operation equals its namesake here on the gathered tensors; tests and `doctor` compare with it.
"""

from vocab_parallel.reference.losses import (
    RowOutputs,
    cross_entropy,
    distillation,
    embedding,
    kl_div,
    linear_cross_entropy,
    linear_kl_div,
    linear_row_loss,
    linear_token_logprobs,
    logits,
    reduce,
    row_loss,
    row_outputs,
    scores,
    target_distribution,
    token_logprobs,
)
from vocab_parallel.reference.select import draw, greedy, nucleus, sample, top_k

__all__ = [
    "RowOutputs",
    "cross_entropy",
    "distillation",
    "draw",
    "embedding",
    "greedy",
    "kl_div",
    "linear_cross_entropy",
    "linear_kl_div",
    "linear_row_loss",
    "linear_token_logprobs",
    "logits",
    "nucleus",
    "reduce",
    "row_loss",
    "row_outputs",
    "sample",
    "scores",
    "target_distribution",
    "token_logprobs",
    "top_k",
]
