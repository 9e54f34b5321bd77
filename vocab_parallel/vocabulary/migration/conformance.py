"""What a migration must have kept, compared row by row: the bits of kept rows, their raw logits, and who owns them.

The core reads tables through functions, block by block, so that it serves live shards and checkpoints alike. Of a table
it keeps a 64-bit hash of each row and the logits of a few fixed hidden rows: the old table need not live on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.normal_rows import normal_rows

RowReader = Callable[[int, int], Tensor]  # (start, stop) -> rows [stop - start, ...] of these consecutive ids

HIDDEN_ROWS = 4
_READ, _NUMBERS = 2**18, 2**16  # numbers that are read, and that are worked on at a time (512 KiB of float64)
_MIX = [word - 2**64 for word in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)]  # splitmix64's
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, eq=False)
class TableRecord:
    """What is remembered of one table, of its `V` real rows in order of their ids.

    Attributes:
        hashes: Of the bits of each row.
        logits: Of each id for the fixed hidden rows; None of what is no head.
    """

    name: str
    dtype: str
    row_shape: tuple[int, ...]
    hashes: Tensor  # int64 [V]
    logits: Tensor | None = None  # float64 [V, H]


def record_table(
    name: str,
    read: RowReader,
    start: int,
    stop: int,
    *,
    hidden: Tensor | None = None,  # float64 [H, D]
    bias: RowReader | None = None,
) -> TableRecord:
    """Records the rows of ids `[start, stop)`.

    Args:
        read: Called for consecutive blocks; of a 0-row range not at all.
        hidden: For a head: `fixed_hidden(D)`.
        bias: Of the head.

    Memory:
        One block, and `8 (1 + H)` bytes a row.
    """
    sample = read(start, min(start + 1, stop)) if stop > start else None
    row_shape = tuple(sample.shape[1:]) if sample is not None else ()
    # Made whole at once: small pieces kept between large blocks would hold the freed blocks' memory.
    hashes = torch.empty(stop - start, dtype=torch.int64)
    logits = None if hidden is None else torch.empty(stop - start, len(hidden), dtype=torch.float64)
    step, few = (max(1, numbers // max(1, math.prod(row_shape))) for numbers in (_READ, _NUMBERS))
    for at in range(start, stop, step):
        end = min(at + step, stop)
        rows, place = read(at, end).detach(), slice(at - start, end - start)
        hashes[place] = torch.cat([row_hashes(part) for part in torch.split(rows, few)])
        if logits is not None and hidden is not None:
            scores = torch.cat([exact_scores(part, hidden) for part in torch.split(rows, few)])
            logits[place] = scores if bias is None else scores + bias(at, end).detach().double()[:, None]
    dtype = str(sample.dtype).removeprefix("torch.") if sample is not None else ""
    return TableRecord(name, dtype, row_shape, hashes, logits)


def fixed_hidden(width: int, count: int = HIDDEN_ROWS, seed: int = 0) -> Tensor:
    """The hidden rows that logits are compared on: float64 `[count, width]`, normal, the same everywhere."""
    return normal_rows(range(count), width, seed)


def exact_scores(rows: Tensor, hidden: Tensor) -> Tensor:
    """Logits `[n, H]` in float64 that depend on nothing but the row: `rows` `[n, D]`, `hidden` `[H, D]`.

    Added up along one fixed tree: a matrix product's order of additions depends on the number of rows.
    """
    each = []
    for one in hidden.to(rows.device):
        products = rows.double() * one
        while products.shape[1] > 1:
            half = (products.shape[1] + 1) // 2
            folded = products[:, :half].clone()
            folded[:, : products.shape[1] - half] += products[:, half:]
            products = folded
        each.append(products.sum(1))
    return torch.stack(each, 1)


def row_hashes(rows: Tensor) -> Tensor:
    """64 bits of each row's bits and their places: int64 `[n]`; -0.0 and 0.0 differ, as do NaNs."""
    size = math.prod(rows.shape[1:])
    words = rows.contiguous().view(_WORDS.get(rows.element_size(), torch.uint8)).view(len(rows), -1)
    places = torch.arange(1, words.shape[1] + 1, device=rows.device) * _MIX[0] if size else 0
    mixed = words.to(torch.int64) + places
    for shift, factor in ((30, _MIX[1]), (27, _MIX[2])):
        mixed = (mixed ^ ((mixed >> shift) & (2 ** (64 - shift) - 1))) * factor
    return (mixed ^ ((mixed >> 31) & (2**33 - 1))).sum(1)


@dataclass(frozen=True)
class Check:
    """One thing that must hold.

    Attributes:
        detail: What was found, in words.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class NewMass:
    """Probability that new rows take on the fixed hidden rows, of 1.

    Attributes:
        mean, largest: Over the hidden rows.
        uniform: What they would take if all logits were equal.
    """

    mean: float
    largest: float
    uniform: float


@dataclass(frozen=True)
class ConformanceReport:
    """Whether a migration kept what it must.

    Attributes:
        masses: By the name of the head.
    """

    checks: tuple[Check, ...]
    masses: Mapping[str, NewMass] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold."""
        return {
            "passed": self.passed,
            "checks": [asdict(check) for check in self.checks],
            "new_rows_probability": {name: asdict(mass) for name, mass in self.masses.items()},
        }

    def lines(self) -> list[str]:
        """For people: a line a check, then a line a head."""
        lines = [f"{'ok  ' if check.passed else 'FAIL'} {check.name}: {check.detail}" for check in self.checks]
        lines += [
            f"info {name}: new rows take {mass.mean:.3g} of the probability on average, {mass.largest:.3g} at most "
            f"(equal logits: {mass.uniform:.3g})"
            for name, mass in self.masses.items()
        ]
        return lines

    def require(self) -> None:
        """Raises `VocabularyError` with every check that failed."""
        failed = [f"{check.name}: {check.detail}" for check in self.checks if not check.passed]
        if failed:
            raise VocabularyError(
                "the migration did not keep what it must: "
                + "; ".join(failed)
                + ". Go back to the checkpoint from before it."
            )


def compare_records(
    before: Mapping[str, TableRecord],
    after: Mapping[str, TableRecord],
    vocab_map: VocabMap,
    *,
    zero: Sequence[str] = (),
    more: Sequence[Check] = (),
) -> ConformanceReport:
    """Compares all tables and row states by name; the records must be of all `V` rows.

    Args:
        zero: Names (optimizer states) whose new rows must be zero.
        more: Checks of the caller: alias, ownership, shard ranges.
    """
    checks: list[Check] = []
    names = list(before)
    if set(before) != set(after):
        lost, extra = sorted(set(before) - set(after)), sorted(set(after) - set(before))
        checks.append(Check("tables", False, f"lost: {lost}; not there before: {extra}"))
        names = [name for name in names if name in after]
    for name in names:
        checks.append(_rows_kept(before[name], after[name], vocab_map))
    for name in zero:
        if name in after:
            checks.append(_new_rows_zero(after[name], vocab_map))
    heads = [name for name in names if before[name].logits is not None and after[name].logits is not None]
    checks += [_logits_kept(before[name], after[name], vocab_map) for name in heads]
    masses = {name: new_mass(logits, vocab_map) for name in heads if (logits := after[name].logits) is not None}
    return ConformanceReport((*checks, *more), masses)


def new_mass(logits: Tensor, vocab_map: VocabMap) -> NewMass:  # logits: float64 [V, H]
    """The probability that the new ids take under each hidden row's softmax."""
    new_ids = vocab_map.new_ids.to(logits.device)
    probabilities = torch.stack([torch.softmax(one, 0)[new_ids].sum() for one in logits.unbind(1)])
    share = len(vocab_map.new_ids) / vocab_map.new_size
    return NewMass(probabilities.mean().item(), probabilities.amax().item(), share)


def _rows_kept(before: TableRecord, after: TableRecord, vocab_map: VocabMap) -> Check:
    name = f"rows of {before.name}"
    if (before.dtype, before.row_shape) != (after.dtype, after.row_shape):
        was, now = (f"{one.dtype} rows {list(one.row_shape)}" for one in (before, after))
        return Check(name, False, f"{was} became {now}")
    sizes = (len(before.hashes), len(after.hashes))
    if sizes != (vocab_map.old_size, vocab_map.new_size):
        return Check(name, False, f"{sizes[0]} became {sizes[1]}, the map is {vocab_map.old_size} to "
                     f"{vocab_map.new_size}")  # fmt: skip
    old, new = _kept(vocab_map)
    wrong = (before.hashes[old] != after.hashes[new]).nonzero()[:, 0]
    if len(wrong):
        at = int(wrong[0])
        return Check(name, False, f"{len(wrong)} of {len(old)} kept rows have other bits, the first is old id "
                     f"{int(old[at])}, new id {int(new[at])}")  # fmt: skip
    return Check(name, True, f"{len(old)} kept rows have the same bits")


def _new_rows_zero(after: TableRecord, vocab_map: VocabMap) -> Check:
    zeros = torch.zeros(1, *after.row_shape, dtype=getattr(torch, after.dtype))
    ids = vocab_map.new_ids
    wrong = ids[after.hashes[ids] != row_hashes(zeros)]
    name = f"new rows of {after.name}"
    if len(wrong):
        return Check(name, False, f"{len(wrong)} of {len(ids)} are not zero, the first is id {int(wrong[0])}")
    return Check(name, True, f"{len(ids)} are zero")


def _logits_kept(before: TableRecord, after: TableRecord, vocab_map: VocabMap) -> Check:
    assert before.logits is not None and after.logits is not None
    old, new = _kept(vocab_map)
    name = f"raw logits of {before.name}"
    differ, largest = torch.zeros(len(old), dtype=torch.bool), 0.0
    for one, other in zip(before.logits.unbind(1), after.logits.unbind(1), strict=True):  # of one hidden row
        was, now = one[old], other[new]
        differ |= (was != now) & ~(was.isnan() & now.isnan())
        largest = max(largest, (was - now).abs_().nan_to_num_().amax().item() if len(old) else 0.0)
    if bool(differ.any()):
        at = int(differ.nonzero()[0, 0])
        return Check(name, False, f"{int(differ.sum())} of {len(old)} kept ids differ, by at most {largest:.3g}; the "
                     f"first is old id {int(old[at])}, new id {int(new[at])}")  # fmt: skip
    return Check(name, True, f"{len(old)} kept ids give the same on {before.logits.shape[1]} hidden rows")


def _kept(vocab_map: VocabMap) -> tuple[Tensor, Tensor]:
    new = (vocab_map.new_to_old >= 0).nonzero()[:, 0].cpu()
    return vocab_map.new_to_old.cpu()[new], new
