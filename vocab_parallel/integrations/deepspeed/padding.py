"""How ZeRO cuts a flat buffer of parameters: equal partitions, padding at the end, which may fill several of them."""

from __future__ import annotations

from typing import NamedTuple


class Partition(NamedTuple):
    """A flat buffer over data-parallel ranks.

    Attributes:
        padded_numel: Elements with padding.
        per_rank: Elements of each rank.
        padding: Elements of each rank that are padding, in rank order.
    """

    padded_numel: int
    per_rank: int
    padding: tuple[int, ...]


def partition_padding(numel: int, ranks: int, *, alignment: int) -> Partition:
    """Where the padding of `numel` elements lies, cut over `ranks` after padding to a multiple of `alignment`.

    DeepSpeed aligns a group of stages 1 and 2 to `2 * ranks`, a parameter of stage 3 to `ranks`. With few elements the
    padding covers the last rank and more.

    Raises:
        ValueError: `alignment` is no multiple of `ranks`, or a size below 1.
    """
    if ranks < 1 or alignment < 1 or numel < 0 or alignment % ranks:
        raise ValueError(
            f"cannot cut {numel} elements over {ranks} ranks with alignment {alignment}: the alignment must be a "
            "multiple of the ranks, and both at least 1"
        )
    padded = -(-numel // alignment) * alignment
    share = padded // ranks
    return Partition(padded, share, tuple(min(share, max(0, (rank + 1) * share - numel)) for rank in range(ranks)))
