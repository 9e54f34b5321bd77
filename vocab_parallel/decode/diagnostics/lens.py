"""Logit lens: what the head says of intermediate hidden states, through a named final norm; also by learned maps.

The rows of layer l are read as `head(norm(h_l))`. That is an intervention: the model sends h_l through its other
layers, whose output is what it predicts from. A token that the lens shows early is no promise of the model, and a
translator (`translator`) that makes it agree more does not prove that the layer held the answer in this basis.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vocab_parallel.agreement import checksum
from vocab_parallel.collectives import uncompiled
from vocab_parallel.decode.diagnostics.translator import Translator, check_hidden, check_norm
from vocab_parallel.decode.search.searching import at_least_one
from vocab_parallel.errors import LayoutMismatchError, TokenRangeError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.loss import chunk_rows
from vocab_parallel.select.channel import Channel
from vocab_parallel.select.masses import measure
from vocab_parallel.select.nan import nan_found
from vocab_parallel.select.scores import Peak, Scores, describe, top_candidates, value_at
from vocab_parallel.select.support import require_support


class LayerReadings(NamedTuple):
    """What the lens shows, for L layers and T rows; the same bits on every rank.

    Attributes:
        norm_name: The final norm that the rows went through, as the caller named it.
        token_ids: int64 `[L, T, k]`, the first k of the total order.
        logprobs: float64 `[L, T, k]`, theirs under the whole softmax, in nats.
        entropy: float64 `[L, T]`, nats.
        target_logprob: float64 `[L, T]`, nats; None without a target.
        target_rank: int64 `[L, T]`, from 1: one more than the ids before the target in the total order; None without.
    """

    norm_name: str
    token_ids: Tensor
    logprobs: Tensor
    entropy: Tensor
    target_logprob: Tensor | None
    target_rank: Tensor | None


@uncompiled
@torch.no_grad()
def logit_lens(
    hidden_by_layer: Tensor,  # [L, T, D] (or [L, ..., D]), the same on every rank
    norm: nn.Module,
    head: VocabParallelLMHead,
    *,
    norm_name: str,
    k: int = 10,
    target: Tensor | None = None,  # [T] (or [...]) global ids
    translator: Translator | None = None,
    rows_at_once: int | None = None,
) -> LayerReadings:
    """Reads hidden states of any layers by the model's final norm and head.

    Args:
        hidden_by_layer: Rows of the residual stream, before the final norm.
        norm: The model's final norm. There is no default: a lens without it, or with another one, is another lens. For
            rows that the norm has been applied to (as in the last of Transformers' `hidden_states`) pass
            `nn.Identity()` and say so in the name.
        head: Its projection and bias are applied too.
        norm_name: What the norm is called in the result.
        target: Ids whose log-probability and rank are wanted, one a row for all layers.
        translator: Maps each layer's rows first. Its layers are these, in order, and its norm has this name.
        rows_at_once: How many rows of logits are held at a time. None: 128 MiB of them.

    Returns:
        `LayerReadings`. The rows' logits are this machine's matrix products, which another TP size may round
        otherwise; everything after them is exact.

    Collectives:
        A layer and block of rows: an all-gather of `8 k` bytes a row, one of 32, and with a target two of 8; twice the
        `8 k` for float64. None at tp_size 1.

    Raises:
        LayoutMismatchError, NonFiniteError, TokenRangeError, ValueError: On every rank.

    Source:
        nostalgebraist 2020, "interpreting GPT: the logit lens"; with a translator Belrose et al. 2023
        (arXiv:2303.08112).
    """
    shard = head.shard
    words = f"logit_lens(k={k}, norm_name={norm_name!r}, target={target is not None}, rows_at_once={rows_at_once})"
    shape = list(getattr(hidden_by_layer, "shape", ()))
    opening = Channel(
        shard, f"{words} of {shape}", checksum=checksum(target) if target is not None and _is_ids(target) else 0
    )
    with opening.guard():
        check_hidden(hidden_by_layer)
        check_norm(norm, norm_name)
        _check(k, target, hidden_by_layer, head, rows_at_once)
        if translator is not None:
            translator.check_layers(len(hidden_by_layer))
            translator.check_norm_name(norm_name)
    opening.open(device=hidden_by_layer.device)
    hidden = hidden_by_layer.detach().flatten(1, -2)
    ids = None if target is None else target.reshape(-1).to(torch.int64)
    step = rows_at_once or chunk_rows(shard, torch.float32, None)
    layers = []
    for layer, rows in enumerate(hidden):
        blocks = []
        for at in range(0, max(1, len(rows)), step):
            block = rows[at : at + step]
            logits = head.logits(norm(block if translator is None else translator(block, layer)))
            channel = Channel(shard, f"{words}, layer {layer}, row {at}", found=nan_found(logits, shard))
            scores = Scores.of(logits, shard, channel)
            blocks.append(_read(scores, k, None if ids is None else ids[at : at + step]))
        layers.append([torch.cat(parts) for parts in zip(*blocks, strict=True)])
    found = [torch.stack(parts).unflatten(1, shape[1:-1]) for parts in zip(*layers, strict=True)]  # type: ignore[no-untyped-call]
    return LayerReadings(norm_name, *found[:3], *(found[3:] or (None, None)))


def _read(scores: Scores, k: int, target: Tensor | None) -> list[Tensor]:
    """Ids and log-probabilities of the best k, entropy; and the target's log-probability and rank."""
    best = top_candidates(scores, k)
    peak = best.peak
    assert peak is not None
    require_support(scores, peak.values, infinite=False)
    masses = measure(scores.with_values(scores.values, largest=peak.values), moments=True)
    # candidates come by id: back into the total order
    values, at = best.values.sort(dim=1, descending=True, stable=True)
    found = [best.token_ids.gather(1, at), masses.logprob(values), masses.entropy]
    if target is None:
        return found
    value = value_at(scores, target)
    return [*found, masses.logprob(value), 1 + _before(scores, Peak(value, target))]


def _before(scores: Scores, entry: Peak) -> Tensor:
    """How many ids come before an entry of each row in the total order: int64 `[T]`."""
    value, token_id = entry.values[:, None], entry.token_ids[:, None]
    before = (scores.values > value) | ((scores.values == value) & (scores.token_ids < token_id))
    return scores.channel.gather(before.sum(1)).sum(0)


def _check(k: int, target: Tensor | None, hidden: Tensor, head: VocabParallelLMHead, rows_at_once: int | None) -> None:
    shard = head.shard
    at_least_one(k=k, rows_at_once=1 if rows_at_once is None else rows_at_once)
    if k > shard.vocab_size:
        raise ValueError(f"k must be at most {shard.vocab_size} (the vocabulary), got {k}")
    if target is None:
        return
    if not _is_ids(target) or target.shape != hidden.shape[1:-1]:
        raise LayoutMismatchError(
            f"target must be one integer id a row, {list(hidden.shape[1:-1])}: {describe(target)}"
        )
    outside = ((target < 0) | (target >= shard.vocab_size)).flatten()
    if bool(outside.any()):
        row = int(outside.nonzero()[0])
        raise TokenRangeError(f"target {int(target.flatten()[row])} at row {row} is outside [0, {shard.vocab_size})")


def _is_ids(target: object) -> bool:
    return isinstance(target, Tensor) and not target.is_floating_point() and target.dtype != torch.bool
