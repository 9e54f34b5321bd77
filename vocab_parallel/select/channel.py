"""The ranks that hold the columns of some rows, for the length of one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, Found, judge
from vocab_parallel.collectives import all_gather_at_once, all_gather_words, broadcast_words, gather_words_to
from vocab_parallel.select.words import exchange_words
from vocab_parallel.shard import RankGroup


class Channel:
    """Gathers for one call. The first gather opens it: header, agreement, errors; later ones only move data.

    Args:
        group: The ranks.
        call: What this rank was asked to do, in words; must be the same on every rank.
        kind: What shares a size of the first payload (see `agreement.Exchange`).
        checksum: Of what must be the same on every rank: streams, prefixes, parameters.
        found: What a check of values found, if the host has not read it.

    Attributes:
        size, rank: Of the group.
        opened: Whether this rank has begun the first gather.
        agreed: Whether it is over: then all ranks make this call.
    """

    def __init__(
        self,
        group: RankGroup,
        call: str,
        *,
        kind: str = "select",
        checksum: Tensor | int = 0,
        found: Found | None = None,
    ) -> None:
        self.group, self.call, self.kind, self.checksum, self.found = group, call, kind, checksum, found
        self.size, self.rank = group.size, group.rank
        self.opened = self.agreed = False

    def gather(self, x: Tensor) -> Tensor:
        """The ranks' equal-shaped `x`, `[size, *x.shape]` in rank order. One all-gather.

        Raises:
            Exception: At the first gather, on every rank: what one of them has found wrong, or their disagreement.
        """
        if self.opened:
            return all_gather_at_once(self.group, x).wait() if self.size > 1 else x[None]
        return self._open(payload=x.contiguous())

    def gather_words(self, words: list[int]) -> list[list[int]]:
        """As `gather` for a few Python integers, on a CPU where errors are not deferred."""
        if self.opened:
            return all_gather_words(self.group, words) if self.size > 1 else [words]
        self.opened = True
        gathered = exchange_words(self.group, self.kind, self.call, words, checksum=self.checksum, found=self.found)
        self.agreed = True
        return gathered

    def tell(self, words: list[int], root: int) -> list[int]:
        """The words of rank `root`, on every rank; others pass as many. After the first gather, where it gathers words.

        One broadcast. All ranks must know the root from what they have gathered.
        """
        return broadcast_words(self.group, words, root) if self.size > 1 else words

    def tell_one(self, words: list[int], root: int) -> list[list[int]] | None:
        """As `gather_words` on rank `root`, which all ranks must know; None on the others. One gather."""
        return gather_words_to(self.group, words, root) if self.size > 1 else [words]

    def open(self, device: torch.device | None = None) -> None:
        """Opens the call without data, unless it is open. One all-gather of a header."""
        if not self.opened:
            self._open(device=device)

    @contextmanager
    def guard(self) -> Iterator[None]:
        """An exception inside, before the call is open, is raised on every rank."""
        try:
            yield
        except Exception as error:
            if self.opened:  # every rank has the same data from here on, and raises the same
                raise
            self._open(fault=error)

    def alone(self) -> Channel:
        """A channel of this rank only, for what every rank holds."""
        other = Channel(RankGroup(None, within=self.group), self.call)
        other.opened = other.agreed = True
        return other

    def judge(self, flags: Tensor, error: type[Exception], describe: Callable[[list[Any]], Exception]) -> None:
        """As `agreement.judge`: raises what `flags`, the same on every rank, say."""
        judge(self.group, flags, error, describe)

    def _open(self, **given: Any) -> Tensor:
        gathered = self._exchange(**given).wait()
        self.agreed = True
        return gathered

    def _exchange(self, **given: Any) -> Exchange:
        self.opened = True
        return Exchange(self.group, self.kind, self.call, checksum=self.checksum, found=self.found, **given)
