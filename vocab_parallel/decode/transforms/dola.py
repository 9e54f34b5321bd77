"""DoLa: scores that contrast the last layer with an earlier one, through the same head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.agreement import first_row
from vocab_parallel.arguments import check_logits
from vocab_parallel.decode.transforms.divergence import divergences
from vocab_parallel.decode.transforms.history import Processor
from vocab_parallel.decode.transforms.transform import RowValue, View, row_values
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError
from vocab_parallel.select.filters import keep_min_p
from vocab_parallel.select.masses import Masses, measure
from vocab_parallel.select.scores import Scores, with_largest
from vocab_parallel.shard import VocabShard


@dataclass(frozen=True, eq=False)
class Dola(Processor):
    """`log p_mature - log p_premature` where `p_mature >= relative_top max p_mature`; the others are out.

    The scores are those of the last layer (mature). Reads from the view's extras "premature_logits", this rank's
    columns `[T, shard_size]` of an earlier layer, or `[T, M, shard_size]` of M layers: then each row takes the layer
    with the largest Jensen-Shannon divergence from the last one, the first of equal ones.

    Args:
        relative_top: In (0, 1]; or one for each request.

    Collectives:
        Those of `measure`, of both; with M layers one more of 8 bytes a row and layer.

    Source:
        Chuang et al. 2024, "DoLa: Decoding by Contrasting Layers", equations 2 to 6. The plausible set as in the
        `dola` decoding of Transformers, which takes one layer for the whole batch and sums divergences the other way.
    """

    name: ClassVar[str] = "dola"
    per_row: ClassVar[tuple[str, ...]] = ("relative_top",)
    relative_top: RowValue = 0.1

    def check(self, vocab_size: int, rows: int | None) -> None:
        self._tops(rows or self.row_count() or 1)

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        if scores.replicated:
            raise ValueError(
                "dola needs the scores of all ids, but a transform before it has left some candidates of each row. "
                "Put it before top_k."
            )
        with scores.channel.guard():
            layers = _premature_logits(view, scores)
        scores = with_largest(scores)
        mature = measure(scores)
        other = _chosen_layer(scores, mature, layers)
        # gaps below the largest first: formed log-sum-exps would lose digits of large scores
        ours = scores.values.double() - mature.largest.double()[:, None]
        theirs = other.values.double() - other.largest.double()[:, None]
        contrast = (ours - theirs) - (mature.log_total - other.log_total)[:, None]
        plausible = keep_min_p(scores, self._tops(len(ours))).values > -torch.inf
        return scores.with_values(torch.where(plausible, contrast, -torch.inf).to(scores.values.dtype))

    def _tops(self, rows: int) -> Tensor:
        return row_values(self.relative_top, rows, "dola's relative_top", low=0.0, high=1.0, low_open=True)


class _Layer(NamedTuple):
    """values: `[T, n]` this rank's columns of the chosen layers. largest, log_total: `[T]`, as of `Masses`."""

    values: Tensor
    largest: Tensor
    log_total: Tensor


def _chosen_layer(scores: Scores, mature: Masses, layers: Tensor) -> _Layer:
    (rows, n), count = scores.values.shape, layers.shape[1]
    flat = layers[..., :n].reshape(rows * count, n).to(scores.values.dtype)
    premature = with_largest(Scores(flat, scores.token_ids, scores.channel, scores.vocab_size))
    assert premature.largest is not None
    _require_layers(scores, premature.largest, count)
    masses = measure(premature)
    chosen = torch.arange(rows, device=flat.device) * count
    if count > 1:
        chosen = chosen + divergences(scores, mature, premature, masses).argmax(1)  # the first of equal ones
    return _Layer(flat[chosen], masses.largest[chosen], masses.log_total[chosen])


def _premature_logits(view: View, scores: Scores) -> Tensor:
    """`[T, M, shard_size]` from the view's extras."""
    rows = len(scores.values)
    logits = view.extras.get("premature_logits")
    if logits is None:
        raise ValueError(f"dola needs 'premature_logits' in the view's extras, which hold {sorted(view.extras)}")
    group = scores.channel.group
    assert isinstance(group, VocabShard)
    check_logits(logits, group)
    if logits.dim() not in (2, 3) or logits.shape[0] != rows or logits.shape[1] == 0:
        raise LayoutMismatchError(
            f"premature_logits must be [{rows}, shard_size] or [{rows}, layers, shard_size], got {list(logits.shape)}"
        )
    return logits.detach() if logits.dim() == 3 else logits.detach()[:, None]


def _require_layers(scores: Scores, largest: Tensor, count: int) -> None:
    """Raises on every rank for the first layer `[T * M]` with NaN, or with no finite logit or an infinite one."""
    if len(largest) == 0:
        return

    def error(flags: list[int]) -> Exception:
        row, layer = divmod(flags[0], count)
        return NonFiniteError(
            f"premature_logits of row {row}, layer {layer} of {count}, hold NaN or +inf, or no finite logit at all"
        )

    scores.channel.judge(first_row(~largest.isfinite())[None], NonFiniteError, error)
