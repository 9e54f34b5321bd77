"""Rows that move between shards by token id, a block at a time: `migrate`."""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.collectives import all_gather, all_reduce_, all_to_all_rows
from vocab_parallel.errors import LayoutMismatchError, UngatheredWeightError, VocabularyError
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.initialization import MeanOfSources, OldRows, RowInit, Zeros
from vocab_parallel.vocabulary.migration.statistics import ColumnStatistics, Magnitudes, require_finite
from vocab_parallel.vocabulary.row_states import is_known_other, is_row_state

BLOCK_BYTES = 4 * 2**20  # of what a rank sends, and of what it receives, at a time


@torch.no_grad()
def migrate(
    state: Mapping[str, Tensor],  # each [src.shard_size, ...]
    vocab_map: VocabMap,
    *,
    src: VocabShard,
    dst: VocabShard,
    init: RowInit | None = None,
    zero: Collection[str] = (),
) -> dict[str, Tensor]:
    """Moves every row of this rank's tensors to where its token's new id lives: weights and optimizer state alike.

    Bits are copied, whatever they mean. The tensors given stay as they are. What a new row holds depends on the map,
    `init` and the old table alone, so it has the same bits at any TP size.

    Args:
        state: Tensors whose rows are tokens, such as the embedding's weight `[v, D]`, the head's bias `[v]`, or
            Adafactor's `row_var` `[v, 1]`. The same names, dtypes and row shapes on every rank, in the same order.
        vocab_map: The same on every rank.
        src: The shard of the old vocabulary.
        dst: That of the new one, over the same ranks; its padding may be another.
        init: How new rows of the tensors that are not named in `zero` begin; by default `MeanOfSources()`.
        zero: Names whose new rows are zero: an optimizer's moments.

    Returns:
        Tensors `[dst.shard_size, ...]` by the same names, dtypes and devices as given; padding rows are zero.

    Collectives:
        One 64-byte all-gather. For each name whose new rows need the statistics of the table: an all-gather of 8
        bytes a column and an all-reduce of 16 (40 with a spread). For each name and block of rows in which some rank
        needs rows of another one, an all-to-all of those rows. None at tp_size 1.

    Memory:
        Beside old and new tensors, twice `BLOCK_BYTES` (or, if that is more, the sources of one new row on each rank).

    Raises:
        LayoutMismatchError, UngatheredWeightError, VocabularyError, NonFiniteError: On every rank, before any row
            moves. Shards over other ranks or of other sizes than the map; ranks that disagree on map, layout, `init`
            or tensors; a new row that would be made from a row with NaN or an infinity.
    """
    init = init or MeanOfSources()
    magnitudes: dict[str, Magnitudes] = {}
    fault = capture(_check, state, vocab_map, src, dst, init, zero, magnitudes)
    call = f"migrate of {vocab_map.old_size} to {vocab_map.new_size} ids"
    if fault is None:
        tensors = ", ".join(f"{name} {list(t.shape[1:])} {t.dtype}" for name, t in state.items())
        call += (
            f" (map {map_sha256(vocab_map)[:16]}, from {src.layout}, to {dst.layout}, new rows {init}, zero in "
            f"{sorted(zero)}, tensors {tensors})"
        )
    Exchange(src, "header", call, fault=fault, rows=0).wait()  # rows: the host waits for it
    src.habit.end()
    moved: dict[str, Tensor] = {}
    for name, local in state.items():
        statistics = _statistics(local, magnitudes[name], src, init.spread) if name in magnitudes else None
        moving = _Move(local.detach(), vocab_map, src, dst)
        moving.old_rows()
        if name not in zero:
            moving.new_rows(init, statistics)
        moved[name] = moving.moved
    return moved


class _Move:
    """One tensor on its way."""

    def __init__(self, local: Tensor, vocab_map: VocabMap, src: VocabShard, dst: VocabShard) -> None:
        self.local, self.map, self.src, self.dst = local, vocab_map, src, dst
        self.numbers = math.prod(local.shape[1:])
        row_bytes = self.numbers * local.element_size()
        self.step = max(1, BLOCK_BYTES // max(1, src.size * row_bytes))
        self.ranges = [dst.layout.range(rank) for rank in range(dst.size)]
        self.moved = local.new_zeros(dst.shard_size, *local.shape[1:])

    def old_rows(self) -> None:
        """Fetches those that were there, block by block."""
        if not self.numbers:
            return
        old_ids = [self.map.new_to_old[ids.start : ids.stop] for ids in self.ranges]
        place = as_row_bytes(self.moved)
        for at in range(0, max(map(len, old_ids)), self.step):
            wanted = [ids[at : at + self.step] for ids in old_ids]
            kept = [(ids >= 0).nonzero()[:, 0] for ids in wanted]
            rows = self._fetch([ids[which] for ids, which in zip(wanted, kept, strict=True)])
            place[(kept[self.dst.rank] + at).to(place.device)] = rows

    def new_rows(self, init: RowInit, statistics: ColumnStatistics | None) -> None:
        """Makes the others from what `init` reads, which each rank fetches for its own."""
        if not self.numbers or isinstance(init, Zeros):
            return
        new_ids = self.map.new_ids
        starts = torch.tensor([ids.start for ids in self.ranges[1:]], dtype=torch.int64)
        mine = torch.tensor_split(new_ids, torch.searchsorted(new_ids, starts))
        batches = [list(self._batches(ids.tolist(), init)) for ids in mine]
        shape, dtype, device = self.local.shape[1:], self.local.dtype, self.local.device
        for at in range(max(map(len, batches))):
            batch = [of_rank[at] if at < len(of_rank) else ([], []) for of_rank in batches]
            ids, needs = batch[self.dst.rank]
            rows = self._fetch([torch.tensor(needed, dtype=torch.int64) for _, needed in batch])
            if ids:
                typed = rows.view(dtype).view(len(needs), *shape) if needs else self.local[:0]
                old = OldRows(shape, dtype, device, dict(zip(needs, typed, strict=True)), statistics)
                places = torch.tensor(ids, device=device) - self.dst.start
                as_row_bytes(self.moved)[places] = as_row_bytes(init.rows(ids, self.map, old))

    def _batches(self, new_ids: Sequence[int], init: RowInit) -> Iterator[tuple[list[int], list[int]]]:
        """New ids and the old ids that they need, about a block's worth at a time."""
        batch: list[int] = []
        needs: dict[int, None] = {}
        for new_id in new_ids:
            its = init.needs(new_id, self.map)
            if batch and (len(batch) == self.step or len(needs) + len(its) > self.step):
                yield batch, list(needs)
                batch, needs = [], {}
            batch.append(new_id)
            needs.update(dict.fromkeys(its))
        if batch:
            yield batch, list(needs)

    def _fetch(self, wanted: list[Tensor]) -> Tensor:
        """The rows that this rank wants, as bytes `[n, row_bytes]`; every rank knows what each one wants."""
        src, me = self.src, self.src.rank
        owners = [ids // src.shard_size for ids in wanted]
        result = torch.empty(
            len(wanted[me]), self.numbers * self.local.element_size(), dtype=torch.uint8, device=self.local.device
        )
        own = (owners[me] == me).nonzero()[:, 0]
        result[own.to(result.device)] = self._rows(wanted[me][own])
        if all(bool((owner == rank).all()) for rank, owner in enumerate(owners)):
            return result
        others = [(owners[me] == rank).nonzero()[:, 0] if rank != me else own[:0] for rank in range(src.size)]
        asked = [ids[owner == me] for ids, owner in zip(wanted, owners, strict=True)]
        asked[me] = own[:0]
        sent, received = [len(ids) for ids in asked], [len(places) for places in others]
        rows = all_to_all_rows(src, self._rows(torch.cat(asked)), sent, received).wait()
        result[torch.cat(others).to(result.device)] = rows
        return result

    def _rows(self, old_ids: Tensor) -> Tensor:
        return as_row_bytes(self.local.index_select(0, (old_ids - self.src.start).to(self.local.device)))


def as_row_bytes(rows: Tensor) -> Tensor:
    """Contiguous rows `[n, ...]` as uint8 `[n, bytes]`, on the same memory."""
    return rows.view(-1).view(torch.uint8).view(len(rows), math.prod(rows.shape[1:]) * rows.element_size())


def moves(what: str, name: str, shape: Sequence[int], table_shape: Sequence[int]) -> bool:
    """Whether a state of this name moves with its table's rows; False for what stays. `what` is it, for the error.

    Raises:
        VocabularyError: It is none of the kinds that are known, so which rows are in it is not known either.
    """
    if is_row_state(name, shape, table_shape):
        return True
    if not is_known_other(name, shape):
        raise VocabularyError(
            f"{what} has shape {list(shape)}, its table {list(table_shape)}: it has no row for each token, so where it "
            "belongs is unknown. Only states by row, column factors (col_var, exp_avg_sq_col) and single numbers can "
            "be migrated."
        )
    return False


def map_sha256(vocab_map: VocabMap) -> str:
    """A hash of what a map does: both sizes, where each row comes from, sources."""
    digest = hashlib.sha256(f"{vocab_map.old_size} {vocab_map.new_size} ".encode())
    digest.update(array("q", vocab_map.new_to_old.tolist()).tobytes())
    digest.update(repr(sorted((new, tuple(old)) for new, old in vocab_map.sources.items())).encode())
    return digest.hexdigest()


def _check(
    state: Mapping[str, Tensor], vocab_map: VocabMap, src: VocabShard, dst: VocabShard, init: RowInit,
    zero: Collection[str], magnitudes: dict[str, Magnitudes],
) -> None:  # fmt: skip
    """Raises for what this rank can see; fills `magnitudes` for tables whose statistics `init` reads."""
    if src.size != dst.size or src.rank != dst.rank or (src.size > 1 and src.group != dst.group):
        raise LayoutMismatchError(
            f"rows move within one group of ranks: src is {src}, dst is {dst}. Build both with the same process group."
        )
    for name, size, shard in (("old", vocab_map.old_size, src), ("new", vocab_map.new_size, dst)):
        if size != shard.vocab_size:
            raise VocabularyError(
                f"the map's {name} vocabulary has {size} ids, {'src' if shard is src else 'dst'} has "
                f"{shard.vocab_size} ({shard.layout}): likely a map of another tokenizer."
            )
    unknown = sorted(set(zero) - set(state))
    if unknown:
        raise VocabularyError(f"zero names {unknown}, which are not among the tensors {sorted(state)}")
    init.check(vocab_map)
    for name, local in state.items():
        _check_tensor(name, local, src, needs_float=name not in zero and len(vocab_map.new_ids) > 0)
    _look_at_rows({name: local for name, local in state.items() if name not in zero}, vocab_map, src, init, magnitudes)


def _check_tensor(name: str, local: Tensor, src: VocabShard, *, needs_float: bool) -> None:
    if local.dim() == 0 or hasattr(local, "to_local") or local.is_meta:
        what = "a DTensor" if hasattr(local, "to_local") else f"{list(local.shape)} on {local.device}"
        raise LayoutMismatchError(
            f"{name} must be this rank's rows [{src.shard_size}, ...] as a plain tensor with memory, got {what}. Of a "
            "model whose weights are sharded over data-parallel ranks too (FSDP, ZeRO-3), migrate a checkpoint: "
            "python -m vocab_parallel migrate."
        )
    if local.shape[0] == 0:
        raise UngatheredWeightError(
            f"{name} has no rows (shape {list(local.shape)}): under ZeRO-3 a parameter is partitioned. Save a "
            "checkpoint and migrate that: python -m vocab_parallel migrate."
        )
    if local.shape[0] != src.shard_size:
        raise LayoutMismatchError(
            f"{name} must be this rank's rows [{src.shard_size}, ...], padding included, got {list(local.shape)} on "
            f"rank {src.rank} of {src.tp_size} ({src.layout})."
        )
    if needs_float and not local.is_floating_point():
        raise LayoutMismatchError(f"{name} is {local.dtype}: new rows are made for floating tensors; name it in zero.")


def _look_at_rows(
    state: Mapping[str, Tensor], vocab_map: VocabMap, src: VocabShard, init: RowInit,
    magnitudes: dict[str, Magnitudes],
) -> None:  # fmt: skip
    """Raises for a row that is not finite and that new rows would be made from. Is the statistics' first pass too."""
    needed = {old_id for new_id in vocab_map.new_ids.tolist() for old_id in init.needs(new_id, vocab_map)}
    mine = torch.tensor(sorted(old_id for old_id in needed if src.start <= old_id < src.stop), dtype=torch.int64)
    reads_all = init.needs_statistics(vocab_map)
    for name, local in state.items():
        step = max(1, BLOCK_BYTES // max(1, local[:1].numel() * 8))  # looked at in float64
        for at in range(0, len(mine), step):
            ids = mine[at : at + step]
            require_finite(name, ids, local.index_select(0, (ids - src.start).to(local.device)))
        if reads_all:
            magnitudes[name] = Magnitudes(name, local.shape[1:], local.device)
            magnitudes[name].see(src.start, local[: src.num_valid])


def _statistics(local: Tensor, magnitudes: Magnitudes, src: VocabShard, spread: bool) -> ColumnStatistics:
    """Of all ranks' rows: maxima first, then integer sums."""
    magnitudes.largest = all_gather(src, magnitudes.largest).wait().amax(0)
    statistics = ColumnStatistics(magnitudes, spread=spread)
    statistics.add(local[: src.num_valid])
    statistics.merge(all_reduce_(src, statistics.sums).wait(), src.vocab_size)
    return statistics
