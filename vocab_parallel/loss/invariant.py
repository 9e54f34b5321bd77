"""The same bits at every tensor-parallel size: `tp_invariant=True`.

Floating-point addition is not associative, so a sum over 2 shards and one over 4 differ in their last bits. Here every
sum over the vocabulary is formed in one order that does not know the ranks: the padded vocabulary is cut into 8
*leaves* of equal storage, each leaf runs GEMMs of its own, of one shape whatever the TP size, and the leaves'
statistics and dH add along one binary tree (leaves 0 and 1, 2 and 3, ...; first within a rank, then between ranks).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.collectives import Pending, all_gather, all_to_all, pad_rows
from vocab_parallel.errors import LayoutError
from vocab_parallel.loss.rows import ReplicatedRows
from vocab_parallel.loss.tree import tree_sum
from vocab_parallel.shard import VocabShard

LEAVES = 8
_ALIGNMENT = 64  # bytes


def leaf_ids(shard: VocabShard) -> list[range]:
    """The ids of the 8 leaves; the last ones may be short or empty.

    Raises:
        LayoutError: The shards are not made of whole leaves.
    """
    layout = shard.layout
    if LEAVES % layout.tp_size or layout.padded_size % LEAVES:
        padded = -(-layout.padded_size // LEAVES) * LEAVES
        raise LayoutError(
            f"tp_invariant cuts the padded vocabulary into {LEAVES} equal leaves, and {layout} does not allow it: it "
            f"needs a TP size of 1, 2, 4 or 8 and a padded size that divides by {LEAVES}. Use the same padded size at "
            f"every TP size, for example VocabLayout.from_padded({layout.vocab_size}, {padded}, tp_size)."
        )
    size = layout.padded_size // LEAVES
    return [
        range(min(at, layout.vocab_size), min(at + size, layout.vocab_size))
        for at in range(0, layout.padded_size, size)
    ]


def aligned(leaf: Tensor) -> Tensor:
    """The leaf, or a copy of it where it does not begin at a multiple of 64 bytes, or is not contiguous.

    Where a leaf begins in its rank's storage depends on the TP size, and a GEMM of operands that are aligned otherwise
    may add in another order (seen in MKL without AVX2; cuBLAS looks at the alignment too). One leaf must not be copied
    into another layout than the next has.
    """
    plain = leaf.is_contiguous() and leaf.stride() == (max(1, leaf.shape[1]), 1)  # a dimension of 1 may have any stride
    if leaf.data_ptr() % _ALIGNMENT == 0 and plain:
        return leaf
    return leaf.clone(memory_format=torch.contiguous_format)


class InvariantRows(ReplicatedRows):
    """Replicated rows whose dH adds over the ranks along the tree, in float32 (float64).

    Each rank adds one block of a chunk's rows (an all-to-all brings it the partial sums), then the blocks are gathered:
    the bytes of a ring all-reduce.
    """

    def __init__(self, input: Tensor, shard: VocabShard, chunk_size: int) -> None:
        super().__init__(input, shard, chunk_size)
        self._parts: tuple[int, Pending] | None = None  # of the chunk before
        self._block: tuple[int, Pending] | None = None  # of the one before that

    def reduce(self, chunk: int, grad: Tensor) -> None:
        self._advance()
        tp = self._shard.tp_size
        self._parts = chunk, all_to_all(self._shard, pad_rows(grad, -(-len(grad) // tp) * tp))

    def _advance(self) -> Tensor:
        """Takes the chunks under way a step further each: they travel, and hold memory, while the next two compute."""
        if self._grad is None:
            self._grad = torch.empty_like(self._input, memory_format=torch.contiguous_format)
        if self._block is not None:
            rows, block = self.chunks[self._block[0]], self._block[1].wait()
            self._grad[rows] = block.flatten(0, 1)[: rows.stop - rows.start]
            self._block = None
        if self._parts is not None:
            received = self._parts[1].wait()
            parts = received.view(self._shard.tp_size, -1, *received.shape[1:])
            summed = tree_sum(list(parts)).to(self._grad.dtype)
            self._block, self._parts = (self._parts[0], all_gather(self._shard, summed)), None
        return self._grad

    def input_grad(self) -> Tensor:
        self._advance()
        return self._advance()
