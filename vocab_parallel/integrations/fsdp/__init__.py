"""FSDP2: vocabulary shards as DTensors on one dimension of a mesh, every parameter under `fully_shard` on another.

The model is one with `VocabParallelEmbedding` and `VocabParallelLMHead`. A rank then keeps, and its optimizer updates,
`1 / (dp tp)` of the table; before forward it gathers its `1 / tp` over the data-parallel ranks, as FSDP does with all.
"""

from vocab_parallel.integrations.fsdp.checkpoint import full_state_dict, load, save
from vocab_parallel.integrations.fsdp.setup import apply, verify_tied

__all__ = ["apply", "full_state_dict", "load", "save", "verify_tied"]
