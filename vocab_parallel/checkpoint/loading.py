"""What of a checkpoint goes where in a model: names, ties, shapes and dtypes compared before anything changes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.checkpoint.files import StoredCheckpoint
from vocab_parallel.checkpoint.rows import BLOCK_BYTES
from vocab_parallel.checkpoint.states import SHARDS, Held, ModelState
from vocab_parallel.checkpoint.writing import dtype_name
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.shard import RankGroup
from vocab_parallel.vocabulary.row_states import is_master_weight

TIES = ("error", "untie")
_SHOWN = 4


@dataclass
class Matched:
    """What is loaded from where.

    Attributes:
        tensors: (saved key, this rank's part); a saved key comes twice where a tie is undone.
        numbers: (saved key, key here) of values that are numbers on one side or both.
        shards: (saved key, key here) of values that each rank had of its own.
        equal: Pairs of saved keys that go into one tensor here: they must be equal.
    """

    tensors: list[tuple[str, Held]] = field(default_factory=list)
    numbers: list[tuple[str, str]] = field(default_factory=list)
    shards: list[tuple[str, str]] = field(default_factory=list)
    equal: list[tuple[str, str]] = field(default_factory=list)


def match(stored: StoredCheckpoint, mine: ModelState, *, tie: str, optimizer: bool, cast: bool) -> Matched:
    """Finds each value's place in the checkpoint.

    Raises:
        CheckpointLayoutError: Naming keys that are missing or left over, and other shapes and dtypes, both sides.
    """
    found, wrong, users = Matched(), [], dict[str, list[str]]()
    for key in (*mine.tensors, *mine.scalars):
        saved = _saved_keys(stored, mine, key)
        if not saved:
            wrong.append(f"{key}: not saved, here {_words(mine, key)}")
            continue
        for one in saved:
            users.setdefault(one, []).append(key)
        found.equal += [(saved[0], other) for other in saved[1:]]
        wrong += _place(found, stored, mine, saved[0], key, cast)
    wrong += _left_over(stored, users, optimizer)
    retied = {one: keys for one, keys in users.items() if len(keys) > 1}
    if retied and tie != "untie":
        one, keys = next(iter(retied.items()))
        owners, ties = [mine.owners[key] for key in keys], stored.state["ties"]
        first = ties.get(owners[0], owners[0])
        aliases = ", ".join(name for name in ties if ties[name] == first)
        raise CheckpointLayoutError(
            f"{stored.path} was saved tied: {one} is the one tensor of {first} and {aliases}; in this model "
            f"{' and '.join(owners)} are Parameters of their own. Tie them (tie_weights) before the load, or pass "
            'load_checkpoint(..., tie="untie") to begin each as a copy'
        )
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise CheckpointLayoutError(f"{stored.path} does not fit this model: {'; '.join(wrong[:_SHOWN])}{more}")
    return found


def require_equal(stored: StoredCheckpoint, pairs: list[tuple[str, str]], group: RankGroup) -> None:
    """Raises if two saved tensors that go into one here differ in this rank's share of their rows.

    Memory:
        Two blocks of `BLOCK_BYTES`.
    """
    for one, other in pairs:
        sides = [_stored_words(stored, key) for key in (one, other)]
        if sides[0] != sides[1]:
            raise CheckpointLayoutError(_differ(stored, one, other, " and ".join(sides)))
        if one in stored.state["scalars"]:
            continue
        for start, stop in _blocks(stored.tensors[one][1], stored.tensors[one][0], group):
            first, second = (stored.read(key, start, stop).reshape(stop - start, -1) for key in (one, other))
            same = (first.view(torch.uint8) == second.view(torch.uint8)).reshape(stop - start, -1).all(1)
            if not bool(same.all()):
                row = start + int((~same).nonzero()[0, 0])
                raise CheckpointLayoutError(_differ(stored, one, other, f"row {row} is the first that differs"))


def place_others(stored: StoredCheckpoint, mine: ModelState, found: Matched) -> None:
    """Loads numbers, and what each rank had of its own."""
    for saved, key in found.numbers:
        scalars = stored.state["scalars"]
        value: Any = scalars[saved] if saved in scalars else stored.read(saved).item()
        _set(mine, key, value)
    same = stored.state["layout"] == mine.layout
    if found.shards and not same:
        warnings.warn(
            f"{stored.path}: {', '.join(key for _, key in found.shards)} had a value of its own on each rank (an "
            "optimizer like Adafactor depends on the number of ranks). At another layout each rank gets their mean, "
            "weighted by real rows",
            stacklevel=3,
        )
    for saved, key in found.shards:
        parts = stored.read(saved)
        if same:
            _set(mine, key, parts[mine.shard.rank])
            continue
        rows = torch.tensor(_real_rows(stored.state["layout"]), dtype=torch.float64)
        weights = (rows / rows.sum()).view(-1, *[1] * (parts.dim() - 1))
        _set(mine, key, (parts.double() * weights).sum(0).to(parts.dtype))


def _saved_keys(stored: StoredCheckpoint, mine: ModelState, key: str) -> list[str]:
    """Where a value may come from: one key; two where what is tied here was saved apart."""
    owner, ties = mine.owners[key], stored.state["ties"]
    prefix = key.partition(".")[0]
    suffix = key[len(f"{prefix}.{owner}") :]
    names = [owner, *(alias for alias, first in mine.ties.items() if first == owner)]
    keys = dict.fromkeys(f"{prefix}.{ties.get(name, name)}{suffix}" for name in names)
    spread = [f"{one}{SHARDS}" for one in keys] if key in mine.loose else []
    return [one for one in (*keys, *spread) if one in stored.tensors or one in stored.state["scalars"]]


def _place(
    found: Matched, stored: StoredCheckpoint, mine: ModelState, saved: str, key: str, cast: bool
) -> list[str]:  # fmt: skip
    """Notes how one value is loaded; returns what does not fit."""
    held = mine.tensors.get(key)
    if saved.endswith(SHARDS):
        found.shards.append((saved, key))
        stored.require_all_rows(saved)
        dtype, size = stored.tensors[saved]
        fits = list(size) == [stored.state["layout"]["tp_size"], *(held.shape if held is not None else [])]
        fits = fits and (held is None or dtype == held.local.dtype or cast)
        saved_words = f"{dtype_name(dtype)} {list(size)}"
        return [] if fits else [f"{key}: saved {saved_words}, a row a rank, here {_words(mine, key)}"]
    if held is None or saved in stored.state["scalars"]:
        single = held is None or not held.shape
        there = saved in stored.state["scalars"] or not stored.tensors[saved][1]
        found.numbers.append((saved, key))
        return [] if single and there else [f"{key}: one side has a number, the other a tensor"]
    stored.require_all_rows(saved)
    dtype, size = stored.tensors[saved]
    found.tensors.append((saved, held))
    if list(size) != held.shape or (dtype != held.local.dtype and not cast):
        hint = " (cast=True converts)" if list(size) == held.shape else ""
        return [f"{key}: saved {dtype_name(dtype)} {list(size)}, here {_words(mine, key)}{hint}"]
    return []


def _left_over(stored: StoredCheckpoint, users: dict[str, list[str]], optimizer: bool) -> list[str]:
    """What the checkpoint has and nothing here takes; master weights may stay, the model has them rounded."""
    wrong = []
    for key in (*stored.tensors, *stored.state["scalars"]):
        if key in users or (key.startswith("optimizer.") and (not optimizer or is_master_weight(key))):
            continue
        what = _stored_words(stored, key)
        wrong.append(f"{key}: saved {what}, not in this {'optimizer' if key.startswith('optimizer.') else 'model'}")
    return wrong


def _blocks(size: torch.Size, dtype: torch.dtype, group: RankGroup) -> Iterator[tuple[int, int]]:
    """This rank's share of a tensor's rows, block by block."""
    rows = size[0] if size else 1
    share = -(-rows // group.size)
    row_bytes = max(1, size[1:].numel() * dtype.itemsize)
    step = max(1, BLOCK_BYTES // row_bytes)
    stop = min(rows, (group.rank + 1) * share)
    for start in range(group.rank * share, stop, step):
        yield start, min(start + step, stop)


def _differ(stored: StoredCheckpoint, one: str, other: str, what: str) -> str:
    return (
        f"{stored.path} holds {one} and {other} as two tensors ({what}); in this model they are one tied weight. "
        "Untie the model to load both, or load without the optimizer if only its state differs"
    )


def _set(mine: ModelState, key: str, value: Any) -> None:
    """Puts a value where a key's is: into the tensor, or in place of the number."""
    if key in mine.tensors:
        local = mine.tensors[key].local
        if isinstance(value, Tensor):
            local.copy_(value)
        else:
            local.fill_(value)
        return
    home, name = mine.homes[key]
    home[name] = type(mine.scalars[key])(value.item() if isinstance(value, Tensor) else value)


def _real_rows(layout: dict[str, int]) -> list[int]:
    """Of each rank."""
    size = layout["padded_size"] // layout["tp_size"]
    return [max(0, min(size, layout["vocab_size"] - rank * size)) for rank in range(layout["tp_size"])]


def _words(mine: ModelState, key: str) -> str:
    if key in mine.scalars:
        return f"the number {mine.scalars[key]}"
    held = mine.tensors[key]
    return f"{dtype_name(held.local.dtype)} {held.shape}"


def _stored_words(stored: StoredCheckpoint, key: str) -> str:
    if key in stored.state["scalars"]:
        return f"the number {stored.state['scalars'][key]}"
    dtype, size = stored.tensors[key]
    return f"{dtype_name(dtype)} {list(size)}"
