"""Additive biases: on ids, on a whole table, and on the last id of a sequence that would be completed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.history import (
    Phrases,
    Processor,
    aligned,
    changed,
    check_ids,
    check_table,
    places,
)
from vocab_parallel.decode.transforms.row_transform import LARGEST
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.select.scores import Scores


@dataclass(frozen=True, eq=False)
class Bias(Processor):
    """`z_v + b_v`; `b_v = -inf` forbids a token.

    An id's biases are added to each other first, in the order `bias`, `table`, `sequences`, and the sum to the score.

    Args:
        bias: Token id -> bias in nats; or one such mapping for each request.
        sequences: Pairs of ids and bias in nats: the bias is for the last id, while the ids so far end in the others.
        table: `[V]` biases in nats of all ids.

    Source:
        `SequenceBiasLogitsProcessor` of Transformers; `logit_bias` of the OpenAI API.
    """

    name: ClassVar[str] = "bias"
    per_row: ClassVar[tuple[str, ...]] = ("bias",)
    bias: Mapping[int, float] | Sequence[Mapping[int, float]] = ()
    sequences: Sequence[tuple[Sequence[int], float]] = ()
    table: Tensor | Sequence[float] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.table is not None:
            object.__setattr__(self, "table", torch.as_tensor(self.table))
        if self.bias == ():
            object.__setattr__(self, "bias", {})

    def is_hard(self) -> bool:
        given = [value for row in self.for_each_row("bias") for value in row.values()]
        forbidden = -math.inf in given or any(value == -math.inf for _, value in self.sequences)
        return forbidden or (isinstance(self.table, Tensor) and bool((self.table == -math.inf).any()))

    def check(self, vocab_size: int, rows: int | None) -> None:
        super().check(vocab_size, rows)
        for row, given in enumerate(self.for_each_row("bias")):
            where = f"bias of row {row}" if self.varies("bias") else "bias"
            if not isinstance(given, Mapping):
                raise ValueError(f"{where} must map token ids to numbers, got {given!r}")
            check_ids(given, vocab_size, where)
            for token_id, value in given.items():
                _check_bias(value, f"{where}, token id {token_id},")
        for at, (ids, value) in enumerate(self.sequences):
            if len(ids) == 0:
                raise ValueError(f"sequence {at} of bias is empty")
            check_ids(ids, vocab_size, f"sequence {at} of bias")
            _check_bias(value, f"sequence {at} of bias")
        if self.table is not None:
            check_table(self.table, vocab_size, "bias's table")
            assert isinstance(self.table, Tensor)
            bad = ((self.table.abs() > LARGEST) & (self.table != -math.inf) | self.table.isnan()).nonzero()
            if len(bad):
                _check_bias(self.table[bad[0, 0]].item(), f"bias's table, token id {int(bad[0, 0])},")

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        rows, n = scores.values.shape
        packed = self._packed(scores.values.device)
        if self.table is None and not self.sequences:  # an id once a row
            amounts = packed.amounts.to(scores.values.dtype).expand(rows, -1)
            return changed(scores, packed.ids.expand(rows, -1), lambda seen, rows, places: seen + amounts[rows, places])
        total = scores.values.new_zeros(rows, n + 1)  # the last column takes what other ranks hold
        ids = packed.ids.expand(rows, -1)
        total.scatter_add_(1, places(scores.token_ids, n, ids), packed.amounts.to(total.dtype).expand(rows, -1))
        if isinstance(self.table, Tensor):
            total[:, :n] += scores.take(self.table.to(total.device, total.dtype))
        if self.sequences:
            ended = packed.phrases.ended_by_next(aligned(view.prefix))
            amounts = torch.where(ended, packed.phrase_amounts.to(total.dtype), 0.0)
            at = places(scores.token_ids, n, packed.phrases.last.expand(rows, -1))
            for layer in packed.layers:  # in each an id occurs once: the sum has one order
                total.scatter_add_(1, at[:, layer], amounts[:, layer])
        return scores.with_values(scores.values + total[:, :n])

    def _packed(self, device: torch.device) -> _PackedBias:
        return self.once(device, lambda: _PackedBias.of(self.for_each_row("bias"), self.sequences, device))


@dataclass(frozen=True)
class _PackedBias:
    """A bias as tensors: ids and amounts `[R, m]`, and sequences with amounts `[1, m]` in layers of different ids."""

    ids: Tensor
    amounts: Tensor
    phrases: Phrases
    phrase_amounts: Tensor
    layers: tuple[Tensor, ...]

    @classmethod
    def of(
        cls, rows: Sequence[Mapping[int, float]], sequences: Sequence[tuple[Sequence[int], float]], device: torch.device
    ) -> _PackedBias:
        width = max(len(row) for row in rows)
        ids = [[*row, *[-1] * (width - len(row))] for row in rows]
        amounts = [[*row.values(), *[0.0] * (width - len(row))] for row in rows]
        phrases = Phrases.of([[tuple(found) for found, _ in sequences]], device)
        occurrence: dict[int, int] = {}
        layers: dict[int, list[int]] = {}
        position = {which: at for at, which in enumerate(phrases.order[0])}
        for which, (found, _) in enumerate(sequences):
            occurrence[found[-1]] = layer = occurrence.get(found[-1], -1) + 1
            layers.setdefault(layer, []).append(position[which])
        return cls(
            torch.tensor(ids, dtype=torch.int64, device=device).reshape(len(rows), width),
            torch.tensor(amounts, dtype=torch.float64, device=device).reshape(len(rows), width),
            phrases,
            torch.tensor([[sequences[which][1] for which in phrases.order[0]]], dtype=torch.float64, device=device),
            tuple(torch.tensor(layer, dtype=torch.int64, device=device) for layer in layers.values()),
        )


def _check_bias(value: object, where: str) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not good or not (value == -math.inf or -LARGEST <= value <= LARGEST):  # type: ignore[operator]
        raise ValueError(f"{where} must be -inf (which forbids the token) or a float32's number, got {value!r}")
