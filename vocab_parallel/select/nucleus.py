"""The nucleus of each row over all shards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.collectives import uncompiled
from vocab_parallel.headers import checksum
from vocab_parallel.select.crossing import crossing
from vocab_parallel.select.masses import Masses, masses_of, measure
from vocab_parallel.select.parameters import row_values
from vocab_parallel.select.scores import Scores, describe, open_scores, rows_of
from vocab_parallel.shard import VocabShard


class Nucleus(NamedTuple):
    """The smallest prefix of the total order with a mass of p; all but `kept` the same bits on every rank.

    Attributes:
        threshold: `[...]` in the logits' dtype: the smallest kept logit. All larger ones are kept.
        last_id: int64 `[...]`: of the logits equal to `threshold` those with ids up to it are kept.
        size: int64 `[...]`, tokens.
        mass: float64 `[...]`, their probability.
        kept: Bool `[..., shard_size]`, this rank's part; False in padding.
    """

    threshold: Tensor
    last_id: Tensor
    size: Tensor
    mass: Tensor
    kept: Tensor


@uncompiled
def top_p(
    logits: Tensor,  # [..., shard_size] floating, this rank's
    p: object,
    *,
    shard: VocabShard,
) -> Nucleus:
    """The smallest set of best tokens with a probability of p, the one that crosses p among it; ties go by id.

    A set whose probability is below p by less than 2**-20 of min(p, 1 - p) has reached it: rounding never decides.

    Args:
        logits: This rank's columns; padding columns are never read and never kept.
        p: In (0, 1], for all rows or `[T]` for each; 1 keeps every token.

    Returns:
        `Nucleus`.

    Collectives:
        All-gathers of 536 bytes a row, or 1,048 where a rank has n = 4,096 columns or more (a run of its columns), 8
        (mass) and 32 (result). For the rows that this does not settle, with so many columns, one of n / 2 + 8, at most
        8,200 (the next n / 16). For those that are left 8 and a search: 4 of 2,048 where n is 8,192 or more, else 8 of
        128. float64 columns count twice, and its searches take twice as many. None at tp_size 1.

    Raises:
        ValueError: On every rank: a p out of range, with its row.
        NonFiniteError, LayoutMismatchError: On every rank: a row with NaN, +inf or without a finite logit; not this
            rank's columns.

    Source:
        Holtzman et al., The curious case of neural text degeneration (2020), equation 2.
    """
    rows = rows_of(logits, shard)
    part, fault = torch.empty(0, dtype=torch.float64), None
    try:
        part = row_values(p, rows, "p", low=0.0, high=1.0, low_open=True)
    except ValueError as error:
        fault = error
    same = checksum(part.view(torch.int64))
    scores = open_scores(
        logits, shard, f"top_p(logits {describe(logits)})", kind="candidates", checksum=same, may_hide_nan=False
    )
    if fault is not None:
        with scores.channel.guard():
            raise fault
    found = crossing(scores, part, masked=True)
    assert found.mask is not None
    masses = found.masses if found.masses is not None else measure(found.scores)
    return _whole(logits, shard, found.scores, masses, found.mask & (scores.values > -torch.inf))


def _whole(logits: Tensor, shard: VocabShard, scores: Scores, masses: Masses, mask: Tensor) -> Nucleus:
    """What the ranks' parts `mask` `[T, n]` amount to. One all-gather of 32 bytes a row."""
    kept = (scores.values + 0.0).masked_fill(~mask, torch.inf)  # -0.0 is 0.0: which is met first depends on the ranks
    lowest = kept.amin(1) if kept.shape[1] else kept.new_full((scores.rows,), torch.inf)
    last = torch.where(kept == lowest[:, None], scores.token_ids, -1)
    mass = masses_of(scores.values, masses.largest[:, None], masses.bits).mul_(mask).sum(1)
    found = torch.stack(
        [lowest.double().view(torch.int64), last.amax(1) if last.shape[1] else mass - 1, mask.sum(1), mass]
    )
    every = scores.channel.gather(found)  # [size, 4, T]
    values = every[:, 0].view(torch.float64)
    threshold = values.amin(0)
    last_id = torch.where(values == threshold, every[:, 1], -1).amax(0)
    shape = logits.shape[:-1]
    whole = torch.zeros(scores.rows, shard.shard_size, dtype=torch.bool, device=logits.device)
    whole[:, : shard.num_valid] = mask
    return Nucleus(
        threshold.to(logits.dtype).view(shape),
        last_id.view(shape),
        every[:, 2].sum(0).view(shape),
        (every[:, 3].sum(0).double() / masses.total.double()).view(shape),
        whole.view(logits.shape),
    )
