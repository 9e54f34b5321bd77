"""The conformance of a live migration: what is recorded of a sharded model before it, and compared after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.arguments import local_rows
from vocab_parallel.collectives import all_gather, gather_vocab, pad_rows
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import verify_tied, vocab_parameters
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration.conformance import (
    Check,
    ConformanceReport,
    compare_records,
)
from vocab_parallel.vocabulary.migration.model_parts import several, vocabulary_shard
from vocab_parallel.vocabulary.migration.moving import as_row_bytes
from vocab_parallel.vocabulary.migration.records import (
    RowReader,
    TableRecord,
    fixed_hidden,
    record_table,
)
from vocab_parallel.vocabulary.ownership import verify_ownership
from vocab_parallel.vocabulary.row_states import is_master_weight, is_row_state

Ties = tuple[tuple[str, str], ...]


@dataclass(frozen=True, eq=False)
class ModelRecord:
    """What is remembered of a model and its optimizers: of every row a hash, never the row.

    Attributes:
        tables: By parameter name, and "parameter.state" of optimizer states by row; the same on every rank.
        zero: Those whose new rows must be zero.
        tied: Pairs of names that are one Parameter.
    """

    tables: dict[str, TableRecord]
    zero: tuple[str, ...]
    tied: Ties


def record_model(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None
) -> ModelRecord:
    """Records a model over a sharded vocabulary before it is migrated; changes nothing.

    Args:
        optimizer: As in `migrate_model_`.

    Collectives:
        A 64-byte all-gather; for each table and row state an all-gather of 8 bytes a row, for a head one of 32 more.

    Memory:
        8 bytes a row of the whole vocabulary for each table and row state, 32 more for a head; and one block.

    Raises:
        TyingError, LayoutError, UngatheredWeightError: On every rank.
    """
    return _recorded(model, several(optimizer), lambda: tuple(verify_tied(model, required=False)))


@torch.no_grad()
def conformance_report(
    before: ModelRecord,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None,
    vocab_map: VocabMap,
) -> ConformanceReport:
    """Compares a migrated model with what was recorded of it before.

    Rows of kept ids have the same bits, in weights and states; kept ids give the same raw logits on fixed hidden rows;
    new rows of states are zero; ties are the same and whole; each Parameter has one owner and its state; the ranks'
    ids follow each other from the first to the last. And how much probability the new rows take.

    Returns:
        The same report on every rank.

    Collectives:
        Those of `record_model`, and one all-gather of 48 bytes.
    """
    optimizers = several(optimizer)
    after = _recorded(model, optimizers, tuple)
    _, shard = vocabulary_shard(model)
    claims = {
        "tied weights": (_same_ties, f"{len(before.tied)} tied as before, each one Parameter"),
        "optimizer ownership": (_one_owner, f"{len(optimizers)} optimizers hold each Parameter once, with its states"),
        "storage": (_storage, f"{shard.shard_size} rows on each rank, padding zero"),
    }
    faults = [capture(check, before, model, optimizers, shard) for check, _ in claims.values()]
    words = [int(fault is None) for fault in faults]
    mine = torch.tensor([*words, shard.start, shard.stop, shard.vocab_size])
    every = all_gather(shard, mine.to(next(model.parameters()).device)).wait().tolist()
    checks = []
    for at, (name, (_, passed)) in enumerate(claims.items()):
        wrong = [rank for rank, row in enumerate(every) if not row[at]]
        checks.append(Check(name, not wrong, _said(shard, faults[at], wrong) if wrong else passed))
    checks.append(_ranges([(row[-3], row[-2]) for row in every], vocab_map.new_size))
    return compare_records(before.tables, after.tables, vocab_map, zero=after.zero, more=checks)


@torch.no_grad()
def _recorded(model: nn.Module, optimizers: list[Any], ties: Callable[[], Ties]) -> ModelRecord:
    _, shard = vocabulary_shard(model)
    found: list[tuple[dict[str, Tensor], Ties]] = []
    fault = capture(lambda: found.append((_tensors(model, optimizers, shard), ties())))
    names = list(found[0][0]) if found else []
    Exchange(shard, "header", f"record_model({names})", fault=fault, rows=0).wait()  # rows: the host waits for it
    shard.habit.end()
    tensors, tied = found[0]
    heads = _heads(model)
    tables = {name: _record(name, local, shard, heads) for name, local in tensors.items()}
    parameters = vocab_parameters(model)
    zero = tuple(name for name in tensors if name not in parameters and not is_master_weight(name))
    return ModelRecord(tables, zero, tied)


def _said(shard: VocabShard, fault: Exception | None, wrong: list[int]) -> str:
    """The words of the first rank with a fault, on every rank."""
    encoded = str(fault or "").encode()[:1024].ljust(1024, b"\0")
    sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(shard.device or "cpu")
    heard = all_gather(shard, sent).wait()[wrong[0]].cpu()
    return bytes(heard.tolist()).rstrip(b"\0").decode(errors="replace") + f" [on rank {wrong[0]}]"


def _ranges(ranges: list[tuple[int, int]], vocab_size: int) -> Check:
    ends = [0, *(stop for _, stop in ranges)]
    passed = all(start == end for (start, _), end in zip(ranges, ends, strict=False)) and ends[-1] == vocab_size
    words = ", ".join(f"[{start}, {stop})" for start, stop in ranges)
    return Check("shard ranges", passed, f"{words} of {vocab_size} ids")


def _record(name: str, local: Tensor, shard: VocabShard, heads: dict[str, Tensor | None]) -> TableRecord:
    """Of this rank's rows, then of all ranks' together."""

    def reader(rows: Tensor) -> RowReader:
        return lambda start, stop: rows[start - shard.start : stop - shard.start]

    hidden = fixed_hidden(local.shape[1]) if name in heads else None
    bias = heads.get(name)
    mine = record_table(
        name, reader(local), shard.start, shard.stop, hidden=hidden, bias=None if bias is None else reader(bias)
    )

    def joined(part: Tensor) -> Tensor:
        return gather_vocab(shard, pad_rows(part, shard.shard_size).to(local.device)).cpu()

    logits = None if mine.logits is None else joined(mine.logits)
    dtype = str(local.dtype).removeprefix("torch.")
    return TableRecord(name, dtype, tuple(local.shape[1:]), joined(mine.hashes), logits)


def _heads(model: nn.Module) -> dict[str, Tensor | None]:
    """The bias of each head, by the name of its weight; of a tied one that is the embedding's."""
    names = {id(parameter): name for name, (parameter, _) in vocab_parameters(model).items()}
    found: dict[str, Tensor | None] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelLMHead) and id(module.weight) in names:
            found[names[id(module.weight)]] = None if module.bias is None else local_rows(module.bias, module.shard)
    return found


def _tensors(model: nn.Module, optimizers: list[torch.optim.Optimizer], shard: VocabShard) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, (parameter, _) in vocab_parameters(model).items():
        tensors[name] = local_rows(parameter.detach(), shard)
        for optimizer in optimizers:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and is_row_state(str(key), value.shape, parameter.shape):
                    tensors[f"{name}.{key}"] = local_rows(value, shard)
    return tensors


def _same_ties(before: ModelRecord, model: nn.Module, optimizers: list[Any], _shard: VocabShard) -> None:
    now = tuple(verify_tied(model, optimizers[0] if len(optimizers) == 1 else None, required=False))
    if before.tied != now:
        raise ValueError(f"before: {before.tied}, now: {now}")


def _one_owner(_before: ModelRecord, model: nn.Module, optimizers: list[Any], _shard: VocabShard) -> None:
    for optimizer in optimizers:
        verify_ownership(model, optimizer)
    for name, (parameter, _) in vocab_parameters(model).items():
        held = sum(p is parameter for o in optimizers for group in o.param_groups for p in group["params"])
        if held != 1 and optimizers and parameter.requires_grad:
            raise ValueError(f"the optimizers hold {name} {held} times, expected once")


def _storage(_before: ModelRecord, model: nn.Module, _optimizers: list[Any], shard: VocabShard) -> None:
    for name, (parameter, its) in vocab_parameters(model).items():
        if len(parameter) != shard.shard_size or its.layout != shard.layout:
            raise ValueError(f"{name} has {len(parameter)} rows over {its.layout}, expected {shard.layout}")
        if bool(as_row_bytes(parameter.detach()[shard.num_valid :].contiguous()).any()):
            raise ValueError(f"{name} has padding that is not zero")
