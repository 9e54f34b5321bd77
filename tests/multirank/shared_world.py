"""Many cases in one world: starting ranks costs more than what most tests do on them."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.ranks import RankFailure, run_ranks


@dataclass
class Failed:
    """What a case raised on a rank."""

    trace: str


class Batch:
    """Runs `fn(rank, *case)` for all `cases` in one world per number of ranks, when the first of them is asked for.

    A case that raises, on whichever ranks, fails alone. Only if the ranks lose step do the later ones fail with it.
    """

    def __init__(self, fn: Callable[..., Any], cases: Sequence[tuple[Any, ...]]) -> None:
        self._fn = fn
        self.cases = list(cases)
        self._results: dict[int, list[list[Any]] | RankFailure] = {}

    def __call__(self, tp: int, *case: Any) -> list[Any]:
        """The results of one case on `tp` ranks, in rank order."""
        if tp not in self._results:
            try:
                self._results[tp] = run_ranks(_run_all, tp, self._fn, self.cases)
            except RankFailure as failure:
                self._results[tp] = failure
        results = self._results[tp]
        if isinstance(results, RankFailure):
            raise results
        index = self.cases.index(case)
        mine = [result[index] for result in results]
        failed = [f"rank {rank}:\n{result.trace}" for rank, result in enumerate(mine) if isinstance(result, Failed)]
        assert not failed, "\n".join(failed)
        return mine


def _run_all(rank: int, fn: Callable[..., Any], cases: list[tuple[Any, ...]]) -> list[Any]:
    results: list[Any] = []
    for case in cases:
        try:
            results.append(fn(rank, *case))
        except Exception:
            results.append(Failed(traceback.format_exc()))
    return results
