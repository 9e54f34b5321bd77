"""What a decoding policy is made of: transforms of one step's scores, what they may read, and what they are told.

A transform is a frozen dataclass with a name. It maps `Scores` to `Scores`, the same bits on every rank, and keeps
nothing itself: what changes from step to step is a dict of tensors with one row a request, which the policy's state
holds and reorders.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from vocab_parallel.select import parameters
from vocab_parallel.select.scores import Scores

RAW, PROCESSED, LOGPROB, PROBABILITY = "raw", "processed", "logprob", "probability"
SCORE_TYPES = (RAW, PROCESSED, LOGPROB, PROBABILITY)
LOG_SPACE = frozenset({RAW, PROCESSED, LOGPROB})  # a constant added to a row's scores changes nothing

RowValue = float | Sequence[float] | Tensor  # one number for all rows, or one a row
_Self = TypeVar("_Self", bound="Transform")


class Transform:
    """One named step of a policy. Subclasses are `@dataclass(frozen=True, eq=False)`, their fields its parameters.

    A field may be a number, text, a list, a mapping with integer keys, or a tensor; what a policy file cannot hold (an
    object) needs a `to_dict` method, and a subclass that makes it again of a mapping in `__post_init__`.

    Attributes:
        name: In policy files and traces.
        accepts: Score types that it works on.
        gives: The type that it makes of them; None is the one that it got, "raw" becoming "processed".
        per_row: Fields that may be a sequence with one entry for each request.
        hard: Whether what it removes is forbidden (a constraint), not just unlikely (a filter): no fallback undoes it.
    """

    name: ClassVar[str]
    accepts: ClassVar[frozenset[str]] = LOG_SPACE
    gives: ClassVar[str | None] = None
    per_row: ClassVar[tuple[str, ...]] = ()
    hard: ClassVar[bool] = False

    def apply(self, scores: Scores, view: View, state: dict[str, Tensor]) -> Scores:
        """The scores after this transform. Reads `view` and `state`, changes neither."""
        raise NotImplementedError

    def check(self, vocab_size: int, rows: int | None) -> None:
        """Raises ValueError (ids out of range: TokenRangeError) naming field, row and value; `rows` None: not known."""

    def start(self, rows: int) -> dict[str, Tensor]:
        """Its state for new requests: tensors `[rows, ...]` by name."""
        return {}

    def after(self, state: dict[str, Tensor], choice: Choice) -> dict[str, Tensor]:
        """Its state once the tokens are chosen; rows that are not active keep theirs."""
        return state

    def is_hard(self) -> bool:
        """`hard`, where it depends on the parameters."""
        return self.hard

    def __post_init__(self) -> None:
        for one in _fields(self):
            object.__setattr__(self, one.name, _own(getattr(self, one.name)))

    def for_rows(self: _Self, index: Sequence[int]) -> _Self:
        """The same with its per-row fields those of the requests `index`."""
        chosen: dict[str, Any] = {}
        for name in self.per_row:
            value = getattr(self, name)
            if isinstance(value, Tensor) and value.dim() > 0:
                chosen[name] = value[torch.tensor(index, dtype=torch.int64, device=value.device)]
            elif isinstance(value, tuple):
                chosen[name] = tuple(value[at] for at in index)
        return dataclasses.replace(self, **chosen) if chosen else self  # type: ignore[type-var]

    def row_count(self) -> int | None:
        """The number of requests that its per-row fields are for; None where it has none."""
        for name in self.per_row:
            value = getattr(self, name)
            if isinstance(value, tuple) or (isinstance(value, Tensor) and value.dim() > 0):
                return len(value)
        return None

    def to_dict(self) -> dict[str, Any]:
        """Name and fields, of what JSON and YAML hold; infinities as text."""
        return {"name": self.name, **{one.name: _plain(getattr(self, one.name)) for one in _fields(self)}}

    @classmethod
    def from_dict(cls: type[_Self], data: Mapping[str, Any]) -> _Self:
        """The inverse of `to_dict`; fields that are left out have their defaults."""
        return cls(**{name: _read(value) for name, value in data.items() if name != "name"})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Transform) and type(other) is type(self) and other.to_dict() == self.to_dict()

    def __hash__(self) -> int:
        return hash(self.name)


@dataclass(frozen=True)
class View:
    """What a transform may know of the requests, one row each; the same on every rank, and read only.

    Attributes:
        prefix: int64 `[T, L]`, prompt and generated ids in order; -1 where there is none, on either side.
        prompt_length: int64 `[T]`, how many of them are the prompt.
        step: int64 `[T]`, ids generated so far.
        extras: Data of this step by name: other distributions (this rank's columns `[T, shard_size]`, or several
            `[M, T, shard_size]`), similarities. Of three dimensions the second is the rows, else the first.
    """

    prefix: Tensor
    prompt_length: Tensor
    step: Tensor
    extras: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        prefix: Tensor | Sequence[Sequence[int]],  # [T, L], or lists of ids
        prompt_length: Tensor | Sequence[int] | None = None,
        *,
        extras: Mapping[str, Tensor] | None = None,
    ) -> View:
        """A view of prefixes of any lengths; without `prompt_length` all of them are prompts.

        Raises:
            ValueError: A prompt longer than its row's ids.
        """
        if not isinstance(prefix, Tensor):
            longest = max((len(row) for row in prefix), default=0)
            padded = [[*row, *[-1] * (longest - len(row))] for row in prefix]
            prefix = torch.tensor(padded, dtype=torch.int64).reshape(len(padded), longest)
        present = (prefix >= 0).sum(1)
        length = present if prompt_length is None else torch.as_tensor(prompt_length, device=prefix.device)
        if length.shape != present.shape:
            raise ValueError(f"prompt_length must be [{len(present)}], one for each row, got {list(length.shape)}")
        wrong = ((length < 0) | (length > present)).nonzero()[:, 0].tolist()
        for row in wrong[:1]:
            raise ValueError(f"prompt_length of row {row} must be in [0, {present[row]}], its ids, got {length[row]}")
        return cls(prefix, length, present - length, dict(extras or {}))

    def generated(self) -> Tensor:
        """int64 `[T, L]`: the prefix with -1 in the prompt's places."""
        place = (self.prefix >= 0).cumsum(1)  # from 1
        return torch.where(place > self.prompt_length[:, None], self.prefix, -1)

    def appended(self, token_ids: Tensor, *, extras: Mapping[str, Tensor] | None = None) -> View:
        """The view one step later, on the ids' device: with these ids `[T]` generated, -1 where a row has ended."""
        prefix, length, step = (x.to(token_ids.device) for x in (self.prefix, self.prompt_length, self.step))
        step = step + (token_ids >= 0).to(torch.int64)
        return View(torch.cat([prefix, token_ids[:, None]], 1), length, step, dict(extras or {}))

    def to(self, device: torch.device) -> View:
        """The view on a device."""
        extras = {name: value.to(device) for name, value in self.extras.items()}
        return View(self.prefix.to(device), self.prompt_length.to(device), self.step.to(device), extras)

    def rows(self, index: Tensor | Sequence[int]) -> View:
        """The view of the rows `index`, in that order; or of those where a bool for each row is True."""
        index = row_index(index, self.prefix.device)
        extras = {name: value[:, index] if value.dim() == 3 else value[index] for name, value in self.extras.items()}
        return View(self.prefix[index], self.prompt_length[index], self.step[index], extras)


@dataclass(frozen=True)
class Choice:
    """What a step chose.

    Attributes:
        token_ids: int64 `[T]`; -1 in rows that are not active.
        logprobs: float64 `[T]`, of the chosen id under the final distribution, in nats.
        active: bool `[T]`.
    """

    token_ids: Tensor
    logprobs: Tensor
    active: Tensor


def row_values(
    value: object,
    rows: int,
    name: str,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    low_open: bool = False,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """A parameter as one value a row, `[rows]` of `dtype`: `select.parameters.row_values`.

    Args:
        dtype: float64, or int64, which refuses fractions.

    Raises:
        ValueError: Naming row and value: not a number, NaN, out of bounds; or another number of rows.
    """
    return parameters.row_values(
        value, rows, name, low=low, high=high, low_open=low_open, integer=not dtype.is_floating_point,
        device="cpu" if device is None else device,
    )  # fmt: skip


def row_index(index: Tensor | Sequence[int] | Sequence[bool], device: torch.device) -> Tensor:
    """Rows as int64 `[N]`: numbers of rows as they are, of a bool for each row those that are True."""
    rows = torch.as_tensor(index, device=device)
    return rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows.to(torch.int64)


def check_view(view: View) -> None:
    """Raises ValueError unless ids and lengths are int64 tensors of the right dimensions, and the extras tensors."""
    for name, shape in (("prefix", "[T, L]"), ("prompt_length", "[T]"), ("step", "[T]")):
        value = getattr(view, name)
        if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.dim() != shape.count(",") + 1:
            got = f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"the view's {name} must be int64 {shape}, got {got}: ids and lengths are whole numbers")
    for name, value in view.extras.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"the view's extras[{name!r}] must be a tensor, got {type(value).__name__}")


def _fields(transform: Transform) -> tuple[dataclasses.Field[Any], ...]:
    return dataclasses.fields(transform)  # type: ignore[arg-type]


def _own(value: Any) -> Any:
    """A value that the caller cannot change any more."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, (list, tuple, range)):
        return tuple(_own(one) for one in value)
    if isinstance(value, Mapping):
        return {key: _own(one) for key, one in value.items()}
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if hasattr(value, "to_dict"):
        return _plain(value.to_dict())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # JSON has no infinities
    return value


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_read(one) for one in value)
    if isinstance(value, Mapping):
        return {_key(key): _read(one) for key, one in value.items()}
    if value in ("inf", "-inf", "nan"):
        return float(value)
    return value


def _key(key: Any) -> Any:
    """JSON has text keys only."""
    return int(key) if isinstance(key, str) and key.lstrip("-").isdigit() else key
