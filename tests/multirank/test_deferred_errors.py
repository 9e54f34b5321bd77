"""Errors that the host learns of later: no reads in the hot path, and still one class of error on every rank, no hang.

The faults are those of `test_bad_input`, met where the ranks trust each other (the call is the one that the group
expects) and where they do not (it is the first). A fault may raise on one rank at once and on another in backward or
at the next call; after it the right call is made again on the same shard.
"""

from __future__ import annotations

import contextlib
import functools
import random
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
    Key,
    V,
    bad_rank,
    forward_and_backward,
    keys_of,
)
from tests.ranks import RankFailure, run_ranks
from vocab_parallel import Streams, VocabLayout, VocabShard, sample
from vocab_parallel.agreement import Exchange, first_row, judge, raise_deferred
from vocab_parallel.collectives import all_reduce_
from vocab_parallel.deferral import Found, Unread
from vocab_parallel.errors import LayoutMismatchError, NonFiniteError, TargetRangeError

WARM = 2  # calls after which a group that only makes this one expects it


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


# Sequence-parallel rows may differ in number between ranks, and the host must know their numbers. Sampling reads its
# parameters, which lie on the CPU, and top-p how many columns its search begins with.
READ_NOTHING = [name for name in OPERATIONS if name not in ("linear, own rows", "logits, own rows", "sample", "top_p")]


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
    keys = [key for index in range(len(FAULTS)) for key in keys_met(index, world, warm)]
    return run_batch(meet_warm if warm else meet_first, world, keys, timeout=100, detail=False)


def keys_met(index: int, world: int, warm: bool) -> list[Key]:
    """Three ranks, and ranks that do not trust each other, differ where only one rank sees the fault."""
    return [key for key in keys_of(index) if key[2] != EVERY or (world == 2 and warm)]


@pytest.mark.parametrize(("world", "warm"), [(2, True), (3, False)])
@pytest.mark.parametrize("index", [pytest.param(i, id=fault.name) for i, fault in enumerate(FAULTS)])
def test_a_fault_is_the_same_class_on_every_rank_by_the_next_call(index: int, world: int, warm: bool) -> None:
    for key in keys_met(index, world, warm):
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


# --- the protocol, call by call ---------------------------------------------------------------------------------------


def bad_value(row: int, value: int) -> Exception:
    return TargetRangeError(f"{value} at row {row}")


def several_steps(shard: VocabShard, words: str, *, chunks: int = 3, rows: int = 4, fails_at: int = -1) -> torch.Tensor:
    """A call of several exchanges and reductions; with `fails_at`, this rank's own code fails in that chunk."""
    fine = Found(torch.tensor([-1, 0]), TargetRangeError, bad_value)
    total, fault = torch.zeros(2), None
    for chunk in range(chunks):
        fault = fault or (ValueError("this rank's own code") if chunk == fails_at else None)
        payload = torch.full((rows,), float(shard.rank + chunk))
        exchange = Exchange(
            shard, "loss", words, payload=payload, fault=fault, opens=chunk == 0, may_fail=chunk > 0,
            found=fine if chunk == 0 else None,
        )  # fmt: skip
        gathered = exchange.wait()
        total += all_reduce_(shard, gathered.sum(1)[:2].clone()).wait()
    return total


def expected_total(world: int, chunks: int = 3, rows: int = 4) -> float:
    """The first entry of the right result."""
    return float(world * rows * sum(range(chunks)))


def fault_in_the_middle(rank: int, world: int, warm: int) -> dict[str, Any]:
    shard = deferred_shard(world)
    for _ in range(warm):
        several_steps(shard, "a")
    faulty = attempt(lambda: several_steps(shard, "a", fails_at=1 if rank == 1 else -1))
    at_next = attempt(lambda: several_steps(shard, "a")) if faulty.kind is None else faulty
    return {"faulty": faulty, "met": at_next, "after": several_steps(shard, "a")[0].item()}


@pytest.mark.parametrize("warm", [0, 1, WARM])
def test_a_fault_in_the_middle_of_a_call_reaches_every_rank(warm: int) -> None:
    found = run_batch(fault_in_the_middle, 2, [warm], timeout=20)[warm]
    assert not isinstance(found, str), found
    assert [one["met"].kind for one in found] == ["ValueError"] * 2, found
    assert "this rank's own code" in found[1]["met"].message
    assert "rank 1" in found[0]["met"].message
    assert (found[0]["faulty"].kind is None) == (warm > 0), "where the call is known, the other rank learns later"
    assert [one["after"] for one in found] == [expected_total(2)] * 2


def out_of_step(rank: int, world: int, _: str) -> dict[str, Any]:
    """Calls a and b take turns; then rank 1 leaves one out."""
    shard = deferred_shard(world)
    for _ in range(3):
        several_steps(shard, "a")
        several_steps(shard, "b", chunks=2)
    with no_host_reads():
        several_steps(shard, "a")
    mine = ("a", 3) if rank == 1 else ("b", 2)
    met = attempt(lambda: several_steps(shard, mine[0], chunks=mine[1]))
    if met.kind is None:
        met = attempt(lambda: raise_deferred(shard))
    return {"met": met, "after": several_steps(shard, "a")[0].item()}


def test_ranks_out_of_step_are_told_which_call_was_expected() -> None:
    found = run_batch(out_of_step, 2, ["once"], timeout=20)["once"]
    assert not isinstance(found, str), found
    assert [one["met"].kind for one in found] == ["LayoutMismatchError"] * 2, found
    assert has_word(found[1]["met"].message, "rank 0: b") and has_word(found[1]["met"].message, "rank 1: a"), found
    assert "rank 1: another call" in found[0]["met"].message, found
    assert [one["after"] for one in found] == [expected_total(2)] * 2


def sizes_change(rank: int, world: int, _: str) -> list[dict[str, int]]:
    """A large call, so many small ones that its size is forgotten, and the large one where it is expected again."""
    shard = deferred_shard(world)
    counts = []
    for large in [True, *[False] * 9] * 4:
        shard.traffic.reset()
        rows = 40_000 if large else 4
        total = several_steps(shard, f"{rows} rows", rows=rows)
        assert total[0].item() == expected_total(world, rows=rows)
        if large:
            counts.append(dict(shard.traffic.calls))
    raise_deferred(shard)
    return counts


def test_a_payload_whose_size_is_forgotten_follows_in_a_second_exchange() -> None:
    for counts in run_ranks(_sizes_change, 2):
        assert counts == [{"all_gather": 4, "all_reduce": 3}] * 4


def _sizes_change(rank: int) -> list[dict[str, int]]:
    return sizes_change(rank, 2, "")


def fault_while_sizes_change(rank: int, world: int, _: str) -> dict[str, Any]:
    shard = deferred_shard(world)
    for large in [True, *[False] * 4] * 3:
        rows = 40_000 if large else 4
        several_steps(shard, f"{rows} rows", rows=rows)
    for _ in range(8):
        shard.payload_sizes["loss"].append(16)  # as if more small calls had come
    fault = ValueError("mine") if rank == 1 else None
    if fault is not None:
        met = attempt(lambda: Exchange(shard, "loss", "a call", fault=fault).wait())
    else:
        several_steps(shard, "40000 rows", rows=40_000)
        met = attempt(lambda: raise_deferred(shard))
    return {"met": met, "after": several_steps(shard, "a")[0].item()}


def test_a_faulty_rank_goes_along_with_a_payload_that_follows() -> None:
    found = run_batch(fault_while_sizes_change, 2, ["once"], timeout=20)["once"]
    assert not isinstance(found, str), found
    assert [one["met"].kind for one in found] == ["ValueError"] * 2, found
    assert [one["after"] for one in found] == [expected_total(2)] * 2


def other_rows(rank: int, world: int, _: str) -> dict[str, Any]:
    """Sampling that cuts every row, and then not all of them, which takes more collectives; one rank is wrong in it."""
    shard = deferred_shard(world)
    logits = OPERATIONS["greedy"].arguments(shard)["logits"]
    rows, streams = len(logits), Streams.of(range(len(logits)))
    for _ in range(WARM):
        sample(logits, shard=shard, streams=streams, top_k=2)
    wrong = {"temperature": -1.0} if rank == 1 else {}
    met = attempt(lambda: sample(logits, shard=shard, streams=streams, top_k=[2] * (rows - 1) + [V], **wrong))
    if met.kind is None:
        met = attempt(lambda: raise_deferred(shard))
    return {"met": met, "after": sample(logits, shard=shard, streams=streams, top_k=2).token_ids.tolist()}


def test_a_call_with_other_collectives_is_not_the_expected_one() -> None:
    found = run_batch(other_rows, 2, ["once"], timeout=20)["once"]
    assert not isinstance(found, str), found
    assert [one["met"].kind for one in found] == ["ValueError"] * 2, found
    assert found[0]["after"] == found[1]["after"]


def many_flags(rank: int, world: int, bad: int) -> Attempt:
    """More flags than are kept: the first error is the one that is raised."""
    shard = deferred_shard(world)
    for at in range(600):
        row = first_row(torch.tensor([at in (bad, bad + 100)]))
        judge(shard, torch.stack([row, torch.tensor(at)]), NonFiniteError, lambda flags: NonFiniteError(f"{flags[1]}"))
        assert len(shard.unread) <= 256
    return attempt(lambda: raise_deferred(shard))


def test_the_first_of_many_errors_is_raised_and_no_more_flags_are_kept_than_a_few() -> None:
    for bad, found in run_batch(many_flags, 1, [0, 17, 300, 499], timeout=20).items():
        assert not isinstance(found, str), found
        assert (found[0].kind, found[0].message) == ("NonFiniteError", str(bad))


def different_settings(rank: int) -> None:
    VocabShard(VocabLayout(V, 2), dist.group.WORLD, deferred_errors=rank == 0)


def test_ranks_must_defer_errors_alike() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(different_settings, 2)
    assert {error.type for error in failure.value.errors.values()} == {LayoutMismatchError.__name__}
    assert all("rank 0: True, rank 1: False" in error.message for error in failure.value.errors.values())


def alone(rank: int, world: int, _: str) -> list[Attempt]:
    """Without a group: the flags of one call are raised at the next, whatever it is."""
    shard = VocabShard(VocabLayout(V, 1), deferred_errors=True)
    met = []
    for operation, name, value in (("cross_entropy", "target", 99), ("embedding", "input", -1)):
        right = OPERATIONS[operation]
        arguments = right.arguments(shard)
        arguments[name][1] = value
        right.call(shard=shard, **arguments)
        met.append(attempt(lambda right=right: right.call(shard=shard, **right.arguments(shard))))
        right.call(shard=shard, **right.arguments(shard))
    return met


def test_in_a_group_of_one_flags_are_raised_at_the_next_call() -> None:
    (found,) = run_batch(alone, 1, ["once"], timeout=20).values()
    assert not isinstance(found, str), found
    assert [one.kind for one in found[0]] == ["TargetRangeError", "TokenRangeError"]
    assert has_word(found[0][0].message, "99 at row 1") and has_word(found[0][1].message, "-1 at position 1")


CALLS = {"a": {"chunks": 3}, "b": {"chunks": 2, "rows": 15_000}, "c": {"chunks": 1}, "d": {"chunks": 9, "rows": 300}}
TROUBLE = ["a fault", "a fault in the middle", "another call", "a bad value", "another checksum"]


def history(rank: int, world: int, seed: int) -> list[tuple[str, Any]]:
    """A long random run of calls, most of them in turn, now and then with something wrong on one rank."""
    shard, draw = deferred_shard(world), random.Random(seed)
    turn = draw.choice(["a", "ab", "abc", "aacd", "db"])
    seen: list[tuple[str, Any]] = []
    for at in range(60):
        name = turn[at % len(turn)] if draw.random() < 0.9 else draw.choice(list(CALLS))
        trouble, who = draw.choice(TROUBLE) if draw.random() < 0.25 else "", draw.randrange(world)
        mine = trouble if rank == who else ""
        other = draw.choice([one for one in CALLS if one != name])

        def step(name: str = name, mine: str = mine, other: str = other) -> Any:
            if mine == "a fault":
                Exchange(shard, "loss", "wrong", fault=TypeError("mine")).wait()
            if mine in ("a bad value", "another checksum"):
                return one_step(shard, name, bad=mine == "a bad value", **CALLS[name])
            name = other if mine == "another call" else name
            fails_at = CALLS[name]["chunks"] - 1 if mine == "a fault in the middle" else -1
            result = several_steps(shard, name, fails_at=fails_at, **CALLS[name])
            return result[0].item() == expected_total(world, **CALLS[name])

        right: list[Any] = []
        met = attempt(lambda step=step, right=right: right.append(step()))
        if met.kind is None:
            met = attempt(lambda: raise_deferred(shard))
        seen.append((trouble, met.kind or right[0]))
    return seen


def one_step(shard: VocabShard, name: str, *, bad: bool, chunks: int, rows: int = 4) -> bool:
    """As `several_steps`, with a bad value or another checksum in the first exchange."""
    found = Found(torch.tensor([0, 7] if bad else [-1, 0]), TargetRangeError, bad_value)
    for chunk in range(chunks):
        exchange = Exchange(
            shard, "loss", name, payload=torch.zeros(rows), opens=chunk == 0, may_fail=chunk > 0,
            found=found if chunk == 0 else None, checksum=int(not bad and chunk == 0),
        )  # fmt: skip
        all_reduce_(shard, exchange.wait().sum(1)[:2].clone()).wait()
    return False


SEEDS = 4  # of random histories of calls


@functools.cache
def histories(world: int) -> dict[int, Any]:
    return run_batch(history, world, list(range(SEEDS)), timeout=100, detail=False)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("world", [2, 3])
def test_whatever_happens_the_ranks_stay_together(seed: int, world: int) -> None:
    found = histories(world)[seed]
    assert not isinstance(found, str), found
    for at, seen in enumerate(zip(*found, strict=True)):
        trouble, kinds = seen[0][0], {kind for _, kind in seen}
        classes = {
            "": True, "a fault": "TypeError", "a fault in the middle": "ValueError", "a bad value": "TargetRangeError",
        }  # fmt: skip
        wanted = classes.get(trouble, "LayoutMismatchError")
        if trouble == "a fault in the middle" and kinds == {True}:
            continue
        assert kinds == {wanted}, f"call {at}, {trouble or 'nothing wrong'}: {seen}"
