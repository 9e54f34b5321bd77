"""Vocabulary-parallel embedding, head, loss and token selection for language models.

Every operation takes local tensors and a `VocabShard`, and equals `vocab_parallel.reference` on the gathered tensors.
"""

from vocab_parallel.embedding import VocabParallelEmbedding, vocab_parallel_embedding
from vocab_parallel.errors import (
    CheckpointLayoutError,
    CollectiveError,
    ConfigError,
    EmptySupportError,
    LayoutError,
    LayoutMismatchError,
    NonFiniteError,
    TargetRangeError,
    TokenRangeError,
    TyingError,
    UngatheredWeightError,
    VocabParallelError,
    VocabularyError,
)
from vocab_parallel.gradient_norm import clip_gradients_
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.layout import VocabLayout
from vocab_parallel.loss import (
    LogProbs,
    RowOutputs,
    RowStatistics,
    chunk_rows,
    cross_entropy,
    kl_div,
    linear_cross_entropy,
    linear_distillation,
    linear_kl_div,
    linear_row_loss,
    linear_token_logprobs,
    linear_topk_distillation,
    token_logprobs,
)
from vocab_parallel.pipeline_tie import PipelineTie
from vocab_parallel.select import (
    Nucleus,
    Sample,
    Streams,
    TopK,
    TopLogprobs,
    greedy,
    sample,
    top_k,
    top_logprobs,
    top_p,
)
from vocab_parallel.shard import Traffic, VocabShard
from vocab_parallel.tying import tie_weights, verify_tied, vocab_parameters
from vocab_parallel.vocabulary import Manifest, VocabIdentity, VocabMap, migrate, migrate_model_, read_vocabulary

__all__ = [
    "CheckpointLayoutError",
    "CollectiveError",
    "ConfigError",
    "EmptySupportError",
    "LayoutError",
    "LayoutMismatchError",
    "LogProbs",
    "Manifest",
    "NonFiniteError",
    "Nucleus",
    "PipelineTie",
    "RowOutputs",
    "RowStatistics",
    "Sample",
    "Streams",
    "TargetRangeError",
    "TokenRangeError",
    "TopK",
    "TopLogprobs",
    "Traffic",
    "TyingError",
    "UngatheredWeightError",
    "VocabIdentity",
    "VocabLayout",
    "VocabMap",
    "VocabParallelEmbedding",
    "VocabParallelError",
    "VocabParallelLMHead",
    "VocabShard",
    "VocabularyError",
    "chunk_rows",
    "clip_gradients_",
    "cross_entropy",
    "greedy",
    "kl_div",
    "linear_cross_entropy",
    "linear_distillation",
    "linear_kl_div",
    "linear_row_loss",
    "linear_token_logprobs",
    "linear_topk_distillation",
    "migrate",
    "migrate_model_",
    "read_vocabulary",
    "sample",
    "tie_weights",
    "token_logprobs",
    "top_k",
    "top_logprobs",
    "top_p",
    "verify_tied",
    "vocab_parallel_embedding",
    "vocab_parameters",
]
