"""`linear_row_loss`: a caller's function of each row, in three GEMMs, and what happens when that function misbehaves.

`test_loss_options.py` and `test_loss_drawn.py` have one function with all options; here are the functions.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.batch import assert_all_raise, attempt
from tests.multirank.counting import collectives
from tests.multirank.sharded import TP, Case, call, local, shard_of, whole
from tests.multirank.shared_world import Batch
from tests.tolerances import require_close, require_equal
from vocab_parallel import VocabLayout, VocabShard, loss, reference

# Row losses. Each gets the row's statistics, and of the row data what it names.


def ppo(rows: Any, old: Tensor, advantage: Tensor) -> Tensor:
    ratio = (rows.logprob - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) - 0.01 * rows.entropy


def grpo(rows: Any, old: Tensor, advantage: Tensor, reference_logprob: Tensor) -> Tensor:
    """Clipped, plus the estimator `r - log r - 1` of the divergence from a reference policy."""
    ratio, away = (rows.logprob - old).exp(), reference_logprob - rows.logprob
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    return -gain + 0.04 * (away.exp() - away - 1)


def reinforce(rows: Any, advantage: Tensor) -> Tensor:
    return -advantage * rows.logprob


def entropy_bonus(rows: Any) -> Tensor:
    return -rows.entropy


def focal(rows: Any) -> Tensor:
    """Not linear in anything: `(1 - p)² (-log p)`, with a penalty on lse."""
    return (1 - rows.logprob.exp()).square() * -rows.logprob + 0.1 * rows.lse.square()


def lse_only(rows: Any) -> Tensor:
    return rows.lse**2


def everything(rows: Any, old: Tensor, advantage: Tensor) -> Tensor:
    return ppo(rows, old, advantage) + 0.05 * rows.lse**2 + rows.entropy.square()


def constant(rows: Any, advantage: Tensor) -> Tensor:
    return advantage * 2


def by_class(rows: Any, features: Tensor, kind: Tensor, choice: Tensor) -> Tensor:
    """Row data of several columns, of integers and of booleans."""
    weight = features.to(rows.logprob.dtype).sum(1) + (features[:, 0] > 0)
    return torch.where(choice, weight * rows.logprob, kind.to(rows.logprob.dtype) * rows.entropy)


def not_quite_a_row(rows: Any) -> Tensor:
    """NaN, and gradients of NaN, in rows whose log-probability is 0: the ignored ones."""
    return rows.logprob.neg().sqrt() / rows.logprob.neg().sqrt() * rows.logprob - rows.entropy


DATA = {
    ppo: ("old", "advantage"),
    grpo: ("old", "advantage", "reference_logprob"),
    reinforce: ("advantage",),
    entropy_bonus: (),
    focal: (),
    lse_only: (),
    everything: ("old", "advantage"),
    constant: ("advantage",),
    by_class: ("features", "kind", "choice"),
    not_quite_a_row: (),
}
BLIND = (grpo, reinforce, focal, lse_only, constant)  # that do not read the entropy


@dataclass(frozen=True)
class Row:
    """A case with a row loss. `same_as_logprobs` can only be asked of what does not read lse."""

    fn: Any
    case: Case
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        return f"{self.fn.__name__}, {self.case.name}".replace(" ", "_")


def row_data(case: Case) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(case.seed + 1)
    dtype = torch.promote_types(case.dtype, torch.float32)
    rows = case.leading
    return {
        "old": (torch.randn(rows, generator=draw, dtype=torch.float64) - 2).to(dtype),
        "advantage": torch.randn(rows, generator=draw, dtype=torch.float64).to(dtype),
        "reference_logprob": (torch.randn(rows, generator=draw, dtype=torch.float64) - 2).to(dtype),
        "features": torch.randint(-3, 4, (*rows, 3), generator=draw, dtype=torch.int32),
        "kind": torch.randint(0, 3, rows, generator=draw),
        "choice": torch.rand(rows, generator=draw) < 0.5,
    }


def wholes(row: Row) -> dict[str, Tensor]:
    return whole(row.case) | {name: tensor for name, tensor in row_data(row.case).items() if name in DATA[row.fn]}


def own(row: Row, tensors: dict[str, Tensor], shard: VocabShard) -> dict[str, Tensor]:
    """This rank's parts."""
    mine = local(row.case, tensors, shard)
    rows = row.case.rows(shard.tp_size)
    if rows and row.case.target_local:
        start = sum(rows[: shard.rank])
        for name in DATA[row.fn]:
            mine[name] = tensors[name][start : start + rows[shard.rank]]
    for name in row.case.names:
        mine[name].requires_grad_(name not in row.case.frozen)
    return mine


def fused(row: Row, mine: dict[str, Tensor], shard: VocabShard, **settings: Any) -> Tensor:
    case = row.case
    return loss.linear_row_loss(
        mine["input"], mine["weight"], mine["target"], row.fn, *(mine[name] for name in DATA[row.fn]), shard=shard,
        linear_bias=mine.get("bias"), chunk_size=case.chunk_size, sequence_parallel=case.spread is not None,
        **case.options | row.settings | settings,
    )  # fmt: skip


def of_logprobs(row: Row, mine: dict[str, Tensor], shard: VocabShard) -> Tensor:
    """The row losses by autograd through `linear_token_logprobs`: 4 GEMMs, and everything kept."""
    case = row.case
    options = {name: value for name, value in case.options.items() if name != "reduction"}
    logprob, entropy = loss.linear_token_logprobs(
        mine["input"], mine["weight"], mine["target"], shard=shard, linear_bias=mine.get("bias"),
        chunk_size=case.chunk_size, sequence_parallel=case.spread is not None, **options,
    )  # fmt: skip
    flat = loss.RowStatistics(logprob.flatten(), entropy.flatten(), torch.zeros_like(logprob.flatten()))
    data = [mine[name].reshape(-1, *mine[name].shape[logprob.dim() :]) for name in DATA[row.fn]]
    rows = row.fn(flat, *data).view(logprob.shape)
    return reference.reduce(rows, case.options.get("reduction", "mean"), mine["target"] != -100)


def _run(rank: int, row: Row) -> dict[str, Any]:
    case = row.case
    shard = shard_of(case.vocab, case.multiple_of)
    mine = own(row, wholes(row), shard)
    before = {name: tensor.detach().clone() for name, tensor in mine.items()}
    with torch.no_grad():
        silent = fused(row, mine, shard)
    value = fused(row, mine, shard)
    require_equal("without grad", [value.detach(), silent])
    names = [name for name in case.names if name not in case.frozen]
    trained = [mine[name] for name in names]
    upstream = mine["upstream"].to(value.dtype)
    found = {"loss": value.detach()}
    if trained:
        gradients = torch.autograd.grad(value, trained, upstream, retain_graph=True)
        again = torch.autograd.grad(value, trained, upstream)
        for name, one, other in zip(names, gradients, again, strict=True):
            require_equal(f"second backward, d_{name}", [one, other])
            found[f"d_{name}"] = one if name == "input" else one[: shard.num_valid]
            assert bool((one[shard.num_valid :] == 0).all()) or name == "input", f"padding of {name} has a gradient"
    if "lse" not in row.fn.__code__.co_names and case.dtype == torch.float64 and not case.spread:
        other = of_logprobs(row, mine, shard)
        require_close("loss of logprobs", value.detach(), other.detach(), case.dtype)
        for name, one in zip(names, torch.autograd.grad(other, trained, upstream), strict=True):
            got = found[f"d_{name}"]
            require_close(f"d_{name} of logprobs", got, one if name == "input" else one[: len(got)], case.dtype)
    for name, tensor in before.items():
        require_equal(f"{name} afterwards", [tensor, mine[name].detach()])
    return found


def expected(row: Row) -> dict[str, Tensor]:
    case = row.case
    tensors = {name: t.double() if t.is_floating_point() else t for name, t in wholes(row).items()}
    for name in case.names:
        tensors[name].requires_grad_(name not in case.frozen)
    logits = reference.logits(tensors["input"], tensors["weight"], tensors.get("bias")).flatten(0, -2)
    ids = tensors["target"].flatten()
    data = [tensors[name].reshape(ids.numel(), *tensors[name].shape[len(case.leading) :]) for name in DATA[row.fn]]
    value = reference.row_loss(logits, ids, row.fn, *data, **case.options)
    value = value.view(case.leading) if value.dim() else value
    names = [name for name in case.names if name not in case.frozen]
    gradients = torch.autograd.grad(value, [tensors[name] for name in names], tensors["upstream"], allow_unused=True)
    # A row loss of ignored rows may give NaN to autograd through the oracle too: the oracle's rows are then left out.
    return {"loss": value.detach()} | {f"d_{name}": g for name, g in zip(names, gradients, strict=True)}


SETTINGS = {
    "mean": {},
    "sum, chunks": {"chunk_size": 3, "bias": True, "options": {"reduction": "sum"}},
    "none, chunks": {"chunk_size": 3, "bias": True, "options": {"reduction": "none", "temperature": 0.7}},
}
FUNCTIONS = [
    Row(fn, Case(name, function="row_loss", **settings), {"entropy": False} if blind else {})
    for fn, (name, settings) in product(DATA, SETTINGS.items())
    if fn is not not_quite_a_row
    for blind in ([False, True] if fn in BLIND else [False])
]
FURTHER = [
    Row(fn, Case(name, function="row_loss", **settings), {"entropy": False} if fn in BLIND else {})
    for fn in (grpo, everything, by_class)
    for name, settings in {
        "softcap": {"chunk_size": 3, "options": {"softcap": 1.5, "temperature": 0.7}},
        "float32, chunks": {"chunk_size": 2, "dtype": torch.float32, "bias": True, "leading": (12,)},
        "bfloat16": {"dtype": torch.bfloat16, "leading": (24,), "chunk_size": 10, "bias": True},
        "leading [s, b]": {"leading": (3, 2), "chunk_size": 4, "options": {"reduction": "none"}},
        "no rows": {"leading": (0,)},
        "all ignored": {"ignored": "all", "chunk_size": 2},
        "13 of 16 ids": {"vocab": 13, "multiple_of": 4},
        "one id": {"vocab": 1, "multiple_of": 2},
        "shards at -inf": {"bias": True, "masked": tuple(range(3, 9))},
        "frozen input": {"frozen": ("input",)},
        "frozen weight": {"frozen": ("weight", "bias"), "bias": True, "options": {"reduction": "none"}},
    }.items()
]
SPREAD = [
    Row(
        fn,
        Case(
            f"{spread}, {'local' if target_local else 'all'} targets, {reduction}",
            function="row_loss", spread=spread, target_local=target_local, chunk_size=chunk_size, leading=leading,
            bias=True, options={"reduction": reduction},
        ),
    )
    for fn in (everything, by_class)
    for spread in ("uneven", "last has none", "only last has any")
    for target_local, reduction, chunk_size, leading in [
        (True, "mean", 3, (7,)), (False, "sum", None, (7,)), (True, "none", 3, (7,)), (False, "none", 5, (5, 2)),
    ]
]  # fmt: skip
ALL = Batch(_run, [(row,) for row in [*FUNCTIONS, *FURTHER, *SPREAD]])


@TP
@pytest.mark.parametrize("row", [row for (row,) in ALL.cases], ids=repr)
def test_a_row_loss_equals_the_oracle_and_autograd_through_log_probabilities(row, tp):
    ranks, case = ALL(tp, row), row.case
    for key, wanted in expected(row).items():
        parts = [rank[key] for rank in ranks]
        by_rows = case.spread is not None and (key == "d_input" or (key == "loss" and case.target_local))
        if key in ("d_weight", "d_bias") or (by_rows and parts[0].dim()):
            got = torch.cat(parts)
        else:
            require_equal(key, parts)
            got = parts[0]
        wanted = torch.zeros_like(got) if wanted is None else wanted
        require_close(key, got, wanted, case.dtype)


def _nan_of_ignored_rows(rank: int, linear: dict[str, Any], settings: dict[str, Any]) -> list[dict[str, Tensor]]:
    """A row loss that is NaN in ignored rows, whose hidden states may be NaN too, and one that looks away."""
    row = Row(not_quite_a_row, Case("", function="row_loss", bias=True, **linear), settings)
    shard = shard_of(row.case.vocab)
    every = []
    for filling in (None, torch.nan, torch.inf):
        tensors = wholes(row)
        if filling is not None:
            tensors["input"][tensors["target"] == -100] = filling
        mine = own(row, tensors, shard)
        value = fused(row, mine, shard)
        gradients = torch.autograd.grad(value, [mine[name] for name in row.case.names], mine["upstream"])
        real = [x if name == "input" else x[: shard.num_valid] for name, x in zip(row.case.names, gradients, strict=True)]
        assert value.isfinite().all() and all(x.isfinite().all() for x in real)
        ignored = mine["target"] == -100
        assert not value.dim() or (value[ignored] == 0).all()
        assert (real[0][ignored[: len(real[0])]] == 0).all() or row.case.spread
        every.append(dict(zip(["loss", *row.case.names], [value.detach(), *real], strict=True)))
    return every


IGNORED = Batch(
    _nan_of_ignored_rows,
    [
        (linear, settings)
        for linear in (
            {"chunk_size": 3},
            {"chunk_size": 3, "options": {"reduction": "none"}},
            {"spread": "uneven", "chunk_size": 3, "options": {"reduction": "sum"}},
        )
        for settings in ({}, {"outputs": None})
    ],
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("index", range(0, 6, 2))
def test_nan_of_the_function_in_ignored_rows_reaches_nothing(index, tp):
    linear, settings = IGNORED.cases[index]
    row = Row(not_quite_a_row, Case("", function="row_loss", bias=True, **linear))
    tensors = {name: t.clone() for name, t in wholes(row).items()}
    kept = tensors["target"] != -100
    inputs = [tensors[name].requires_grad_() for name in row.case.names]
    logits = reference.logits(tensors["input"][kept], *inputs[1:])
    rows = not_quite_a_row(reference.row_outputs(logits, tensors["target"][kept]))
    reduction = linear.get("options", {}).get("reduction", "mean")
    upstream = tensors["upstream"][kept] if reduction == "none" else tensors["upstream"]
    value = reference.reduce(rows, reduction, torch.ones_like(rows, dtype=torch.bool))
    gradients = torch.autograd.grad(value, inputs, upstream)
    ranks = IGNORED(tp, linear, settings)
    for rank in ranks:
        for key in rank[0]:
            require_equal(key, [filling[key] for filling in rank])
    got = [torch.cat([rank[0][name] for rank in ranks]) for name in row.case.names[1:]]
    for name, one, other in zip(row.case.names[1:], got, gradients[1:], strict=True):
        require_close(name, one, other, torch.float64)
    if reduction != "none":
        require_close("loss", ranks[0][0]["loss"], value.detach(), torch.float64)


def _entropy_given(rank: int) -> None:
    given = []

    def fn(rows: Any) -> Tensor:
        given.append(rows)
        return rows.logprob

    case = Case("", function="row_loss", chunk_size=3)
    shard = shard_of(9)
    mine = local(case, whole(case), shard)
    for entropy in (True, False):
        loss.linear_row_loss(
            mine["input"], mine["weight"], mine["target"], fn, shard=shard, entropy=entropy, chunk_size=3
        )
    assert all(isinstance(rows, loss.RowStatistics) for rows in given)
    assert [len(rows.logprob) for rows in given] == [3, 3, 1] * 2
    assert [rows.entropy is None for rows in given] == [False] * 3 + [True] * 3
    for rows, other in zip(given[:3], given[3:], strict=True):
        require_equal("logprob", [rows.logprob.detach(), other.logprob.detach()])
        require_equal("lse", [rows.lse.detach(), other.lse.detach()])


def _outputs(rank: int) -> dict[str, Tensor]:
    """A collector rides along; after an error in the second chunk it holds the rows of the next call only."""
    case = Case("", function="row_loss", chunk_size=3)
    shard = shard_of(9)
    mine = local(case, whole(case), shard)
    collector = loss.RowOutputs("logprob", "entropy", "correct")

    def run(fn: Any) -> Tensor:
        return loss.linear_row_loss(
            mine["input"], mine["weight"], mine["target"], fn, shard=shard, outputs=collector, entropy=False,
            chunk_size=3,
        )  # fmt: skip

    calls = []

    def late(rows: Any) -> Tensor:
        calls.append(rows)
        if len(calls) == 2:
            raise RuntimeError("in the second chunk")
        return rows.logprob

    attempt(lambda: run(late))
    run(lambda rows: rows.lse)
    rows = reference.row_outputs(reference.logits(*(whole(case)[name] for name in case.names)), mine["target"])
    for name in ("logprob", "entropy"):
        require_close(name, getattr(collector, name), getattr(rows, name), torch.float64)
    require_equal("correct", [collector.correct, rows.correct])


@pytest.mark.parametrize("tp", [1, 2])
def test_the_entropy_is_none_where_it_is_not_asked_for(tp):
    SMALL[0](tp)


@pytest.mark.parametrize("tp", [1, 2])
def test_outputs_ride_along_and_forget_a_call_that_failed(tp):
    SMALL[1](tp)


# Cost.


class Products(TorchDispatchMode):
    """Counts the products of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "_scaled_mm")
        return func(*args, **(kwargs or {}))


def _cost(rank: int, function: str, dtype: torch.dtype, settings: dict[str, Any]) -> tuple[Any, ...]:
    """GEMMs, collectives and bytes of forward and backward over 3 chunks of 7 rows."""
    case = Case("", function=function, chunk_size=3, dtype=dtype, bias=True)
    options = {name: value for name, value in settings.items() if name == "reduction"}
    case = replace(case, options=options, execution={"entropy": False} if "entropy" in settings else {})
    shard = shard_of(9)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    call(case, mine, shard)  # tells the ranks the size
    shard.traffic.reset()
    with Products() as products, collectives() as (calls, sent):
        value = call(case, mine, shard)
        forward = dict(calls), sent["all_gather"]
        calls.clear()
        value.sum().backward()
    assert shard.traffic.bytes["all_gather"] == forward[1]
    return products.count, *forward, dict(calls)


COST = [
    # function, settings, GEMMs a chunk, forward: exchanges and reductions, backward: reductions
    ("row_loss", {}, 3, 3, 0),
    ("row_loss", {"entropy": False}, 3, 3, 0),
    ("row_loss", {"reduction": "sum"}, 3, 3, 0),
    ("row_loss", {"reduction": "none"}, 4, 0, 3),
    ("token_logprobs", {}, 4, 0, 3),
    ("cross_entropy", {}, 3, 3, 0),
]
COSTS = Batch(_cost, [(one[0], dtype, one[1]) for one in COST for dtype in (torch.float32, torch.bfloat16)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("one", COST, ids=str)
def test_three_gemms_and_one_exchange_a_chunk(one, dtype):
    function, settings, gemms, forward, backward = one
    for count, calls, _, later in COSTS(2, function, dtype, settings):
        assert count == 3 * gemms
        header = function == "row_loss"  # at the end: an error of the function in the last chunk
        assert calls == {"all_gather": 3 + header} | ({"all_reduce": forward} if forward else {})
        assert later == ({"all_reduce": backward} if backward else {})


def _bytes(rank: int, entropy: bool) -> int:
    shard = shard_of(9)
    rows = 5000  # above what an exchange has room for while nothing is known
    input, weight, target = torch.randn(rows, 4), torch.randn(shard.shard_size, 4), torch.arange(rows) % 9
    for _ in range(2):
        shard.traffic.reset()
        loss.linear_row_loss(input, weight, target, reinforce, target.float(), shard=shard, entropy=entropy, chunk_size=rows)
    return shard.traffic.bytes["all_gather"]


# Bad functions and row data.


class Unheard(Exception):
    """Of a class that other ranks cannot name."""


def _misbehave(rank: int, fault: str, where: str, settings: dict[str, Any]) -> Any:
    """The function fails in one chunk, on one rank or on all; and then the group goes on."""
    case = Case("", function="row_loss", ignored="none", **settings)
    shard = shard_of(9)
    row = Row(ppo, case)
    mine = own(row, wholes(row), shard)
    chunks = []

    def fn(rows: Any, *data: Tensor) -> Any:
        chunks.append(rows)
        wanted = {"first": 1, "second": 2, "last": 3}[where.split()[0]]
        if len(chunks) == wanted and ("everywhere" in where or rank == shard.tp_size - 1):
            return FAULTS[fault](ppo(rows, *data))
        return ppo(rows, *data)

    met = attempt(lambda: fused(Row(ppo, case), mine, shard) if fault == "" else fused_with(fn, case, mine, shard))
    after = fused(row, mine, shard)
    after.sum().backward()
    return met, after.detach(), mine["weight"].grad[: shard.num_valid]


def fused_with(fn: Any, case: Case, mine: dict[str, Tensor], shard: VocabShard) -> Tensor:
    return loss.linear_row_loss(
        mine["input"], mine["weight"], mine["target"], fn, mine["old"], mine["advantage"], shard=shard,
        chunk_size=case.chunk_size, sequence_parallel=case.spread is not None, **case.options,
    )  # fmt: skip


def _raise(error: Exception) -> Any:
    raise error


FAULTS = {
    "raises": lambda rows: _raise(ValueError("the reward model said no")),
    "raises its own": lambda rows: _raise(Unheard("the reward model said no")),
    "a column": lambda rows: rows[:, None],
    "a mean": lambda rows: rows.mean(),
    "nothing": lambda rows: None,
    "a list": lambda rows: rows.tolist(),
    "a row less": lambda rows: rows[:-1],
}
KINDS = {"raises": ["ValueError"], "raises its own": ["VocabParallelError"]}
BAD_WORDS = {
    "raises": ["the reward model said no"],
    "raises its own": ["the reward model said no", "Unheard"],
    "a column": ["row loss", "[3]", "[3, 1]"],
    "a mean": ["row loss", "[3]", "[]"],
    "nothing": ["row loss", "NoneType"],
    "a list": ["row loss", "list"],
    "a row less": ["row loss", "[3]", "[2]"],
}
PLACES = [f"{chunk} chunk, {who}" for chunk in ("first", "second", "last") for who in ("one rank", "everywhere")]
SHAPES = {
    "mean": {"leading": (9,), "chunk_size": 3},
    "none": {"leading": (9,), "chunk_size": 3, "options": {"reduction": "none"}},
    "spread": {"leading": (9,), "chunk_size": 3, "spread": "uneven", "options": {"reduction": "sum"}},
}
MISBEHAVE = Batch(
    _misbehave,
    [(fault, where, SHAPES[shape]) for fault in ("raises", "a column") for where in PLACES for shape in SHAPES]
    + [(fault, "second chunk, one rank", SHAPES["mean"]) for fault in FAULTS],
)


@pytest.mark.parametrize("case", MISBEHAVE.cases, ids=lambda case: f"{case[0]}, {case[1]}, {case[2]}")
def test_a_function_that_fails_on_one_rank_or_on_all_is_one_error_on_every_rank(case):
    fault, where, settings = case
    if settings.get("spread"):
        pytest.importorskip("torch")
    ranks = MISBEHAVE(2, *case)
    words = BAD_WORDS[fault] if not settings.get("spread") else BAD_WORDS[fault][:1]
    mets = [met for met, _, _ in ranks]
    if fault == "raises its own":
        assert [met.kind for met in mets] == ["VocabParallelError"] * 2 and mets[0].message == mets[1].message
        assert all(word in mets[0].message for word in words)
    else:
        assert_all_raise(f"{fault} in {where}", mets, KINDS.get(fault, ["LayoutMismatchError"]), words)
    row = Row(ppo, Case("", function="row_loss", ignored="none", **settings))
    wanted = expected(replace(row, case=replace(row.case, upstream_one=True)))
    value = torch.cat([after for _, after, _ in ranks]) if ranks[0][1].dim() and settings.get("spread") else ranks[0][1]
    require_close("the call afterwards", value, wanted["loss"], torch.float64)
    require_close("its gradient", torch.cat([gradient for _, _, gradient in ranks]), wanted["d_weight"], torch.float64)
