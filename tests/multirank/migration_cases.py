"""What the tests of migrations share: maps that edit a vocabulary, tables, and whole tensors from the ranks' parts."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.reference.migration import mean_of_rows, mean_of_sources, migrate_rows
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import CopyOf, MeanOfRows, MeanOfSources, RowInit, Zeros

OLD, APPENDED, PERMUTED, DROPPED = 3001, 64, 1000, 10


def shard_of(vocab: int, tp: int, multiple_of: int = 1) -> VocabShard:
    return VocabShard(VocabLayout(vocab, tp, multiple_of=multiple_of), dist.group.WORLD if tp > 1 else None)


def edited(
    old: int = OLD, appended: int = APPENDED, permuted: int = PERMUTED, dropped: int = DROPPED, seed: int = 0
) -> VocabMap:
    """Drops some ids, closes the gaps, permutes some of the rest, appends new ids; most of those have sources."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(old, generator=generator)
    kept = order[dropped:].sort().values
    places = torch.arange(len(kept))
    chosen = torch.randperm(len(kept), generator=generator)[:permuted].sort().values
    places[chosen] = chosen[torch.randperm(len(chosen), generator=generator)]
    new_size = len(kept) + appended
    sources = {}
    for new_id in range(len(kept), new_size):
        count = int(torch.randint(0, 5, (1,), generator=generator))
        if count:
            sources[new_id] = tuple(torch.randint(0, old, (count,), generator=generator).tolist())
    pairs = list(zip(kept.tolist(), places.tolist(), strict=True))
    return VocabMap.from_pairs(old, new_size, pairs, sources=sources, allow_drop=True)


def whole(rows: int, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, *shape, generator=generator, dtype=torch.float64).to(dtype)


def oracle(table: Tensor, vocab_map: VocabMap, init: RowInit | None) -> Tensor:
    """The migrated whole table; `init` None is an optimizer state."""
    mean = mean_of_rows(table) if isinstance(init, MeanOfRows | MeanOfSources) else torch.empty(0)
    new_rows = [new_row(table, new_id, vocab_map, init, mean) for new_id in vocab_map.new_ids.tolist()]
    return migrate_rows(table, vocab_map.new_to_old.tolist(), new_rows)


def new_row(table: Tensor, new_id: int, vocab_map: VocabMap, init: RowInit | None, mean: Tensor) -> Tensor:
    if init is None or isinstance(init, Zeros):
        return torch.zeros(table.shape[1:])
    if isinstance(init, CopyOf):
        return table[init.ids[new_id]]
    sources = vocab_map.sources.get(new_id)
    if isinstance(init, MeanOfRows) or not sources:
        return mean
    assert isinstance(init, MeanOfSources)
    return mean_of_sources(table, sources)


def joined(parts: list[Tensor], layout: VocabLayout) -> Tensor:
    """The real rows of all ranks; their padding must be zero bits."""
    real = []
    for rank, part in enumerate(parts):
        count = len(layout.range(rank))
        assert len(part) == layout.shard_size
        assert not part[count:].contiguous().view(torch.uint8).any(), f"padding of rank {rank} is not zero"
        real.append(part[:count])
    return torch.cat(real)


def raised(call: Any, *args: Any, **kwargs: Any) -> tuple[str, str]:
    """Class and words of the error that a call must raise."""
    try:
        call(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""
