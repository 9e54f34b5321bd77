"""What the processors share: parameters that are token ids, and the ids that a request has so far."""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from vocab_parallel.decode.transforms.row_transform import RowTransform
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.errors import LayoutMismatchError, TokenRangeError
from vocab_parallel.select.scores import Scores

Ids = tuple[int, ...]
SCOPES = ("all", "generated", "prompt")
COUNTS = ("generated", "all")

_Self = TypeVar("_Self", bound="Processor")
_T = TypeVar("_T")


class Processor(RowTransform):
    """A transform with ids among its parameters: ids for all requests, or a list of ids for each request.

    Attributes:
        depths: How deep a field is nested where it is the same for all requests: 0 a number (the default), 1 ids,
            2 lists of ids. One deeper is one value for each request.
    """

    depths: ClassVar[Mapping[str, int]] = {}

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in {*self.per_row, *self.depths}:
            value = _plain(getattr(self, name))
            object.__setattr__(self, name, (value,) if self.depths.get(name) == 1 and isinstance(value, int) else value)

    def varies(self, name: str) -> bool:
        """Whether a field has one value for each request."""
        value = getattr(self, name)
        return name in self.per_row and isinstance(value, tuple) and _deeper(value, self.depths.get(name, 0))

    def for_each_row(self, name: str) -> list[Any]:
        """A field's values: one that is for all requests, or one for each."""
        value = getattr(self, name)
        return list(value) if self.varies(name) else [value]

    def row_count(self) -> int | None:
        return next((len(getattr(self, name)) for name in self.per_row if self.varies(name)), None)

    def for_rows(self: _Self, index: Sequence[int]) -> _Self:
        if list(index) == list(range(self.row_count() or 0)):
            return self  # with what is made of its parameters
        varying = [name for name in self.per_row if self.varies(name)]
        chosen = {name: tuple(self.for_each_row(name)[at] for at in index) for name in varying}
        return dataclasses.replace(self, **chosen) if chosen else self  # type: ignore[type-var]

    def check(self, vocab_size: int, rows: int | None) -> None:
        for name in self.per_row:
            if self.varies(name) and rows is not None and len(getattr(self, name)) != rows:
                raise ValueError(
                    f"{self.name}'s {name} has {len(getattr(self, name))} values for {rows} rows: give one for all "
                    "rows, or one for each request."
                )
        super().check(vocab_size, rows)

    def check_ids(self, name: str, vocab_size: int) -> None:
        """Raises for the first id of a field (of depth 1 or 2) that is no real one, naming its row."""
        for row, value in enumerate(self.for_each_row(name)):
            where = f"{self.name}'s {name}" + (f" of row {row}" if self.varies(name) else "")
            for entry in value if self.depths[name] == 2 else [value]:
                check_ids(entry, vocab_size, where)

    def ids_like(self, name: str, scores: Scores) -> Tensor:
        """int64 `[T, m]`: the ids of a field (of depth 1) for each row, -1 where a row has fewer."""

        def table() -> Tensor:
            given = self.for_each_row(name)
            width = max((len(ids) for ids in given), default=0)
            padded = [[*ids, *[-1] * (width - len(ids))] for ids in given]
            return torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(given), width)

        device = scores.values.device
        return self.once((name, device), table).expand(scores.rows, -1)

    def once(self, key: object, make: Callable[[], _T]) -> _T:
        """What `make()` gives, made at the first call with this key: parameters do not change."""
        if key not in self._made:
            self._made[key] = make()
        made: _T = self._made[key]
        return made

    @cached_property
    def _made(self) -> dict[object, Any]:
        return {}


def check_ids(ids: Iterable[object], vocab_size: int, where: str) -> None:
    """Raises for the first of `ids` that is not an integer in `[0, vocab_size)`.

    Raises:
        TokenRangeError: Naming the id and its place.
    """
    if isinstance(ids, (int, float, str)):
        raise TokenRangeError(f"{where} must be a list of token ids, got {ids!r}")
    for at, one in enumerate(ids):
        if not isinstance(one, int) or isinstance(one, bool):
            raise TokenRangeError(f"{where} must hold integer token ids, got {one!r} at place {at}")
        if not 0 <= one < vocab_size:
            cause = (
                "ids from vocab_size up are padding, which has storage but is no vocabulary, or another tokenizer's"
                if one >= 0
                else "there are no negative ids"
            )
            raise TokenRangeError(f"{where} has token id {one} at place {at}, outside [0, {vocab_size}): {cause}.")


def check_choice(value: object, allowed: Sequence[str], where: str) -> None:
    """Raises ValueError unless `value` is one of the words `allowed`."""
    if value not in allowed:
        raise ValueError(f"{where} must be one of {', '.join(map(repr, allowed))}, got {value!r}")


def check_table(table: object, vocab_size: int, where: str) -> None:
    """Raises unless `table` is a tensor `[vocab_size]`."""
    if not isinstance(table, Tensor) or table.shape != (vocab_size,):
        got = list(table.shape) if isinstance(table, Tensor) else type(table).__name__
        raise LayoutMismatchError(f"{where} must have one entry for each of the {vocab_size} ids, got {got}")


def ids_of(view: View, scope: str) -> Tensor:
    """int64 `[T, L]`: the ids of the prompt, those generated, or all; -1 where there is none."""
    if scope == "all":
        return view.prefix
    generated = view.generated()
    return generated if scope == "generated" else torch.where(generated >= 0, -1, view.prefix)


def length_of(view: View, counts: str) -> Tensor:
    """int64 `[T]`: how many ids have been generated, or with the prompt's."""
    return view.step if counts == "generated" else view.step + view.prompt_length


def aligned(ids: Tensor) -> Tensor:
    """`[T, L]` with what is not -1 moved to the end, in order."""
    there = (ids >= 0).to(torch.int8)
    return ids.gather(1, there.sort(dim=1, stable=True).indices)


def places(token_ids: Tensor, n: int, ids: Tensor) -> Tensor:
    """int64 `[T, m]`: the column of each of `ids` `[T, m]` among `token_ids` `[n]` or `[T, n]`; n where it is none."""
    if n == 0:
        return torch.zeros_like(ids)
    ids = ids.contiguous()
    at = torch.searchsorted(token_ids, ids)
    last = at.clamp(max=n - 1)
    found = (token_ids.gather(1, last) if token_ids.dim() == 2 else token_ids[last]) == ids
    return torch.where(found & (at < n), at, n)


def changed(
    scores: Scores,
    ids: Tensor,  # int64 [T, m]
    change: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Scores:
    """The scores with those at the `ids` changed once, however often an id is among them; -1 is none.

    Args:
        change: Of scores `[k]`, and the rows `[k]` and the places among the row's ids `[k]` that they belong to; the
            same for every place of an id.
    """
    z, at = scores.values, places(scores.token_ids, scores.values.shape[1], ids)
    rows, which = (at < z.shape[1]).nonzero(as_tuple=True)
    columns = at[rows, which]
    return scores.with_values(z.index_put((rows, columns), change(z[rows, columns], rows, which)))


def occurrences(ids: Tensor) -> Tensor:
    """int64 `[T, m]`: how often each of the row's ids `[T, m]` is among them."""
    ordered, ids = ids.sort(dim=1).values, ids.contiguous()
    return torch.searchsorted(ordered, ids, right=True) - torch.searchsorted(ordered, ids)


@dataclass(frozen=True)
class Phrases:
    """Id sequences that are looked for at the end of each request's ids, all but their last id.

    Attributes:
        last: int64 `[R, m]`, the last ids; -1 where a row has fewer. R is 1, or one row for each request.
        before: For the places 1, 2, ... before the last: the ids there `[R, c]` of the first `c` sequences, which are
            those that are so long; -1 where a row has fewer.
        order: For each row, which sequence each of the m is.
    """

    last: Tensor
    before: tuple[Tensor, ...]
    order: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, rows: Sequence[Sequence[Ids]], device: torch.device) -> Phrases:
        """The sequences of each row, or of all rows."""
        order = [sorted(range(len(row)), key=lambda at, row=row: -len(row[at])) for row in rows]  # type: ignore[misc]
        ordered = [[row[at] for at in places] for row, places in zip(rows, order, strict=True)]
        longest = max((len(ids) for row in ordered for ids in row), default=1)

        def packed(place: int) -> Tensor:
            found = [[ids[-1 - place] for ids in row if len(ids) > place] for row in ordered]
            width = max((len(row) for row in found), default=0)
            return torch.tensor([row + [-1] * (width - len(row)) for row in found], dtype=torch.int64, device=device)

        before = tuple(packed(place) for place in range(1, longest))
        return cls(packed(0), before, tuple(map(tuple, order)))

    def ended_by_next(
        self,
        history: Tensor,  # int64 [T, L], as `aligned` gives
    ) -> Tensor:
        """Bool `[T, m]`: whether the next id would complete the sequence if it is its last. O(T) a place of each."""
        rows, length = history.shape
        ended = (self.last >= 0).expand(rows, -1).clone()
        for place, wanted in enumerate(self.before):
            got = history[:, length - 1 - place, None] if place < length else -1
            ended[:, : wanted.shape[1]] &= (wanted == got) | (wanted < 0)  # below 0: no sequence, or a shorter one
        return ended


def _plain(value: Any) -> Any:
    """Numbers given as tensors or as another library's integers, as (tuples of) int or float; the rest as it is."""
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(one) for one in value)
    if isinstance(value, (bool, float, str)):
        return value
    return int(value) if isinstance(value, numbers.Integral) else value


def _deeper(value: tuple[Any, ...], depth: int) -> bool:
    """Whether `value` is nested deeper than `depth`; a tuple of empty tuples is."""
    if depth == 0:
        return True
    nested = [one for one in value if isinstance(one, tuple)]
    if depth == 1:
        return len(nested) > 0
    return len(nested) > 0 and (any(_deeper(one, depth - 1) for one in nested) or not any(nested))
