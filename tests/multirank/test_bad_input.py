"""Bad input: whatever is wrong, on every rank or on one, all ranks raise the same error soon, and go on working.

`FAULTS` is the table. Each fault changes some arguments of a call that is right, on every rank or on one rank alone.
After each one the right call is made again on the same shard, and must give its value.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.batch import assert_all_raise, attempt, has_word, run_batch
from tests.cases import local_part
from vocab_parallel import (
    Streams,
    VocabLayout,
    VocabParallelLMHead,
    VocabShard,
    cross_entropy,
    greedy,
    linear_cross_entropy,
    reference,
    sample,
    top_k,
    top_p,
    vocab_parallel_embedding,
)

V, PADDED, D, T = 9, 12, 3, 8  # ids 9 to 11 are padding, and the last shard is short
TARGET = [8, 0, -100, 4, 2, 7, 1, 8]
IDS = [8, 0, 3, 4, 2, 7, 1, 8]

Arguments = dict[str, Any]
Change = Callable[[Arguments, VocabShard], Arguments]


# --- the calls that are right -----------------------------------------------------------------------------------------


def whole_tables() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias and logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(T, D, generator=generator), torch.randn(V, D, generator=generator)
    bias = torch.randn(V, generator=generator)
    return hidden, weight, bias, hidden @ weight.T + bias


def rows_of(shard: VocabShard) -> slice:
    """Rows of one rank under sequence parallelism: the last rank may have fewer."""
    share = math.ceil(T / shard.tp_size)
    return slice(min(shard.rank * share, T), min((shard.rank + 1) * share, T))


def local(whole: Tensor, dim: int, shard: VocabShard) -> Tensor:
    """This rank's part, padding NaN."""
    return local_part(whole, dim, shard.shard_size, shard.rank)


def loss_arguments(shard: VocabShard) -> Arguments:
    return {"logits": local(whole_tables()[3], 1, shard).requires_grad_(), "target": torch.tensor(TARGET)}


def linear_arguments(shard: VocabShard) -> Arguments:
    hidden, weight, bias, _ = whole_tables()
    return {
        "input": hidden.requires_grad_(),
        "linear_weight": local(weight, 0, shard).requires_grad_(),
        "linear_bias": local(bias, 0, shard),
        "target": torch.tensor(TARGET),
        "chunk_size": 2,
    }


def own_rows_arguments(shard: VocabShard) -> Arguments:
    arguments, mine = linear_arguments(shard), rows_of(shard)
    own = {"input": whole_tables()[0][mine].requires_grad_(), "target": arguments["target"][mine]}
    return arguments | own | {"sequence_parallel": True}


def embedding_arguments(shard: VocabShard) -> Arguments:
    return {"input": torch.tensor(IDS), "weight": local(whole_tables()[1], 0, shard).requires_grad_()}


def head_arguments(shard: VocabShard) -> Arguments:
    return {"input": whole_tables()[0][rows_of(shard)].requires_grad_()}


def head_logits(input: Tensor, *, shard: VocabShard) -> Tensor:
    head = VocabParallelLMHead(D, shard=shard)
    with torch.no_grad():
        head.weight.copy_(local(whole_tables()[1], 0, shard))
    return head.logits(input, sequence_parallel=True)[:, : shard.num_valid]


def select_arguments(shard: VocabShard) -> Arguments:
    return {"logits": local(whole_tables()[3], 1, shard)}


def draw(logits: Any, *, shard: VocabShard, **given: Any) -> Tensor:
    streams = Streams.of(range(len(logits) if isinstance(logits, Tensor) else 1))
    return sample(logits, shard=shard, streams=streams, **{"temperature": 0.8, "top_p": 0.9} | given).token_ids


def drawn(shard: VocabShard) -> Tensor:
    one = torch.ones(len(TARGET))
    streams = Streams.of(range(len(TARGET)))
    return reference.sample(
        whole_tables()[3],
        streams.bits(),
        temperature=one * 0.8,
        top_k=one.long() * V,
        top_p=one * 0.9,
        min_p=one * 0,
    )


def loss_value(shard: VocabShard) -> Tensor:
    return torch.nn.functional.cross_entropy(whole_tables()[3], torch.tensor(TARGET))


def embedded(shard: VocabShard) -> Tensor:
    return whole_tables()[1][torch.tensor(IDS)]


def own_logits(shard: VocabShard) -> Tensor:
    hidden, weight, _, _ = whole_tables()
    return (hidden @ weight.T)[:, shard.start : shard.stop]


@dataclass(frozen=True)
class Operation:
    """A call that is right, and its value, found apart from the package."""

    call: Callable[..., Tensor]
    arguments: Callable[[VocabShard], Arguments]
    value: Callable[[VocabShard], Tensor]


own_embedding = functools.partial(vocab_parallel_embedding, sequence_parallel=True)

OPERATIONS = {
    "cross_entropy": Operation(cross_entropy, loss_arguments, loss_value),
    "linear": Operation(linear_cross_entropy, linear_arguments, loss_value),
    "linear, own rows": Operation(linear_cross_entropy, own_rows_arguments, loss_value),
    "embedding": Operation(vocab_parallel_embedding, embedding_arguments, embedded),
    "embedding, own rows": Operation(own_embedding, embedding_arguments, lambda shard: embedded(shard)[rows_of(shard)]),
    "logits, own rows": Operation(head_logits, head_arguments, own_logits),
    "greedy": Operation(greedy, select_arguments, lambda shard: whole_tables()[3].argmax(-1)),
    "top_k": Operation(
        lambda **given: top_k(**{"k": 4} | given).token_ids,
        select_arguments,
        lambda shard: whole_tables()[3].sort(dim=-1, descending=True, stable=True).indices[:, :4],
    ),
    "sample": Operation(draw, select_arguments, drawn),
    "top_p": Operation(
        lambda **given: top_p(**{"p": 0.6} | given).size,
        select_arguments,
        lambda shard: reference.nucleus(whole_tables()[3], torch.full((len(TARGET),), 0.6)).sum(1),
    ),
}
LINEAR = ("linear", "linear, own rows")
LOSSES = ("cross_entropy", *LINEAR)
EMBEDDINGS = ("embedding", "embedding, own rows")
SELECT = ("greedy", "top_k", "sample", "top_p")
LOGITS = ("cross_entropy", *SELECT)
EVERY, ONE = "on every rank", "on one rank"


# --- what can be wrong ------------------------------------------------------------------------------------------------


def replace(name: str, value: Any) -> Change:
    return lambda arguments, shard: {name: value}


def edit(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    """Changes one tensor, which wants its gradient as before where it still can."""

    def changed(arguments: Arguments, shard: VocabShard) -> Arguments:
        new = change(arguments[name].detach().clone())
        return {name: new.requires_grad_(arguments[name].requires_grad and new.is_floating_point())}

    return changed


def put(name: str, value: float, row: int = 1) -> Change:
    return edit(name, lambda tensor: tensor.index_fill_(0, torch.tensor([row % len(tensor)]), value))


def spoil(value: float) -> Change:
    """Fills the last row of the logits or hidden states, which the fused loss meets in its last chunk."""
    return lambda arguments, shard: put("logits" if "logits" in arguments else "input", value, -1)(arguments, shard)


def edit_each(names: tuple[str, ...], change: Callable[[Tensor], Tensor]) -> Change:
    def changed(arguments: Arguments, shard: VocabShard) -> Arguments:
        present = [name for name in names if name in arguments]
        return {name: edit(name, change)(arguments, shard)[name] for name in present}

    return changed


fewer_rows = edit_each(("logits", "input", "target"), lambda x: x[:-1])
doubles = edit_each(
    ("logits", "input", "linear_weight", "linear_bias", "weight"), lambda x: x.double() if x.is_floating_point() else x
)
wider = edit_each(("linear_weight", "weight", "input"), lambda x: torch.cat([x, x], 1) if x.dim() == 2 else x)


def detached(name: str) -> Change:
    return lambda arguments, shard: {name: arguments[name].detach()}


def gathered(size: int) -> Change:
    return lambda arguments, shard: {"logits": torch.nn.functional.pad(whole_tables()[3], (0, size - V))}


@dataclass(frozen=True)
class Fault:
    """Something wrong, the operations that can meet it, and the error that is right for it."""

    name: str
    operations: tuple[str, ...]
    change: Change
    errors: str  # names of classes, separated by spaces
    words: tuple[str, ...]
    where: tuple[str, ...] = (EVERY, ONE)


MISMATCH, TARGET_RANGE, TOKEN_RANGE = "LayoutMismatchError", "TargetRangeError", "TokenRangeError"
FINITE, UNGATHERED, VALUE = "NonFiniteError", "UngatheredWeightError", "ValueError"
GATHER = ("ZeRO-3", "deepspeed.zero.GatheredParameters")
BOTH = ("disagree", "rank 0: ", "rank 1: ")

# fmt: off
FAULTS = [
    # a target or id outside [0, vocab_size), padding ids included
    Fault("a target past the padding", LOSSES, put("target", 99), TARGET_RANGE,
          ("99", "row 1", "[0, 9)", "ignore_index")),
    Fault("a padding id as target", LOSSES, put("target", 9), TARGET_RANGE, ("9", "row 1", "[0, 9)", "padding id")),
    Fault("a negative target", LOSSES, put("target", -1), TARGET_RANGE, ("-1", "row 1", "[0, 9)", "ignore_index")),
    Fault("an id past the padding", EMBEDDINGS, put("input", 99), TOKEN_RANGE,
          ("99 at position 1", "[0, 9)", "tokenizer")),
    Fault("a padding id", EMBEDDINGS, put("input", 10), TOKEN_RANGE, ("10 at position 1", "[0, 9)", "no vocabulary")),
    Fault("a negative id", EMBEDDINGS, put("input", -1), TOKEN_RANGE, ("-1 at position 1", "[0, 9)")),
    # arguments that disagree
    Fault("too few targets", LOSSES[:2], edit("target", lambda x: x[:-1]), MISMATCH,
          ("[8,", "[7]", "leading shape [8]")),
    Fault("targets of two dimensions", LOSSES, edit("target", lambda x: x[:, None]), MISMATCH, ("target", "1]")),
    Fault("a narrow weight", LINEAR, edit("linear_weight", lambda x: x[:, :2]), MISMATCH,
          ("input", "3]", "weight", "2]")),
    Fault("a weight with a row missing", LINEAR, edit("linear_weight", lambda x: x[1:]), MISMATCH,
          ("weight", "padding")),
    Fault("a weight of one dimension", LINEAR, edit("linear_weight", lambda x: x[:, 0]), MISMATCH, ("weight", "rows")),
    Fault("an embedding with a row missing", EMBEDDINGS, edit("weight", lambda x: x[1:]), MISMATCH, ("weight", "rows")),
    Fault("a bias without entries", LINEAR, edit("linear_bias", lambda x: x[:0]), MISMATCH, ("bias", "[0]")),
    Fault("a bias with an entry too many", LINEAR, edit("linear_bias", lambda x: x.repeat(2)), MISMATCH,
          ("bias", "shape")),
    Fault("a bias of two dimensions", LINEAR, edit("linear_bias", lambda x: x[None]), MISMATCH, ("bias", "[1,")),
    Fault("a weight of another dtype", LINEAR, edit("linear_weight", lambda x: x.bfloat16()), MISMATCH,
          ("weight torch.bfloat16", "input torch.float32", "cast")),
    Fault("a bias of another dtype", LINEAR, edit("linear_bias", lambda x: x.double()), MISMATCH,
          ("bias torch.float64",)),
    Fault("float targets", LOSSES, edit("target", lambda x: x.float()), MISMATCH,
          ("target", "integer", "torch.float32")),
    Fault("float ids", EMBEDDINGS, edit("input", lambda x: x.float()), MISMATCH, ("integer", "torch.float32")),
    Fault("bool ids", EMBEDDINGS, edit("input", lambda x: x > 3), MISMATCH, ("integer", "torch.bool")),
    Fault("integer logits", LOGITS, edit("logits", lambda x: x.nan_to_num().long()), MISMATCH,
          ("floating", "torch.int64")),
    Fault("bool logits", LOGITS, edit("logits", lambda x: x > 0), MISMATCH, ("floating", "torch.bool")),
    Fault("integer hidden states", LINEAR, edit("input", lambda x: x.long()), MISMATCH,
          ("input torch.int64", "floating")),
    Fault("no logits", LOGITS, replace("logits", None), MISMATCH, ("logits", "NoneType")),
    Fault("gathered logits", LOGITS, gathered(V), MISMATCH, ("9 columns", "gathered logits", "gather_output")),
    Fault("gathered logits with padding", LOGITS, gathered(PADDED), MISMATCH, ("12 columns", "gathered logits")),
    # ranks that disagree
    Fault("fewer rows", ("cross_entropy", "linear", *SELECT), fewer_rows, MISMATCH, (*BOTH, "[8,", "[7,"), (ONE,)),
    Fault("fewer ids", EMBEDDINGS, fewer_rows, MISMATCH, (*BOTH, "[8]", "[7]"), (ONE,)),
    Fault("another width", (*LINEAR, *EMBEDDINGS), wider, MISMATCH, (*BOTH, "3]", "6]"), (ONE,)),
    Fault("float64", (*LOSSES, *EMBEDDINGS, *SELECT), doubles, MISMATCH,
          (*BOTH, "torch.float64", "torch.float32"), (ONE,)),
    Fault("another reduction", LOSSES, replace("reduction", "sum"), MISMATCH, (*BOTH, "'sum'", "'mean'"), (ONE,)),
    Fault("another smoothing", LOSSES, replace("label_smoothing", 0.25), MISMATCH,
          (*BOTH, "label_smoothing=0.25"), (ONE,)),
    Fault("another convention", LOSSES, replace("smoothing_over", "others"), MISMATCH,
          (*BOTH, "'others'", "'all'"), (ONE,)),
    Fault("another ignore_index", LOSSES, replace("ignore_index", -7), f"{MISMATCH} {TARGET_RANGE}",
          ("-100", "-7"), (ONE,)),
    Fault("another chunk size", LINEAR, replace("chunk_size", 3), MISMATCH,
          (*BOTH, "chunk_size 3", "chunk_size 2"), (ONE,)),
    Fault("no bias", LINEAR, replace("linear_bias", None), MISMATCH, (*BOTH, "bias none"), (ONE,)),
    Fault("no gradient wanted", (*LINEAR, "logits, own rows"), detached("input"), MISMATCH,
          (*BOTH, "gradient wanted", "gradient not wanted"), (ONE,)),
    Fault("a frozen embedding", EMBEDDINGS[1:], detached("weight"), MISMATCH, (*BOTH, "gradient"), (ONE,)),
    Fault("other targets", LOSSES[:2], put("target", 6), MISMATCH,
          ("different token ids", "rank 0", "data loader"), (ONE,)),
    Fault("other ids", EMBEDDINGS, put("input", 6), MISMATCH, ("different token ids", "rank 0", "data loader"), (ONE,)),
    Fault("another padding_idx", EMBEDDINGS, replace("padding_idx", 3), MISMATCH, (*BOTH, "padding_idx"), (ONE,)),
    Fault("another k", ("top_k",), replace("k", 3), MISMATCH, (*BOTH, "k=3", "k=4"), (ONE,)),
    Fault("all targets", LINEAR[1:], replace("target", torch.tensor(TARGET)), MISMATCH,
          ("sequence_parallel", "target 8"), (ONE,)),
    Fault("own rows", ("linear",), replace("sequence_parallel", True), MISMATCH, BOTH, (ONE,)),
    # a row with NaN, or with no finite logit
    Fault("NaN in a row", (*LOSSES, *SELECT), spoil(math.nan), FINITE, ("NaN", "uninitialised weight")),
    Fault("+inf in a row", ("cross_entropy",), spoil(math.inf), FINITE, ("+inf", "overflow")),
    Fault("a row of -inf", LOGITS, spoil(-math.inf), FINITE, ("-inf", "at least one"), (EVERY,)),
    # a weight with 0 rows
    Fault("a weight of shape [0]", LINEAR, edit("linear_weight", lambda x: x.new_empty(0)), UNGATHERED,
          ("[0]", *GATHER)),
    Fault("a weight of shape [0, 3]", LINEAR, edit("linear_weight", lambda x: x[:0]), UNGATHERED, ("[0, 3]", *GATHER)),
    Fault("an embedding of shape [0]", EMBEDDINGS, edit("weight", lambda x: x.new_empty(0)), UNGATHERED,
          ("[0]", *GATHER)),
    # options outside their range
    Fault("k = 0", ("top_k",), replace("k", 0), VALUE, ("k", "[1, 9]", "0")),
    Fault("a negative k", ("top_k",), replace("k", -1), VALUE, ("k", "[1, 9]", "-1")),
    Fault("k above the vocabulary", ("top_k",), replace("k", 10), VALUE, ("k", "[1, 9]", "10")),
    Fault("p = 0", ("top_p",), replace("p", 0.0), VALUE, ("p", "(0, 1]", "0.0")),
    Fault("p above 1", ("top_p",), replace("p", 1.5), VALUE, ("p", "(0, 1]", "1.5")),
    Fault("another p", ("top_p",), replace("p", 0.5), MISMATCH, ("different", "rank 0"), (ONE,)),
    Fault("a negative temperature", ("sample",), replace("temperature", -0.5), VALUE, ("temperature", "-0.5")),
    Fault("other parameters", ("sample",), replace("min_p", 0.2), MISMATCH, (*BOTH, "min_p"), (ONE,)),
    Fault("a fractional k", ("top_k",), replace("k", 2.5), VALUE, ("k", "integer", "2.5")),
    Fault("an unknown reduction", LOSSES, replace("reduction", "average"), VALUE, ("reduction", "average", '"mean"')),
    Fault("an unknown convention", LOSSES, replace("smoothing_over", "some"), VALUE,
          ("smoothing_over", "some", '"others"')),
    Fault("a negative smoothing", LOSSES, replace("label_smoothing", -0.1), VALUE,
          ("label_smoothing", "[0, 1]", "-0.1")),
    Fault("a smoothing above 1", LOSSES, replace("label_smoothing", 1.5), VALUE, ("label_smoothing", "[0, 1]", "1.5")),
    Fault("a NaN smoothing", LOSSES, replace("label_smoothing", math.nan), VALUE, ("label_smoothing", "[0, 1]", "nan")),
    Fault("a fractional ignore_index", LOSSES, replace("ignore_index", 0.5), VALUE, ("ignore_index", "integer", "0.5")),
    Fault("a chunk size of 0", LINEAR, replace("chunk_size", 0), VALUE, ("chunk_size", "at least 1", "0")),
    Fault("a fractional chunk size", LINEAR, replace("chunk_size", 2.5), VALUE, ("chunk_size", "integer", "2.5")),
    Fault("a padding_idx that is padding", EMBEDDINGS, replace("padding_idx", 9), TOKEN_RANGE,
          ("padding_idx 9", "[0, 9)")),
]
# fmt: on

Key = tuple[int, str, str]  # index into FAULTS, operation, where


def keys_of(index: int) -> list[Key]:
    return [(index, operation, where) for operation in FAULTS[index].operations for where in FAULTS[index].where]


def bad_rank(key: Key, world: int) -> int:
    """The rank that alone has a fault: the first one for some faults, the last for others."""
    return 0 if key[0] % 2 else world - 1


@functools.cache
def shard_of(world: int) -> VocabShard:
    """One shard for all faults of a process: each must leave it in order."""
    return VocabShard(VocabLayout.from_padded(V, PADDED, world), dist.group.WORLD)


def forward_and_backward(call: Callable[..., Tensor], arguments: Arguments, shard: VocabShard) -> Tensor:
    value = call(shard=shard, **arguments)
    if value.requires_grad:
        value.sum().backward()
    return value.detach()


def meet(rank: int, world: int, key: Key) -> dict[str, Any]:
    """The faulty call, then the right one on the same shard: how far its value is off."""
    index, operation, where = key
    shard, right = shard_of(world), OPERATIONS[operation]
    arguments = right.arguments(shard)
    if where == EVERY or rank == bad_rank(key, world):
        arguments |= FAULTS[index].change(arguments, shard)
    met = attempt(lambda: forward_and_backward(right.call, arguments, shard))
    value = forward_and_backward(right.call, right.arguments(shard), shard)
    difference = (value.double() - right.value(shard).double()).abs()
    return {"met": met, "off": difference.max().item() if difference.numel() else 0.0}


@functools.cache
def meetings(world: int) -> dict[Key, Any]:
    """All faults on one set of ranks: on two as a user has them, on three with every collective checked by PyTorch."""
    keys = [key for index in range(len(FAULTS)) for key in keys_of(index)]
    return run_batch(meet, world, keys, timeout=40, detail=False)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("index", [pytest.param(i, id=fault.name) for i, fault in enumerate(FAULTS)])
def test_a_fault_is_the_same_error_on_every_rank_and_the_group_works_afterwards(index: int, world: int) -> None:
    for key in keys_of(index):
        fault, (_, operation, where) = FAULTS[index], key
        what = f"{fault.name}, {operation}, {where}"
        found = meetings(world)[key]
        assert not isinstance(found, str), f"{what}: {found}"
        words = list(fault.words)
        if where == ONE and not (fault.errors == FINITE and operation == "linear, own rows"):  # there the row says it
            words.append(f"rank {bad_rank(key, world)}")
        assert_all_raise(what, [one["met"] for one in found], fault.errors.split(), words)
        if fault.errors == FINITE:
            assert any(has_word(found[0]["met"].message, f"row {row}") for row in spoiled_rows(key, world)), found[0]
        assert max(one["off"] for one in found) < 1e-5, f"{what}: the right call afterwards gives a wrong value"


def spoiled_rows(key: Key, world: int) -> list[int]:
    """Rows of the group that `spoil` has written to."""
    _, operation, where = key
    if operation != "linear, own rows":
        return [T - 1]
    share = math.ceil(T / world)
    last = [min((rank + 1) * share, T) - 1 for rank in range(world)]
    return last if where == EVERY else [last[bad_rank(key, world)]]


# --- what looks bad and is not ----------------------------------------------------------------------------------------


def harmless(rank: int, world: int, name: str) -> dict[str, Any]:
    """Losses, and whether gradients are finite, where some logits are not."""
    shard = shard_of(world)
    ignored = TARGET.index(-100)
    seen = {}
    for operation in LOSSES:
        right = OPERATIONS[operation]
        arguments = right.arguments(shard)
        row = ignored - (rows_of(shard).start if operation == "linear, own rows" else 0)
        if name == "one shard all -inf":
            if operation == "cross_entropy" and rank == world - 1:  # it holds the target of two rows
                arguments |= edit("logits", lambda x: x.fill_(-math.inf))(arguments, shard)
                arguments["target"] = torch.tensor([target % 4 if target >= 0 else target for target in TARGET])
            elif operation == "cross_entropy":
                arguments["target"] = torch.tensor([target % 4 if target >= 0 else target for target in TARGET])
            else:
                continue
        else:
            hit = "logits" if operation == "cross_entropy" else "input"
            if 0 <= row < len(arguments[hit]):
                arguments |= put(hit, float(name.split()[0]), row)(arguments, shard)
        loss = right.call(shard=shard, **arguments)
        loss.backward()
        leaves = [x for x in arguments.values() if isinstance(x, Tensor) and x.requires_grad]
        seen[operation] = {"loss": loss.detach(), "finite": all(bool(x.grad.isfinite().all()) for x in leaves)}
        if row in range(len(leaves[0])) and name != "one shard all -inf":
            seen[operation]["ignored row"] = leaves[0].grad[row]
    return seen


HARMLESS = ["nan in an ignored row", "inf in an ignored row", "-inf in an ignored row", "one shard all -inf"]


@functools.cache
def harmless_runs(world: int) -> dict[str, Any]:
    return run_batch(harmless, world, HARMLESS, timeout=40, detail=False)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", HARMLESS)
def test_logits_that_are_not_finite_do_no_harm_where_they_do_not_count(name: str, world: int) -> None:
    seen = harmless_runs(world)[name]
    assert not isinstance(seen, str), seen
    logits, target = whole_tables()[3], torch.tensor(TARGET)
    if name == "one shard all -inf":
        logits[:, (world - 1) * PADDED // world :] = -math.inf
        target = torch.where(target >= 0, target % 4, target)
    wanted = torch.nn.functional.cross_entropy(logits, target)
    for one in seen:
        for operation, result in one.items():
            torch.testing.assert_close(result["loss"], wanted, msg=lambda text, at=operation: f"{name}, {at}: {text}")
            assert result["finite"], f"{name}, {operation}: a gradient is not finite"
            assert not result.get("ignored row", torch.zeros(1)).any(), f"{name}, {operation}: the ignored row learns"


# --- layouts ----------------------------------------------------------------------------------------------------------

# name -> the layout (vocab_size, padded_size, tp_size) of a rank, and words of the error
LAYOUTS: dict[str, tuple[Callable[[int, int], tuple[int, int, int]], tuple[str, ...]]] = {
    "another vocabulary on one rank": (
        lambda rank, world: (9 - (rank == 1), 12, world),
        ("rank 0: V=9", "rank 1: V=8"),
    ),
    "another padding on one rank": (
        lambda rank, world: (9, 12 * (1 + (rank == 1)), world),
        ("padded to 12", "padded to 24"),
    ),
    "another TP size on one rank": (lambda rank, world: (9, 12, world - (rank == 1)), ("rank 1: V=9", "tp_size")),
    "a group of another size": (lambda rank, world: (9, 12, 4), ("tp_size 4", "group")),
    "a group above TP size 1": (lambda rank, world: (9, 12, 1), ("tp_size 1", "group")),
}


def bind(rank: int, world: int, name: str) -> dict[str, Any]:
    vocab, padded, tp = LAYOUTS[name][0](rank, world)
    layout = VocabLayout.from_padded(vocab, padded, tp)
    met = attempt(lambda: VocabShard(layout, dist.group.WORLD))
    shard = VocabShard(VocabLayout.from_padded(V, PADDED, world), dist.group.WORLD)
    return {"met": met, "ids": greedy(local(whole_tables()[3], 1, shard), shard=shard)}


@functools.cache
def bindings(world: int) -> dict[str, Any]:
    return run_batch(bind, world, list(LAYOUTS), timeout=40, detail=False)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_layout_that_does_not_fit_is_refused_on_every_rank_and_the_right_one_works_then(
    name: str, world: int
) -> None:
    found = bindings(world)[name]
    assert not isinstance(found, str), found
    assert_all_raise(name, [one["met"] for one in found], [MISMATCH], [*LAYOUTS[name][1], "config"])
    assert all(one["ids"].tolist() == whole_tables()[3].argmax(-1).tolist() for one in found)


def test_without_a_group_more_than_one_rank_is_refused_with_the_fix() -> None:
    met = attempt(lambda: VocabShard(VocabLayout(V, 2)))
    assert_all_raise("no group", [met], [MISMATCH], ["2 ranks", "VocabShard(layout, group)"])
