"""What a row of scores says about itself: how concentrated it is, over how many ids, at what level.

With the row's scores `z / T` as p = softmax(z / T), its largest at id a and its second at id b:

    margin             (z_a - z_b) / T
    entropy            H = -sum_v p_v log p_v
    effective support  exp(H)
    normalizer         lse = log sum_v exp(z_v / T)
    energy             -T lse
    confidence         p_a

Observations, not decisions: a large margin or a small entropy says that the distribution is concentrated, and neither
that the token is right nor that confidences are calibrated (see `calibration`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from vocab_parallel.agreement import checksum
from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode.transforms.transform import RowValue, row_values
from vocab_parallel.select.masses import measure
from vocab_parallel.select.scores import Peak, Scores, open_scores, top_candidates
from vocab_parallel.select.support import require_support
from vocab_parallel.shard import VocabShard


class Diagnostics(NamedTuple):
    """Of each row of the scores `z / T`, all `[...]` and the same bits on every rank; nats are float64.

    Attributes:
        token_ids: int64, the largest score's id; of equal ones the smallest.
        runner_up: int64, the second in the total order; -1 where no other id has a score above -inf.
        margin: Nats, the largest score less the second; inf where there is no second. The same for `z + c`, but a
            temperature divides it.
        entropy: Nats, H in `[0, log(support)]`.
        effective_support: Ids, exp(H): the number of equally likely ids with this entropy.
        lse: Nats, log sum_v exp(z_v / T).
        energy: -T lse, in units of z (Liu et al. 2020).
        confidence: Probability of `token_ids`.
        support: int64, ids whose score is above -inf.
    """

    token_ids: Tensor
    runner_up: Tensor
    margin: Tensor
    entropy: Tensor
    effective_support: Tensor
    lse: Tensor
    energy: Tensor
    confidence: Tensor
    support: Tensor


@uncompiled
def diagnose(
    logits: Tensor,  # [..., shard_size] floating, this rank's
    *,
    shard: VocabShard,
    temperature: RowValue = 1.0,  # or [...]
) -> Diagnostics:
    """The diagnostics of each row, over all shards.

    Args:
        logits: This rank's columns; padding columns are never read.
        temperature: Divides the logits; at least 2**-100, finite in their dtype. One number, or one a row.

    Returns:
        `Diagnostics`, the same bits on every rank and at every TP size.

    Collectives:
        Two all-gathers, of 16 and 32 bytes a row (32 each for float64). None at tp_size 1.

    Raises:
        NonFiniteError, LayoutMismatchError, ValueError: On every rank: a row with NaN or without a finite logit; not
            this rank's columns; a temperature out of bounds.

    Source:
        Energy: Liu et al. 2020 (arXiv:2010.03759), equation 4.
    """
    per_row = isinstance(temperature, Tensor) and temperature.dim() > 0
    given = temperature.reshape(-1) if isinstance(temperature, Tensor) and per_row else temperature
    sum_of = checksum(given.double().view(torch.int64)) if isinstance(given, Tensor) and per_row else 0
    said = "of each row" if per_row else str(temperature)
    shape = list(getattr(logits, "shape", ()))
    scores = open_scores(logits, shard, f"diagnose(logits {shape}, temperature {said})", checksum=sum_of)
    with scores.channel.guard():
        high, device = torch.finfo(scores.values.dtype).max, scores.values.device
        divisor = row_values(given, scores.rows, "temperature", low=2.0**-100, high=high, device=device)
    found = diagnose_scores(scores.with_values(scores.values / divisor.to(scores.values.dtype)[:, None]), divisor)
    return Diagnostics(*(each.view(logits.shape[:-1]) for each in found))


def diagnose_scores(scores: Scores, temperature: Tensor | None = None) -> Diagnostics:
    """The diagnostics `[T]` of scores that are divided by their temperature `[T]` already (None: 1).

    Collectives:
        Those of `diagnose`; none for replicated scores.
    """
    peak, second = _best_two(scores)
    require_support(scores, peak.values, infinite=False)
    masses = measure(scores.with_values(scores.values, largest=peak.values), moments=True)
    assert masses.support is not None
    lse, entropy = masses.lse, masses.entropy
    return Diagnostics(
        token_ids=peak.token_ids,
        runner_up=torch.where(second.values == -torch.inf, -1, second.token_ids),
        margin=peak.values.double() - second.values.double(),
        entropy=entropy,
        effective_support=entropy.exp(),
        lse=lse,
        energy=-lse if temperature is None else -temperature * lse,
        confidence=2.0**masses.bits / masses.total.double(),
        support=masses.support,
    )


def _best_two(scores: Scores) -> tuple[Peak, Peak]:
    """The first and the second of each row in the total order."""
    best = top_candidates(scores, min(2, scores.vocab_size))  # ids ascending
    values, ids = best.values, best.token_ids
    if values.shape[1] < 2:
        values = torch.cat([values, torch.full_like(values, -torch.inf)], 1)
        ids = torch.cat([ids, torch.full_like(ids, scores.vocab_size)], 1)
    at = (values[:, 1] > values[:, 0]).to(torch.int64)[:, None]
    first = Peak(values.gather(1, at)[:, 0], ids.gather(1, at)[:, 0])
    return first, Peak(values.gather(1, 1 - at)[:, 0], ids.gather(1, 1 - at)[:, 0])
