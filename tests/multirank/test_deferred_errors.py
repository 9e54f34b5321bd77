"""Errors that the host learns of later: no reads in the hot path, and still one class of error on every rank, no hang.

The faults are those of `test_bad_input`, met where the ranks trust each other (the call is the one that the group
expects) and where they do not (it is the first). A fault may raise on one rank at once and on another in backward or
at the next call; after it the right call is made again on the same shard.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from tests.batch import Attempt, attempt, has_word, run_batch
from tests.multirank.test_bad_input import (
    EVERY,
    FAULTS,
    OPERATIONS,
    PADDED,
    D,
    Key,
    V,
    bad_rank,
    forward_and_backward,
    keys_of,
    whole_tables,
)
from tests.ranks import RankFailure, run_ranks
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.agreement import Exchange, first_row, judge, raise_deferred
from vocab_parallel.collectives import all_reduce_
from vocab_parallel.deferral import Unread
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError

WARM = 3  # calls after which a group that only makes this one expects it


def deferred_shard(world: int) -> VocabShard:
    return VocabShard(VocabLayout.from_padded(V, PADDED, world), dist.group.WORLD, deferred_errors=True)


# --- no host reads ----------------------------------------------------------------------------------------------------


class HostRead(Exception):
    """The host has read a tensor."""


class NoHostReads(TorchDispatchMode):
    """Refuses operations whose result depends on values that the host has to read."""

    REFUSED = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique_dim", "_unique2")
    INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name in self.INDEXING and any(at is not None and at.dtype == torch.bool for at in args[1])
        if name in self.REFUSED or by_mask or str(func) == "aten.repeat_interleave.Tensor":
            raise HostRead(str(func))
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """Refuses every way to read a tensor's values, except that of flags which were copied to the host before."""
    allowed = False
    names = ["item", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__", "__array__"]
    originals = {name: vars(torch.Tensor).get(name) for name in names}

    def guarded(name: str) -> Any:
        original = getattr(torch.Tensor, name)

        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if not allowed:
                raise HostRead(name)
            return original(self, *args, **kwargs)

        return method

    read = Unread.read

    def read_flags(self: Unread) -> Any:
        nonlocal allowed
        allowed = True
        try:
            return read(self)
        finally:
            allowed = False

    try:
        for name in names:
            setattr(torch.Tensor, name, guarded(name))
        Unread.read = read_flags
        with NoHostReads():
            yield
    finally:
        Unread.read = read
        for name, original in originals.items():
            if original is None:
                delattr(torch.Tensor, name)
            else:
                setattr(torch.Tensor, name, original)


def read_nothing(rank: int, world: int, operation: str) -> None:
    shard, right = deferred_shard(world), OPERATIONS[operation]
    for _ in range(WARM):
        forward_and_backward(right.call, right.arguments(shard), shard)
    arguments = [right.arguments(shard) for _ in range(2)]
    with no_host_reads():
        for given in arguments:
            forward_and_backward(right.call, given, shard)
    assert len(shard.unread) <= 2 * len(arguments), "flags pile up"
    raise_deferred(shard)


# Sequence-parallel rows may differ in number between ranks, and the host must know their numbers.
READ_NOTHING = [name for name in OPERATIONS if name not in ("linear, own rows", "logits, own rows")]


@functools.cache
def read_nothing_runs(world: int) -> dict[str, Any]:
    return run_batch(read_nothing, world, READ_NOTHING, timeout=40)


@pytest.mark.parametrize("operation", READ_NOTHING)
@pytest.mark.parametrize("world", [1, 2])
def test_an_expected_call_reads_nothing_on_the_host(operation: str, world: int) -> None:
    result = read_nothing_runs(world)[operation]
    assert not isinstance(result, str), result


def test_the_guard_finds_host_reads() -> None:
    value, flags = torch.ones(3), torch.tensor([True, False])
    for read in (
        lambda: value.sum().item(),
        lambda: value.tolist(),
        lambda: bool(flags.any()),
        lambda: int(value[0]),
        lambda: float(value[0]),
        lambda: flags.nonzero(),
        lambda: torch.equal(value, value),
        lambda: value[flags.new_ones(3)],
        lambda: value[torch.tensor(1)],
        lambda: torch.repeat_interleave(flags.new_ones(3).long()),
    ):
        with pytest.raises(HostRead), no_host_reads():
            read()
    assert value.tolist() == [1.0] * 3


# --- the table of bad input -------------------------------------------------------------------------------------------


def meet(rank: int, world: int, key: Key, warm: bool) -> dict[str, Any]:
    """The faulty call; if it raises nothing, the next call; then the right one: how far its value is off."""
    index, operation, where = key
    right, shard = OPERATIONS[operation], shard_for(world)
    if not warm:
        shard = deferred_shard(world)
    for _ in range(WARM if warm else 0):
        forward_and_backward(right.call, right.arguments(shard), shard)
    arguments = right.arguments(shard)
    if where == EVERY or rank == bad_rank(key, world):
        arguments |= FAULTS[index].change(arguments, shard)
    met, late = attempt(lambda: forward_and_backward(right.call, arguments, shard)), False
    if met.kind is None:
        met, late = attempt(lambda: forward_and_backward(right.call, right.arguments(shard), shard)), True
    value = forward_and_backward(right.call, right.arguments(shard), shard)
    difference = (value.double() - right.value(shard).double()).abs()
    return {"met": met, "late": late, "off": difference.max().item() if difference.numel() else 0.0}


@functools.cache
def shard_for(world: int) -> VocabShard:
    return deferred_shard(world)


def meet_warm(rank: int, world: int, key: Key) -> dict[str, Any]:
    return meet(rank, world, key, warm=True)


def meet_first(rank: int, world: int, key: Key) -> dict[str, Any]:
    return meet(rank, world, key, warm=False)


@functools.cache
def meetings(world: int, warm: bool) -> dict[Key, Any]:
    keys = [key for index in range(len(FAULTS)) for key in keys_of(index)]
    return run_batch(meet_warm if warm else meet_first, world, keys, timeout=100, detail=world != 2)


@pytest.mark.parametrize(("world", "warm"), [(2, True), (2, False), (3, True)])
@pytest.mark.parametrize("index", [pytest.param(i, id=fault.name) for i, fault in enumerate(FAULTS)])
def test_a_fault_is_the_same_class_on_every_rank_by_the_next_call(index: int, world: int, warm: bool) -> None:
    for key in keys_of(index):
        fault, (_, operation, where) = FAULTS[index], key
        what = f"{fault.name}, {operation}, {where}, {'expected' if warm else 'first'} call"
        found = meetings(world, warm)[key]
        assert not isinstance(found, str), f"{what}: {found}"
        met: list[Attempt] = [one["met"] for one in found]
        assert len({one.kind for one in met}) == 1, f"{what}: {met}"
        assert met[0].kind in fault.errors.split(), f"{what}: {met}"
        assert max(one.seconds for one in met) < 10, f"{what}: {met}"
        assert any(any(has_word(one.message, word) for word in fault.words) for one in met), f"{what}: no words: {met}"
        if where != EVERY and operation != "linear, own rows":
            assert any(has_word(one.message, f"rank {bad_rank(key, world)}") for one in met), f"{what}: {met}"
        if not warm:
            assert not any(one["late"] for one in found) or fault.errors == "NonFiniteError", f"{what}: late: {found}"
        assert max(one["off"] for one in found) < 1e-5, f"{what}: the right call afterwards gives a wrong value"
