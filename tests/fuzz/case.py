"""What a case of the fuzzer is: a frozen dataclass that a seed makes, ranks run, and the oracle checks."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel import VocabLayout, VocabShard

WORLD = 4  # ranks of a world; a case runs on some of them
# The groups that a case may run on, in the order of their ranks: not always that of the world's.
GROUPS: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (0, 1), (2, 3), (3, 1), (2, 0), (0, 1, 2), (3, 1, 0), (0, 1, 2, 3), (2, 0, 3, 1),
)  # fmt: skip
# Two replicas, each a group, and the ranks of both that hold the same ids.
REPLICAS = {((0, 1), (2, 3)): ((0, 2), (1, 3)), ((2,), (0,)): ((2, 0),), ((1,), (3,)): ((3, 1),)}

Self = TypeVar("Self", bound="FuzzCase")


@dataclass(frozen=True)
class Place:
    """Where a rank stands in a case.

    Attributes:
        rank: Within the case's ranks.
        groups: The process groups of the world by their ranks.
        folder: A path for the case's files, the same on every rank; what is there is removed after the case.
    """

    rank: int
    ranks: tuple[int, ...]
    groups: dict[tuple[int, ...], Any]
    folder: str

    @property
    def group(self) -> Any:
        return self.groups[self.ranks]

    def shard(self, vocab: int, multiple_of: int, padded: int | None = None) -> VocabShard:
        """A shard over the case's ranks; with `padded` of the layout of a table with so many rows."""
        tp = len(self.ranks)
        layout = VocabLayout(vocab, tp, multiple_of=multiple_of)
        if padded is not None:
            layout = VocabLayout.from_padded(vocab, padded, tp)
        return VocabShard(layout, self.group if tp > 1 else None)

    def barrier(self) -> None:
        if len(self.ranks) > 1:
            dist.barrier(group=self.group)


@dataclass(frozen=True, repr=False)
class FuzzCase:
    """One drawn case. Subclasses say what it is of; the defaults of their fields are the plainest case there is.

    Attributes:
        ranks: Those of the world that run it, one of `GROUPS` unless `sizes` says otherwise.
        seed: Of the tensors.
    """

    kind: ClassVar[str] = ""
    kept: ClassVar[tuple[str, ...]] = ("name",)  # fields whose defaults are no smaller
    ranks: tuple[int, ...] = (0,)
    seed: int = 0

    @classmethod
    def draw(cls: type[Self], one: Draw) -> Self:
        """The case of a stream of choices."""
        raise NotImplementedError

    def run(self, place: Place) -> Any:
        """What one rank does; what it returns can be pickled."""
        raise NotImplementedError

    def check(self, results: list[Any]) -> None:
        """Raises AssertionError unless the ranks' results, in order of `ranks`, are what the oracle has."""
        raise NotImplementedError

    def allowed(self) -> bool:
        """Whether the settings can be together; asked of smaller cases, drawn ones are."""
        return True

    def simpler(self) -> Iterator[FuzzCase]:
        """Smaller cases that no single field says."""
        return iter(())

    @property
    def tp(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        """What can be pasted into a test: the fields that are not their defaults."""
        return brief(self)


class Draw:
    """Choices by a seed."""

    def __init__(self, kind: str, seed: int) -> None:
        self.random = random.Random(f"{kind}:{seed}")

    def __call__(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def below(self, stop: int) -> int:
        """An integer in `[0, stop)`."""
        return self.random.randrange(stop)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def subset(self, items: Any, least: int = 0) -> list[Any]:
        """At least so many of them, in order."""
        items = list(items)
        chosen = set(self.random.sample(range(len(items)), self.random.randint(least, len(items))))
        return [item for at, item in enumerate(items) if at in chosen]

    def seed(self) -> int:
        return self.random.getrandbits(31)

    def ranks(self) -> tuple[int, ...]:
        """Each number of ranks as often as the others."""
        tp = self(1, 2, 3, 4)
        return self(*(ranks for ranks in GROUPS if len(ranks) == tp))

    def layout(self, vocabularies: tuple[int, ...] = (9, 9, 1, 2, 3, 5, 8, 13, 31, 97, 300)) -> dict[str, int]:
        """A vocabulary and what its shards are a multiple of: empty shards and much padding among them."""
        return {"vocab": self(*vocabularies), "multiple_of": self(1, 1, 1, 2, 3, 4, 7, 16, 128)}


def brief(case: Any) -> str:
    """The constructor's call with the fields that are not their defaults."""
    given = []
    for one in fields(case):
        default = one.default if one.default_factory is MISSING else one.default_factory()
        value = getattr(case, one.name)
        if value != default:
            given.append(f"{one.name}={value!r}")
    return f"{type(case).__name__}({', '.join(given)})"


def smaller(case: FuzzCase) -> Iterator[FuzzCase]:
    """The case with one of its settings at its default or nearer to it, as far as `allowed` lets it."""
    for one in (*case.simpler(), *_smaller(case)):
        if isinstance(one, FuzzCase) and one.allowed():
            yield one


def _smaller(case: Any) -> Iterator[Any]:
    for one in fields(case):
        value = getattr(case, one.name)
        default = one.default if one.default_factory is MISSING else one.default_factory()
        if value == default or one.name in FuzzCase.kept or one.name in getattr(case, "kept", ()):
            continue
        if is_dataclass(default) or default is MISSING:
            if is_dataclass(value):
                yield from (replace(case, **{one.name: inner}) for inner in _smaller(value))
            continue
        if one.name == "ranks":
            yield from (replace(case, ranks=ranks) for ranks in GROUPS if len(ranks) < len(value))
            yield from (replace(case, ranks=ranks) for ranks in GROUPS if len(ranks) == len(value) and ranks < value)
            continue
        yield replace(case, **{one.name: default})
        if isinstance(value, dict):
            for key in value:
                yield replace(case, **{one.name: {k: v for k, v in value.items() if k != key}})
        if isinstance(value, int) and not isinstance(value, bool) and isinstance(default, int) and one.name != "seed":
            yield from (replace(case, **{one.name: near}) for near in {(value + default) // 2, value - 1} - {value})


def smallest(case: FuzzCase, fails: Callable[[FuzzCase], bool], tries: int = 150) -> FuzzCase:
    """The smallest case that can be reached by single steps through cases that fail."""
    found = True
    while found:
        found = False
        for one in smaller(case):
            if tries <= 0:
                return case
            tries -= 1
            if fails(one):
                case, found = one, True
                break
    return case


def gathered(parts: list[Tensor], valid: list[int], dim: int) -> Tensor:
    """A whole table from the ranks' parts of it: the real entries along `dim`."""
    return torch.cat([part.narrow(dim, 0, count) for part, count in zip(parts, valid, strict=True)], dim)
