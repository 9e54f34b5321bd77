"""The first exchange of a call whose payload is a few of Python's integers, on a CPU."""

from __future__ import annotations

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, Found, words_of_all
from vocab_parallel.collectives import all_gather_words
from vocab_parallel.headers import HEADER_WORDS, Verdict, signature
from vocab_parallel.shard import RankGroup


def exchange_words(
    group: RankGroup, kind: str, call: str, words: list[int], *, checksum: Tensor | int = 0, found: Found | None = None
) -> list[list[int]]:
    """An `Exchange` of a few of Python's integers, to its end: the same message in fewer steps of the host.

    On a CPU, where errors are not deferred.

    Args:
        words: n of 64 bits, n the same on every rank. The other arguments are those of `Exchange`.

    Returns:
        The ranks' words in rank order, `[tp][n]`.

    Collectives:
        Those of an `Exchange`.

    Raises:
        VocabParallelError: On every rank: what one of them has found wrong, or their disagreement.
    """
    sizes, need = group.sizes(kind), 8 * len(words)
    capacity = max(sizes)
    if group.size == 1 or need > capacity or capacity % 8 or found is not None:
        payload = torch.tensor(words, dtype=torch.int64)
        exchange = Exchange(group, kind, call, payload=payload, checksum=checksum, found=found)
        return exchange.wait().tolist()
    if group.within is None:
        group.raise_deferred()
    header = [signature(f"{call} {need}"), 0, 0, 0, int(checksum), 0, -1, 0]
    gathered = all_gather_words(group, [*header, *words, *[0] * (capacity // 8 - len(words))])
    if any(row[:HEADER_WORDS] != header for row in gathered):
        verdict = Verdict(call, group.rank, None, None, True, None)
        device = torch.device("cpu")
        error = verdict.error([row[:HEADER_WORDS] for row in gathered], lambda mine: words_of_all(group, mine, device))
        assert error is not None
        raise error
    sizes.append(need)
    return [row[HEADER_WORDS : HEADER_WORDS + len(words)] for row in gathered]
