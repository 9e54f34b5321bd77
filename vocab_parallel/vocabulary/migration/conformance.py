"""What a migration must have kept, compared row by row: the bits of kept rows, their raw logits, and who owns them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.errors import VocabularyError
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.records import TableBlocks, TableRecord, row_hashes


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
    before: Mapping[str, TableRecord | TableBlocks],
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
    kept = {name: _Kept(name, before[name], after[name], vocab_map) for name in names}
    checks += [kept[name].rows() for name in names]
    for name in zero:
        if name in after:
            checks.append(_new_rows_zero(after[name], vocab_map))
    checks += [check for name in names if (check := kept[name].logits()) is not None]
    masses = {name: new_mass(logits, vocab_map) for name in names if (logits := after[name].logits) is not None}
    return ConformanceReport((*checks, *more), masses)


def new_mass(logits: Tensor, vocab_map: VocabMap) -> NewMass:  # logits: float64 [V, H]
    """The probability that the new ids take under each hidden row's softmax."""
    new_ids = vocab_map.new_ids.to(logits.device)
    probabilities = torch.stack([torch.softmax(one, 0)[new_ids].sum() for one in logits.unbind(1)])
    share = len(vocab_map.new_ids) / vocab_map.new_size
    return NewMass(probabilities.mean().item(), probabilities.amax().item(), share)


class _Kept:
    """Whether kept ids have the same bits and the same logits as before, by one pass over the rows of before."""

    def __init__(self, name: str, before: TableRecord | TableBlocks, after: TableRecord, vocab_map: VocabMap) -> None:
        self.name, self.kept, self.wrong = name, vocab_map.kept, ""
        self._bits, self._scores, self._largest, self._hidden = _Differing(), _Differing(), 0.0, 0
        if (before.dtype, before.row_shape) != (after.dtype, after.row_shape):
            was, now = (f"{one.dtype} rows {list(one.row_shape)}" for one in (before, after))
            self.wrong = f"{was} became {now}"
        elif (before.size, after.size) != (vocab_map.old_size, vocab_map.new_size):
            self.wrong = f"{before.size} became {after.size}, the map is {vocab_map.old_size} to {vocab_map.new_size}"
        if not self.wrong:
            for at, hashes, logits in before.blocks():
                self._see(at, hashes, logits, after, vocab_map.old_to_new[at : at + len(hashes)])

    def _see(self, at: int, hashes: Tensor, logits: Tensor | None, after: TableRecord, new: Tensor) -> None:
        here = (new >= 0).nonzero()[:, 0]
        old, new = here + at, new[here]
        self._bits.add(hashes[here] != after.hashes[new], old, new)
        if logits is not None and after.logits is not None and len(here):
            was, now = logits[here], after.logits[new]
            self._scores.add(((was != now) & ~(was.isnan() & now.isnan())).any(1), old, new)
            self._largest = max(self._largest, (was - now).abs_().nan_to_num_().amax().item())
            self._hidden = was.shape[1]

    def rows(self) -> Check:
        """Of the bits."""
        name, bits = f"rows of {self.name}", self._bits
        if self.wrong or bits.count:
            what = self.wrong or f"{bits.count} of {self.kept} kept rows have other bits, the first is {bits.first}"
            return Check(name, False, what)
        return Check(name, True, f"{self.kept} kept rows have the same bits")

    def logits(self) -> Check | None:
        """Of the logits; None of what is no head."""
        name, scores = f"raw logits of {self.name}", self._scores
        if not self._hidden:
            return None
        if scores.count:
            what = f"{scores.count} of {self.kept} kept ids differ, by at most {self._largest:.3g}"
            return Check(name, False, f"{what}; the first is {scores.first}")
        return Check(name, True, f"{self.kept} kept ids give the same on {self._hidden} hidden rows")


class _Differing:
    """Counts what differs, and keeps the first."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def add(self, differs: Tensor, old: Tensor, new: Tensor) -> None:
        """Takes in some ids."""
        at = differs.nonzero()[:, 0]
        if len(at) and not self.count:
            self.first = f"old id {int(old[at[0]])}, new id {int(new[at[0]])}"
        self.count += len(at)


def _new_rows_zero(after: TableRecord, vocab_map: VocabMap) -> Check:
    zeros = torch.zeros(1, *after.row_shape, dtype=getattr(torch, after.dtype))
    ids = vocab_map.new_ids
    wrong = ids[after.hashes[ids] != row_hashes(zeros)]
    name = f"new rows of {after.name}"
    if len(wrong):
        return Check(name, False, f"{len(wrong)} of {len(ids)} are not zero, the first is id {int(wrong[0])}")
    return Check(name, True, f"{len(ids)} are zero")
