"""What a converted model carries: its sharded parts, its loss, and the way back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.errors import ConfigError, LayoutMismatchError
from vocab_parallel.integrations.transformers.modules import ShardedEmbedding, ShardedHead, Snapshot, scale_gradient
from vocab_parallel.loss.options import Scores
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import verify_tied


@dataclass
class Conversion:
    """State of a converted model, its attribute `_vocab_parallel`.

    Attributes:
        data_parallel: Ranks hold different batches.
        tied: The head's weight is the embedding's, one Parameter.
        scores: What the model does to its head's output.
        logits_with_loss: Return logits beside a loss.
        plain, before: The model's class, and its embedding and head, before.
        managed: Something that knows of the shards clips gradients and saves: see `attach`.
        labels_known: Labels have been seen, and were not shifted already.
    """

    embedding: ShardedEmbedding
    head: ShardedHead
    embedding_name: str
    head_name: str
    shard: VocabShard
    data_parallel: bool
    tied: bool
    scores: Scores
    logits_with_loss: bool
    chunk_size: int | None
    plain: type[Any]
    before: tuple[Snapshot, Snapshot]
    managed: bool = field(default=False)
    labels_known: bool = field(default=False)

    def tables(self) -> Iterator[tuple[str, Any, str]]:
        """Qualified name, module and attribute of each sharded parameter; a tied one once, as the embedding's."""
        yield f"{self.embedding_name}.weight", self.embedding, "weight"
        if not self.tied:
            yield f"{self.head_name}.weight", self.head, "weight"
        if self.head.bias is not None:
            yield f"{self.head_name}.bias", self.head, "bias"

    def check(self, model: Any) -> None:
        """Raises unless the model's parts are still those that were converted, and still tied."""
        for what, mine, now in (
            (self.embedding_name, self.embedding, model.get_input_embeddings()),
            (self.head_name, self.head, model.get_output_embeddings()),
        ):
            if now is not mine:
                raise ConfigError(
                    f"{what} was replaced after apply by a {type(now).__name__} that is not sharded (an adapter, a "
                    "resize). Do that before apply; or unapply, change it, and apply again."
                )
        if self.tied and self.embedding.weight is not self.head.weight:
            verify_tied(model)  # raises, naming both

    def loss(
        self, hidden: Tensor, labels: Tensor, shifted: Tensor | None, items: Any, ignore_index: int,
        input_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The loss by the conventions of Transformers, of hidden states `[..., D]` and labels `[...]`.

        Labels are shifted unless `shifted` are given; labels that are the next ids of `input_ids` already are refused.
        The mean over the valid rows, or their sum over `items`, the number of rows of a larger batch. With
        `data_parallel`, rows and mean are those of all ranks; with `items` each rank gets an equal share of the sum, so
        that shares add up as the losses of data-parallel ranks do.
        """
        fault: Exception | None = None
        if shifted is None:
            fault = capture(self._require_unshifted, labels, input_ids, ignore_index)
            shifted = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        shifted = shifted.to(hidden.device)
        # Ranks of a data-parallel group have shapes of their own, so only the row count is compared, by the loss.
        if hidden.shape[:-1] != shifted.shape:
            fault = LayoutMismatchError(
                f"hidden states {list(hidden.shape)} and labels {list(shifted.shape)} disagree: labels are for every "
                "position (no logits_to_keep with labels)."
            )
        if fault is not None:
            Exchange(self.shard, "loss", "linear_cross_entropy", fault=fault).wait()
        rows, target = hidden.flatten(0, -2), shifted.flatten()
        options: dict[str, Any] = {
            "ignore_index": ignore_index, "softcap": self.scores.softcap, "temperature": self.scores.temperature,
            "chunk_size": self.chunk_size, "reduction": "mean" if items is None else "sum",
        }  # fmt: skip
        if not self.data_parallel:
            loss = self.head.loss(rows, target, **options)
            return loss if items is None else loss / _like(items, loss)
        ranks = self.shard.tp_size
        # The trunk's gradients are averaged over the ranks by DDP, while this loss is of all ranks' rows already.
        rows = scale_gradient(rows, float(ranks))
        if items is not None:
            # As a weight of each rank's own rows: the ranks may count differently (average_tokens_across_devices).
            options["row_weight"] = (1.0 / _like(items, rows).float()).expand(len(target))
        loss = self.head.loss(rows, target, sequence_parallel=True, **options)
        return loss if items is None else loss / ranks

    def _require_unshifted(self, labels: Tensor, input_ids: Tensor | None, ignore_index: int) -> None:
        """Raises for labels that a data pipeline has shifted already: the model would shift them once more.

        Looked at until a batch has told, which is the first one with a label: it costs one wait for the device.
        """
        if self.labels_known or input_ids is None or input_ids.shape != labels.shape:
            return
        labels = labels.to(input_ids.device)
        valid = labels != ignore_index
        self.labels_known = bool(valid.any())
        next_ids = (labels[..., :-1] == input_ids[..., 1:])[valid[..., :-1]]
        if bool((labels == input_ids)[valid].all()) or not len(next_ids) or not bool(next_ids.all()):
            return
        raise ConfigError(
            f"labels are shifted already: at all {len(next_ids)} places with a label they hold the id that follows in "
            "input_ids. The model shifts them itself, so each place would learn the id after the next. Pass labels in "
            "the places of their own ids (labels = input_ids), or the shifted ones as shift_labels beside labels."
        )

    def whole_scores(self, hidden: Tensor) -> Tensor:
        """The model's logits `[..., vocab_size]`, in the hidden states' dtype."""
        return self._after_head(self.head.whole_logits(hidden))

    def local_scores(self, hidden: Tensor) -> Tensor:
        """This rank's columns of the model's logits, `[..., shard_size]`, of hidden states that every rank holds."""
        return self._after_head(self.head.logits(hidden))

    def _after_head(self, raw: Tensor) -> Tensor:
        if self.scores == Scores():
            return raw
        softcap, temperature = self.scores.softcap, self.scores.temperature
        capped = raw if softcap is None else torch.tanh(raw / softcap) * softcap
        return capped / temperature


def conversion_of(model: Any) -> Conversion:
    """What `apply` left on the model, also if DDP or an engine wraps it.

    Raises:
        ConfigError: The model is not converted.
    """
    conversion = getattr(inner_of(model), "_vocab_parallel", None)
    if not isinstance(conversion, Conversion):
        raise ConfigError(f"this {type(model).__name__} is not converted: call apply(model, shard=shard) first")
    return conversion


def inner_of(model: Any) -> Any:
    """The converted model, out of what wraps it; what is innermost if there is none."""
    while not isinstance(getattr(model, "_vocab_parallel", None), Conversion) and hasattr(model, "module"):
        model = model.module
    return model


def _like(items: Any, tensor: Tensor) -> Tensor:
    count = torch.as_tensor(items, device=tensor.device)
    return torch.where(count == 0, torch.ones_like(count), count)  # no valid rows: a loss of 0
