"""Which old row becomes which new row: an explicit partial bijection between two vocabularies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.files import MAX_IDS
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.matching import ALLOW_DROP, find_sources, match, require_tokens_kept
from vocab_parallel.vocabulary.packed import PackedLists


@dataclass(frozen=True, eq=False)
class VocabMap:
    """A partial bijection: each old id moves to at most one new id, each new id takes at most one old row.

    Args:
        old_to_new: the new id of each old id; -1 where the row is dropped.
        new_to_old: the old id of each new id; -1 where the row is new.
        sources: new id to the old ids of its sub-tokens, for new rows that begin as a mean.
        old_sha256: hash of the old ordered table, if it is known.
        new_sha256: hash of the new one.

    Raises:
        VocabularyError: the two tensors are not inverse to each other, or ids are out of range.
    """

    old_to_new: Tensor  # int64 [old_size]
    new_to_old: Tensor  # int64 [new_size]
    sources: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    old_sha256: str | None = None
    new_sha256: str | None = None

    def __post_init__(self) -> None:
        for name in ("old_to_new", "new_to_old"):
            value = getattr(self, name)
            good = value.dtype == torch.int64 and value.dim() == 1 and value.device.type == "cpu"
            if not good or not 0 < value.numel() <= MAX_IDS:
                what = f"{value.dtype} {list(value.shape)} on {value.device}"
                raise VocabularyError(f"{name} must be int64 [1 to {MAX_IDS:,} ids] on the CPU, got {what}")
            if (wrong := (value < -1).nonzero()).numel():
                raise VocabularyError(f"{name}[{int(wrong[0])}] is {int(value[wrong[0]])}; expected an id, or -1: none")
        _require_range(*self.pairs(), self.old_size, self.new_size)
        moved_back = _inverse(self.old_to_new, self.new_size)
        if not torch.equal(moved_back, self.new_to_old):
            place = int((moved_back != self.new_to_old).nonzero()[0])
            raise VocabularyError(
                f"old_to_new and new_to_old disagree: new id {place} comes from {int(self.new_to_old[place])} by the "
                f"one and from {int(moved_back[place])} by the other (-1: from none)"
            )
        sources = self.sources
        if not isinstance(sources, PackedLists):
            sources = {new_id: tuple(sources[new_id]) for new_id in sorted(sources)}
        _require_sources(sources, self.new_to_old, self.old_size)
        object.__setattr__(self, "sources", PackedLists(sources.items()))

    @classmethod
    def from_vocabs(
        cls,
        old: VocabIdentity,
        new: VocabIdentity,
        *,
        encode: Callable[[bytes], Sequence[int]] | None = None,
        allow_drop: bool = False,
    ) -> VocabMap:
        """Maps each token of `old` to the same token of `new`: the same kind and the same bytes.

        A special token goes by its name where both have that name; one whose name only one side has goes by its role
        (``<s>`` to ``<bos>``), and one that is special on one side only goes by its text. Equal tokens map in order of
        occurrence. An unused id stays where it is if it is unused on both sides; otherwise nothing is lost with it.

        Args:
            old: the vocabulary of the rows.
            new: the vocabulary that they are to serve.
            encode: the old tokenizer, bytes to old ids (see `old_encoder`); fills `sources`.
            allow_drop: without it, an old token that `new` lacks is an error.

        Raises:
            VocabularyError: rows would be lost, or `encode` gave an id out of range.
        """
        old_to_new = match(old, new)
        if not allow_drop:
            require_tokens_kept(old, old_to_new, new.size)
        new_to_old = _inverse(old_to_new, new.size)
        fresh = (new_to_old < 0).nonzero().flatten()
        sources = () if encode is None else find_sources(fresh, new, encode, old.size)
        return cls(old_to_new, new_to_old, PackedLists(sources), old.sha256, new.sha256)

    @classmethod
    def from_pairs(
        cls,
        old_size: int,
        new_size: int,
        pairs: Tensor | Mapping[int, int] | Iterable[tuple[int, int]],
        *,
        sources: Mapping[int, tuple[int, ...]] | None = None,
        allow_drop: bool = False,
        old_sha256: str | None = None,
        new_sha256: str | None = None,
    ) -> VocabMap:
        """The map that moves old id to new id for each of `pairs`; old ids that no pair names are dropped.

        Raises:
            VocabularyError: an id out of range or twice, or old ids without a pair and no `allow_drop`.
        """
        _require_size("old_size", old_size)
        _require_size("new_size", new_size)
        if isinstance(pairs, Mapping):
            pairs = pairs.items()
        try:
            table = pairs if isinstance(pairs, Tensor) else torch.tensor([list(pair) for pair in pairs])
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise VocabularyError(f"pairs: expected [old id, new id] each, {error}") from error
        table = table.reshape(0, 2).to(torch.int64) if table.numel() == 0 else table
        integers = not (table.is_floating_point() or table.is_complex() or table.dtype == torch.bool)
        if table.dim() != 2 or table.shape[1] != 2 or not integers:
            raise VocabularyError(f"pairs: expected integers [n, 2], got {table.dtype} {list(table.shape)}")
        old, new = table.to("cpu", torch.int64).unbind(1)
        _require_range(old, new, old_size, new_size)
        _require_once(old, old_size, "old id", "moves to more than one new id")
        _require_once(new, new_size, "new id", "takes more than one old row")
        old_to_new = torch.full((old_size,), -1, dtype=torch.int64)
        old_to_new[old] = new
        made = cls(old_to_new, _inverse(old_to_new, new_size), sources or {}, old_sha256, new_sha256)
        if not allow_drop:
            made.require_kept()
        return made

    @classmethod
    def append(cls, old_size: int, count: int, **options: object) -> VocabMap:
        """Every old id stays, `count` new ids follow; `options` are those of `from_pairs`."""
        if type(count) is not int or count < 0:
            raise VocabularyError(f"count is {count!r:.40}; expected 0 or more new ids")
        _require_size("old_size", old_size)
        same = torch.arange(old_size)
        return cls.from_pairs(old_size, old_size + count, torch.stack([same, same], 1), **options)  # type: ignore[arg-type]

    @classmethod
    def permutation(cls, new_id_of_old: Tensor | Sequence[int], **options: object) -> VocabMap:
        """Old id ``i`` moves to ``new_id_of_old[i]``; none is new and none dropped."""
        moved = torch.as_tensor(new_id_of_old)
        if moved.dim() != 1 or moved.is_floating_point() or moved.numel() == 0:
            raise VocabularyError(f"a permutation is a list of ids, got {moved.dtype} {list(moved.shape)}")
        pairs = torch.stack([torch.arange(moved.numel()), moved.to("cpu", torch.int64)], 1)
        return cls.from_pairs(moved.numel(), moved.numel(), pairs, **options)  # type: ignore[arg-type]

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, allow_drop: bool = False) -> VocabMap:
        """Reads a mapping file, see `vocab_parallel.vocabulary.mapping_file`."""
        from vocab_parallel.vocabulary.mapping_file import read_map

        return read_map(path, allow_drop=allow_drop)

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes a mapping file that `read` reads back to an equal map."""
        from vocab_parallel.vocabulary.mapping_file import write_map

        write_map(self, path)

    @property
    def old_size(self) -> int:
        """Number of old ids."""
        return self.old_to_new.numel()

    @property
    def new_size(self) -> int:
        """Number of new ids."""
        return self.new_to_old.numel()

    @property
    def kept(self) -> int:
        """Number of rows that move or stay."""
        return int((self.new_to_old >= 0).sum())

    @property
    def new_ids(self) -> Tensor:
        """New ids that take no old row, int64, ascending."""
        return (self.new_to_old < 0).nonzero().flatten()

    @property
    def dropped_ids(self) -> Tensor:
        """Old ids whose rows are lost, int64, ascending."""
        return (self.old_to_new < 0).nonzero().flatten()

    @property
    def is_identity(self) -> bool:
        """Whether every id stays and none is new or dropped."""
        same = torch.arange(self.old_size)
        return self.old_size == self.new_size and torch.equal(self.old_to_new, same)

    def pairs(self) -> tuple[Tensor, Tensor]:
        """Old ids that are kept, int64 [kept], ascending; and where each goes, int64 [kept]."""
        old = (self.old_to_new >= 0).nonzero().flatten()
        return old, self.old_to_new[old]

    def require_kept(self) -> None:
        """Raises `VocabularyError` if any row is dropped."""
        lost = self.dropped_ids
        if lost.numel():
            first = ", ".join(map(str, lost[:5].tolist()))
            raise VocabularyError(
                f"{lost.numel():,} of {self.old_size:,} old rows have no new id, the first are {first}; {ALLOW_DROP}"
            )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VocabMap):
            return NotImplemented
        same = torch.equal(self.old_to_new, other.old_to_new) and self.new_size == other.new_size
        hashes = (self.old_sha256, self.new_sha256) == (other.old_sha256, other.new_sha256)
        return same and hashes and self.sources == other.sources

    __hash__ = None  # type: ignore[assignment]

    def describe(
        self, old: VocabIdentity | None = None, new: VocabIdentity | None = None, *, limit: int = 5
    ) -> list[str]:
        """Lines that say what stays, moves, is new and is dropped; with token texts where an identity is given."""
        from vocab_parallel.vocabulary.matching import describe

        return describe(self, old, new, limit)


def compose(first: VocabMap, second: VocabMap) -> VocabMap:
    """The map that does `first`, then `second`; sub-tokens are followed back to ids of the first's old vocabulary.

    Raises:
        VocabularyError: `second` does not begin where `first` ends.
    """
    hashes = first.new_sha256, second.old_sha256
    if first.new_size != second.old_size or (None not in hashes and hashes[0] != hashes[1]):
        raise VocabularyError(
            f"the first map ends at {first.new_size:,} ids (table {hashes[0]}), the second begins at "
            f"{second.old_size:,} (table {hashes[1]}): they are not of one vocabulary"
        )
    old, middle = first.pairs()
    moved = second.old_to_new[middle]
    pairs = torch.stack([old, moved], 1)[moved >= 0]
    sources: dict[int, tuple[int, ...]] = {}
    target = second.old_to_new.tolist()
    for middle_id, found in first.sources.items():
        if target[middle_id] >= 0:
            sources[target[middle_id]] = found
    origin = first.new_to_old.tolist()
    for new_id, parts in second.sources.items():
        flat: list[int] = []
        for part in parts:
            flat.extend([origin[part]] if origin[part] >= 0 else first.sources.get(part, ()))
        if flat:
            sources[new_id] = tuple(flat)
    ends = {"old_sha256": first.old_sha256, "new_sha256": second.new_sha256}
    return VocabMap.from_pairs(first.old_size, second.new_size, pairs, sources=sources, allow_drop=True, **ends)


def _inverse(old_to_new: Tensor, new_size: int) -> Tensor:
    old = (old_to_new >= 0).nonzero().flatten()
    new_to_old = torch.full((new_size,), -1, dtype=torch.int64)
    new_to_old[old_to_new[old]] = old
    return new_to_old


def _require_size(name: str, size: object) -> None:
    if type(size) is not int or not 0 < size <= MAX_IDS:
        raise VocabularyError(f"{name} is {size!r:.40}; expected 1 to {MAX_IDS:,}")


def _require_range(old: Tensor, new: Tensor, old_size: int, new_size: int) -> None:
    for what, ids, size in (("old", old, old_size), ("new", new, new_size)):
        wrong = ids[(ids < 0) | (ids >= size)]
        if wrong.numel():
            first = ", ".join(map(str, wrong[:5].tolist()))
            raise VocabularyError(f"{what} ids outside [0, {size}): {first} ({wrong.numel()} of them)")


def _require_once(ids: Tensor, size: int, what: str, which: str) -> None:
    counts = torch.bincount(ids, minlength=size)
    twice = (counts > 1).nonzero().flatten()
    if twice.numel():
        raise VocabularyError(f"{what} {', '.join(map(str, twice[:5].tolist()))} {which} ({twice.numel()} such ids)")


def _require_sources(sources: Mapping[int, tuple[int, ...]], new_to_old: Tensor, old_size: int) -> None:
    for new_id, parts in sources.items():
        if not 0 <= new_id < len(new_to_old) or new_to_old[new_id] >= 0:
            raise VocabularyError(f"sources: new id {new_id} takes an old row or is outside [0, {len(new_to_old)})")
        if not parts or not 0 <= min(parts) <= max(parts) < old_size:
            raise VocabularyError(f"sources of new id {new_id}: expected old ids in [0, {old_size}), got {parts!r:.60}")
