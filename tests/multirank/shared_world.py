"""Many cases in one world: starting ranks costs more than what most tests do on them."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.ranks import RankFailure, run_ranks


@dataclass
class Failed:
    """What a case raised on a rank."""

    trace: str


ALL_SIZES = (1, 2, 3, 4)


def two_sizes(case: tuple[Any, ...]) -> tuple[int, ...]:
    """Two of the four numbers of ranks, by the case's text: a behaviour with a few cases meets all four."""
    return (1, 4) if zlib.crc32(repr(case).encode()) % 2 else (2, 3)


class Batch:
    """Runs `fn(rank, *case)` for all `cases` in one world per number of ranks, when the first of them is asked for.

    A case that raises, on whichever ranks, fails alone. Only if the ranks lose step do the later ones fail with it.

    Args:
        sizes: The numbers of ranks that a case runs on, if not on any that it is asked for.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        cases: Sequence[tuple[Any, ...]],
        sizes: Callable[[tuple[Any, ...]], tuple[int, ...]] | None = None,
    ) -> None:
        self._fn, self._sizes = fn, sizes
        self.cases = list(cases)
        self._results: dict[int, list[list[Any]] | RankFailure] = {}

    def __call__(self, tp: int, *case: Any) -> list[Any]:
        """The results of one case on `tp` ranks, in rank order."""
        cases = [one for one in self.cases if self._sizes is None or tp in self._sizes(one)]
        if tp not in self._results:
            try:
                self._results[tp] = run_ranks(_run_all, tp, self._fn, cases)
            except RankFailure as failure:
                self._results[tp] = failure
        results = self._results[tp]
        if isinstance(results, RankFailure):
            raise results
        index = cases.index(case)
        mine = [result[index] for result in results]
        failed = [f"rank {rank}:\n{result.trace}" for rank, result in enumerate(mine) if isinstance(result, Failed)]
        assert not failed, "\n".join(failed)
        return mine

    def pairs(self) -> list[tuple[Any, ...]]:
        """Every case with each number of ranks that it runs on, last."""
        return [(*case, tp) for case in self.cases for tp in (self._sizes(case) if self._sizes else ALL_SIZES)]


def _run_all(rank: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    results: list[Any] = []
    for case in cases:
        try:
            results.append(fn(rank, *case))
        except Exception:
            results.append(Failed(traceback.format_exc()))
    return results
