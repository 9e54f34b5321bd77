"""The loss over a sharded vocabulary: of logits (`cross_entropy`), or fused with the head (`linear_cross_entropy`)."""

from vocab_parallel.loss.cross_entropy import cross_entropy, kl_div
from vocab_parallel.loss.distill import linear_distillation
from vocab_parallel.loss.distill_topk import linear_topk_distillation
from vocab_parallel.loss.linear import chunk_rows, linear_cross_entropy, linear_kl_div
from vocab_parallel.loss.logprobs import LogProbs, linear_token_logprobs, token_logprobs
from vocab_parallel.loss.outputs import RowOutputs
from vocab_parallel.loss.row_loss import RowStatistics, linear_row_loss

__all__ = [
    "LogProbs",
    "RowOutputs",
    "RowStatistics",
    "chunk_rows",
    "cross_entropy",
    "kl_div",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_kl_div",
    "linear_row_loss",
    "linear_token_logprobs",
    "linear_topk_distillation",
    "token_logprobs",
]
