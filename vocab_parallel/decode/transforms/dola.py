"""DoLa: scores that contrast the last layer with an earlier one, through the same head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.agreement import first_row
from vocab_parallel.arguments import check_logits
from vocab_parallel.decode.transforms.columns import as_columns
from vocab_parallel.decode.transforms.divergence import divergences
from vocab_parallel.decode.transforms.row_transform import MASS, Bounds, RowTransform
from vocab_parallel.decode.transforms.transform import RowValue, View
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError
from vocab_parallel.select.filters import keep_min_p
from vocab_parallel.select.masses import Masses, measure
from vocab_parallel.select.scores import Scores, with_largest
from vocab_parallel.shard import VocabShard


@dataclass(frozen=True, eq=False)
class Dola(RowTransform):
    """`log p_mature - log p_premature` where `p_mature >= relative_top max p_mature`; the others are out.

    The scores are those of the last layer (mature). Reads from the view's extras "premature_logits", this rank's
    columns `[T, shard_size]` of an earlier layer, or `[M, T, shard_size]` of M layers: then each row takes the layer
    with the largest Jensen-Shannon divergence from the last one, the first of equal ones.

    Args:
        relative_top: In (0, 1]; or one for each request.

    Collectives:
        Those of `measure`: 8 (unless known) and 8 bytes a row, and 16 a row and layer. With more than one layer 8 a row
        and layer more.

    Source:
        Chuang et al. 2024, "DoLa: Decoding by Contrasting Layers", equations 2 to 6. The plausible set as in the
        `dola` decoding of Transformers, which takes one layer for the whole batch and sums divergences the other way.
    """

    name: ClassVar[str] = "dola"
    bounds: ClassVar[Bounds] = {"relative_top": MASS}
    per_row: ClassVar[tuple[str, ...]] = ("relative_top",)
    relative_top: RowValue = 0.1

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        scores = as_columns(scores)
        with scores.channel.guard():
            layers = _premature_logits(view, scores)
        scores = with_largest(scores)
        mature = measure(scores)
        other = _chosen_layer(scores, mature, layers)
        # gaps below the largest first: formed log-sum-exps would lose digits of large scores
        ours = scores.values.double() - mature.largest.double()[:, None]
        theirs = other.values.double() - other.largest.double()[:, None]
        contrast = (ours - theirs) - (mature.log_total - other.log_total)[:, None]
        plausible = keep_min_p(scores, self.row("relative_top", scores.rows)).values > -torch.inf
        return scores.with_values(torch.where(plausible, contrast, -torch.inf).to(scores.values.dtype))


class _Layer(NamedTuple):
    """values: `[T, n]` this rank's columns of the chosen layers. largest, log_total: `[T]`, as of `Masses`."""

    values: Tensor
    largest: Tensor
    log_total: Tensor


def _chosen_layer(scores: Scores, mature: Masses, layers: Tensor) -> _Layer:
    (rows, n), count = scores.values.shape, layers.shape[1]
    flat = layers[..., :n].reshape(rows * count, n).to(scores.values.dtype)
    premature = with_largest(Scores(flat, scores.token_ids, scores.channel, scores.vocab_size, scores.first_id))
    assert premature.largest is not None
    _require_layers(scores, premature.largest, count)
    masses = measure(premature)
    chosen = torch.arange(rows, device=flat.device) * count
    if count > 1:
        chosen = chosen + divergences(scores, mature, premature, masses, count).argmax(1)  # the first of equal ones
    return _Layer(flat[chosen], masses.largest[chosen], masses.log_total[chosen])


def _premature_logits(view: View, scores: Scores) -> Tensor:
    """`[T, M, shard_size]`, of the view's extras."""
    rows = len(scores.values)
    logits = view.extras.get("premature_logits")
    if logits is None:
        raise ValueError(f"dola needs 'premature_logits' in the view's extras, which hold {sorted(view.extras)}")
    group = scores.channel.group
    assert isinstance(group, VocabShard)
    check_logits(logits, group)
    if logits.dim() not in (2, 3) or logits.shape[-2] != rows or logits.shape[0] == 0 < rows:
        raise LayoutMismatchError(
            f"premature_logits must be [{rows}, shard_size] or [layers, {rows}, shard_size], got {list(logits.shape)}"
        )
    return logits.detach().movedim(-2, 0) if logits.dim() == 3 else logits.detach()[:, None]


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
