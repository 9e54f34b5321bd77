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
from tests.multirank.sharded import Case, call, local, shard_of, whole
from tests.multirank.shared_world import Batch, two_sizes
from tests.tolerances import require_close, require_equal
from vocab_parallel import VocabLayout, VocabShard, loss, reference

# Row losses. Each gets the row's statistics, and the row data that `DATA` names.


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
    """`(1 - p)² (-log p)`, with a penalty on lse."""
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


def nan_if_ignored(rows: Any) -> Tensor:
    """Twice log p plus the entropy; NaN with gradients of NaN where log p is 0, as it is in ignored rows."""
    root = rows.logprob.neg().sqrt()
    return rows.logprob + rows.logprob * (root / root) + rows.entropy


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
    nan_if_ignored: (),
}
BLIND = (grpo, reinforce, focal, lse_only, constant)  # that do not read the entropy
READ_LSE = (focal, lse_only, everything)


@dataclass(frozen=True, repr=False)
class Row:
    """A case with a row loss, and arguments that only a row loss has."""

    fn: Any
    case: Case
    settings: dict[str, Any] = field(default_factory=dict)

    def __repr__(self) -> str:
        words = [self.fn.__name__, self.case.name, *(f"{name}={value}" for name, value in self.settings.items())]
        return ", ".join(word for word in words if word).replace(" ", "_")

    @property
    def reduction(self) -> str:
        reduction: str = self.case.options.get("reduction", "mean")
        return reduction


def wholes(row: Row) -> dict[str, Tensor]:
    """The whole tensors of the case, and the row data of the function."""
    draw = torch.Generator().manual_seed(row.case.seed + 1)
    dtype, rows = torch.promote_types(row.case.dtype, torch.float32), row.case.leading
    data = {
        "old": (torch.randn(rows, generator=draw, dtype=torch.float64) - 2).to(dtype),
        "advantage": torch.randn(rows, generator=draw, dtype=torch.float64).to(dtype),
        "reference_logprob": (torch.randn(rows, generator=draw, dtype=torch.float64) - 2).to(dtype),
        "features": torch.randint(-3, 4, (*rows, 3), generator=draw, dtype=torch.int32),
        "kind": torch.randint(0, 3, rows, generator=draw),
        "choice": torch.rand(rows, generator=draw) < 0.5,
    }
    return whole(row.case) | {name: data[name] for name in DATA[row.fn]}


def own(row: Row, tensors: dict[str, Tensor], shard: VocabShard) -> dict[str, Tensor]:
    """This rank's parts, of which those that train require a gradient."""
    mine = local(row.case, tensors, shard)
    rows = row.case.rows(shard.tp_size)
    if rows and row.case.target_local:
        start = sum(rows[: shard.rank])
        mine |= {name: tensors[name][start : start + rows[shard.rank]] for name in DATA[row.fn]}
    for name in trained(row):
        mine[name].requires_grad_()
    return mine


def trained(row: Row) -> list[str]:
    return [name for name in row.case.names if name not in row.case.frozen]


def run(row: Row, mine: dict[str, Tensor], shard: VocabShard, fn: Any = None, **settings: Any) -> Tensor:
    """The row loss of this rank's tensors, of `fn` instead of the row's where given."""
    case = row.case
    return loss.linear_row_loss(
        mine["input"], mine["weight"], mine["target"], fn or row.fn, *(mine[name] for name in DATA[row.fn]),
        shard=shard, linear_bias=mine.get("bias"), chunk_size=case.chunk_size,
        sequence_parallel=case.spread is not None, **case.options | row.settings | settings,
    )  # fmt: skip


def gradients(row: Row, value: Tensor, mine: dict[str, Tensor], shard: VocabShard) -> dict[str, Tensor]:
    """By name, those of the vocabulary without padding, which has none."""
    names = trained(row)
    found = torch.autograd.grad(
        value, [mine[name] for name in names], mine["upstream"].to(value.dtype), retain_graph=True
    )
    for name, gradient in zip(names, found, strict=True):
        assert name == "input" or bool((gradient[shard.num_valid :] == 0).all()), f"padding of {name} has a gradient"
    return {f"d_{n}": g if n == "input" else g[: shard.num_valid] for n, g in zip(names, found, strict=True)}


def through_logprobs(row: Row, mine: dict[str, Tensor], shard: VocabShard) -> Tensor:
    """The same by autograd through `linear_token_logprobs`: 4 GEMMs."""
    case = row.case
    options = {name: value for name, value in case.options.items() if name != "reduction"}
    logprob, entropy = loss.linear_token_logprobs(
        mine["input"], mine["weight"], mine["target"], shard=shard, linear_bias=mine.get("bias"),
        chunk_size=case.chunk_size, **options,
    )  # fmt: skip
    statistics = loss.RowStatistics(logprob.flatten(), entropy.flatten(), torch.empty(0))
    data = [mine[name].flatten(0, logprob.dim() - 1) for name in DATA[row.fn]]
    rows = row.fn(statistics, *data).view(logprob.shape)
    return reference.reduce(rows, row.reduction, mine["target"] != -100)


def _run(rank: int, row: Row) -> dict[str, Tensor]:
    case, shard = row.case, shard_of(row.case.vocab, row.case.multiple_of)
    mine = own(row, wholes(row), shard)
    before = {name: tensor.detach().clone() for name, tensor in mine.items()}
    with torch.no_grad():
        silent = run(row, mine, shard)
    value = run(row, mine, shard)
    require_equal("without grad", [value.detach(), silent])
    found, again = (gradients(row, value, mine, shard) for _ in range(2))
    for name, gradient in found.items():
        require_equal(f"second backward, {name}", [gradient, again[name]])
    if row.fn not in (*READ_LSE, constant) and case.dtype == torch.float64 and not case.spread:
        other = through_logprobs(row, mine, shard)
        require_close("loss through log-probabilities", value.detach(), other.detach(), case.dtype)
        for name, gradient in gradients(row, other, mine, shard).items():
            require_close(f"{name} through log-probabilities", found[name], gradient, case.dtype)
    for name, tensor in before.items():
        require_equal(f"{name} afterwards", [tensor, mine[name].detach()])
    return {"loss": value.detach(), **found}


def expected(row: Row) -> dict[str, Tensor]:
    """The oracle's, in float64."""
    tensors = {name: x.double() if x.is_floating_point() else x for name, x in wholes(row).items()}
    inputs = [tensors[name].requires_grad_() for name in trained(row)]
    target, dims = tensors["target"], tensors["target"].dim()
    logits = reference.logits(tensors["input"], tensors["weight"], tensors.get("bias")).flatten(0, dims - 1)
    data = [tensors[name].flatten(0, dims - 1) for name in DATA[row.fn]]
    value = reference.row_loss(logits, target.flatten(), row.fn, *data, **row.case.options)
    value = value.view(target.shape) if row.reduction == "none" else value
    found: Any = [None] * len(inputs)
    if value.requires_grad:
        found = torch.autograd.grad(value, inputs, tensors["upstream"], allow_unused=True)
    of = {f"d_{name}": gradient for name, gradient in zip(trained(row), found, strict=True)}
    zeros = {f"d_{name}": torch.zeros_like(x) for name, x in zip(trained(row), inputs, strict=True)}
    return {"loss": value.detach()} | {name: zeros[name] if x is None else x for name, x in of.items()}


def require_oracle(row: Row, ranks: list[dict[str, Tensor]]) -> None:
    for key, wanted in expected(row).items():
        parts = [rank[key] for rank in ranks]
        own_rows = row.case.spread and (key == "d_input" or (key == "loss" and row.case.target_local))
        if key in ("d_weight", "d_bias") or (own_rows and parts[0].dim()):
            parts = [torch.cat(parts)]
        require_equal(key, parts)
        require_close(key, parts[0], wanted, row.case.dtype)


def case_of(name: str, **settings: Any) -> Case:
    return Case(name, function="row_loss", **settings)


FUNCTIONS = [
    Row(fn, case, {"entropy": False} if blind else {})
    for fn in DATA
    if fn is not nan_if_ignored
    for blind in ([False, True] if fn in BLIND else [False])
    for case in (
        case_of("mean"),
        case_of("sum, chunks", chunk_size=3, bias=True, options={"reduction": "sum", "softcap": 1.5}),
        case_of("none, chunks", chunk_size=3, bias=True, options={"reduction": "none", "temperature": 0.7}),
    )
    if blind == (fn in BLIND) or case.name == "mean"
]
FURTHER = [
    Row(fn, case_of(name, **settings), {"entropy": False} if fn in BLIND else {})
    for fn in (grpo, everything, by_class)
    for name, settings in {
        "float32": {"chunk_size": 5, "dtype": torch.float32, "bias": True, "leading": (12,)},
        "leading [s, b]": {"leading": (3, 2), "chunk_size": 4, "options": {"reduction": "none"}},
        "no rows": {"leading": (0,)},
        "no rows, none": {"leading": (0,), "options": {"reduction": "none"}},
        "all ignored": {"ignored": "all", "chunk_size": 2},
        "13 of 16 ids": {"vocab": 13, "multiple_of": 4},
        "one id": {"vocab": 1, "multiple_of": 2},
        "shards at -inf": {"bias": True, "masked": tuple(range(3, 9))},
        "frozen input": {"frozen": ("input",)},
        "frozen weight, none": {"frozen": ("weight", "bias"), "bias": True, "options": {"reduction": "none"}},
    }.items()
]
BFLOAT16 = [
    Row(fn, case_of("bfloat16", dtype=torch.bfloat16, leading=(24,), chunk_size=10, bias=True))
    for fn in (reinforce, focal, by_class)
]
SPREAD = [
    Row(
        fn,
        case_of(
            f"{spread}, {'local' if target_local else 'all'} targets, {reduction}",
            spread=spread, target_local=target_local, chunk_size=chunk_size, leading=leading, bias=True,
            options={"reduction": reduction},
        ),
    )
    for fn in (everything, by_class)
    for spread in ("uneven", "last has none", "only last has any")
    for target_local, reduction, chunk_size, leading in [
        (True, "mean", 4, (7,)), (False, "sum", None, (7,)), (True, "none", 8, (5, 2)), (False, "none", 5, (7,)),
    ]
]  # fmt: skip
ALL = Batch(_run, [(row,) for row in [*FUNCTIONS, *FURTHER, *BFLOAT16]], two_sizes)
ALL_SPREAD = Batch(_run, [(row,) for row in SPREAD])


@pytest.mark.parametrize(("row", "tp"), ALL.pairs(), ids=repr)
def test_a_row_loss_equals_the_oracle_and_autograd_through_log_probabilities(row, tp):
    require_oracle(row, ALL(tp, row))


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("row", SPREAD, ids=repr)
def test_sequence_parallel_row_data_follow_the_target(row, tp):
    require_oracle(row, ALL_SPREAD(tp, row))


# Ignored rows.


def _ignored(rank: int, row: Row) -> list[dict[str, Tensor]]:
    """With hidden states of ignored rows as they are, NaN, and infinite."""
    shard, every = shard_of(row.case.vocab), []
    for filling in (None, torch.nan, torch.inf):
        tensors = wholes(row)
        if filling is not None:
            tensors["input"][tensors["target"] == -100] = filling
        mine = own(row, tensors, shard)
        value = run(row, mine, shard)
        every.append({"loss": value.detach(), **gradients(row, value, mine, shard)})
        if value.dim():
            assert bool((value[mine["target"] == -100] == 0).all())
    return every


IGNORED = Batch(
    _ignored,
    [
        (Row(nan_if_ignored, case_of("", bias=True, chunk_size=3, **settings)),)
        for settings in (
            {},
            {"options": {"reduction": "none", "softcap": 1.5}},
            {"spread": "uneven", "options": {"reduction": "sum"}},
        )
    ],
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("index", range(3))
def test_nan_of_the_function_or_of_the_input_in_ignored_rows_reaches_nothing(index, tp):
    """The oracle of what is left: of `nan_if_ignored` in valid rows, with no NaN in sight."""
    (row,) = IGNORED.cases[index]
    ranks = IGNORED(tp, row)
    for rank in ranks:
        for key, first in rank[0].items():
            assert first.isfinite().all(), key
            require_equal(key, [filling[key] for filling in rank])
    plain = replace(row, fn=_without_nan)
    require_oracle(plain, [rank[0] for rank in ranks])


def _without_nan(rows: Any) -> Tensor:
    return 2 * rows.logprob + rows.entropy


DATA[_without_nan] = ()

# What the function is given, and gives.


def _given(rank: int) -> None:
    given = []

    def fn(rows: Any) -> Tensor:
        given.append(rows)
        return rows.logprob

    row, shard = Row(entropy_bonus, case_of("", chunk_size=3)), shard_of(9)
    mine = own(row, wholes(row), shard)
    for entropy in (True, False):
        run(row, mine, shard, fn, entropy=entropy)
    assert all(isinstance(rows, loss.RowStatistics) for rows in given)
    assert [len(rows.logprob) for rows in given] == [3, 3, 1] * 2
    assert [rows.entropy is None for rows in given] == [False] * 3 + [True] * 3
    for rows, other in zip(given[:3], given[3:], strict=True):
        require_equal("logprob", [rows.logprob.detach(), other.logprob.detach()])
        require_equal("lse", [rows.lse.detach(), other.lse.detach()])
    with torch.no_grad():
        run(row, mine, shard, fn)
    assert not any(rows.requires_grad for rows in given[-1])


def _outputs(rank: int) -> None:
    """After an error in the second chunk the collector holds the rows of the next call, and those only."""
    row, shard = Row(entropy_bonus, case_of("", chunk_size=3)), shard_of(9)
    mine, tensors = own(row, wholes(row), shard), wholes(row)
    collector, chunks = loss.RowOutputs("logprob", "entropy", "correct"), []

    def late(rows: Any) -> Tensor:
        chunks.append(rows)
        if len(chunks) == 2:
            raise RuntimeError("in the second chunk")
        return rows.logprob

    assert attempt(lambda: run(row, mine, shard, late, outputs=collector)).kind
    run(row, mine, shard, lse_only, outputs=collector, entropy=False)
    wanted = reference.row_outputs(reference.logits(tensors["input"], tensors["weight"]), tensors["target"])
    require_close("logprob", collector.logprob, wanted.logprob, torch.float64)
    require_close("entropy", collector.entropy, wanted.entropy, torch.float64)
    require_equal("correct", [collector.correct, wanted.correct])


def _result_types(rank: int) -> None:
    """The function's result may be of any real type; one without a gradient has none."""
    row, shard = Row(reinforce, case_of("", bias=True, dtype=torch.float32)), shard_of(9)
    mine = own(row, wholes(row), shard)
    for fn, slack in {
        lambda rows, a: reinforce(rows, a.double()).double(): torch.float32,
        lambda rows, a: reinforce(rows, a).half(): torch.float16,
        lambda rows, a: reinforce(rows, a).bfloat16(): torch.bfloat16,
    }.items():
        value = run(row, mine, shard, fn)
        assert value.dtype == torch.float32
        require_close("loss", value.detach(), run(row, mine, shard).detach(), slack)
        wanted = gradients(row, run(row, mine, shard), mine, shard)
        for name, gradient in gradients(row, value, mine, shard).items():
            require_close(name, gradient, wanted[name], slack)
    for fn in (lambda rows, a: a > 0, lambda rows, a: rows.logprob.detach().floor().int()):
        value = run(row, mine, shard, fn, reduction="sum")
        assert value.dtype == torch.float32
        for name, gradient in gradients(row, value, mine, shard).items():
            assert bool((gradient == 0).all()), name


TYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
TYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _data_types(rank: int) -> list[list[Tensor]]:
    """The loss is the row data: of every type, in one column and in several, here and spread over the ranks."""
    shard, every = shard_of(9), []
    for spread in (None, "uneven"):
        case = case_of("", spread=spread, leading=(6,), ignored="none", options={"reduction": "none"})
        row = Row(entropy_bonus, case)
        mine = own(row, wholes(row), shard)
        start = sum(case.rows(shard.tp_size)[:rank]) if spread else 0
        values = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0])[start : start + len(mine["target"])]
        for dtype in TYPES:
            for data in (values.to(dtype), values.to(dtype)[:, None].expand(-1, 3), values.to(dtype)[:, None, None]):
                every.append(loss.linear_row_loss(
                    mine["input"], mine["weight"], mine["target"],
                    lambda rows, x, dtype=dtype: (x.flatten(1).double().mean(1) if x.dim() > 1 else x.double()),
                    data, shard=shard, sequence_parallel=spread is not None, reduction="none", chunk_size=4,
                ).detach())  # fmt: skip
    return every


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("what", [_given, _outputs, _result_types], ids=lambda what: what.__name__)
def test_what_the_function_is_given_and_may_give(what, tp):
    SMALL(tp, what)


@pytest.mark.parametrize("tp", [1, 2])
def test_row_data_of_any_type_and_shape(tp):
    ranks = SMALL(tp, _data_types)
    values = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 0.0], dtype=torch.float64)
    for parts in zip(*ranks, strict=True):
        got = parts[0] if len(parts[0]) == 6 else torch.cat(parts)
        require_equal("row data", [values, got])


def _small(rank: int, what: Any) -> Any:
    return what(rank)


SMALL = Batch(_small, [(_given,), (_outputs,), (_result_types,), (_data_types,)])

# Cost.


class Products(TorchDispatchMode):
    """Counts the products of two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "bmm", "baddbmm")
        return func(*args, **(kwargs or {}))


def _cost(rank: int, function: str, settings: dict[str, Any], dtype: torch.dtype) -> tuple[Any, ...]:
    """GEMMs and collectives of forward and backward; 7 rows are 3 chunks."""
    options = {name: value for name, value in settings.items() if name == "reduction"}
    execution = {name: value for name, value in settings.items() if name == "entropy"}
    case = Case("", function=function, chunk_size=3, dtype=dtype, bias=True, options=options, execution=execution)
    shard = shard_of(9)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    with Products() as products, collectives() as (calls, _):
        value = call(case, mine, shard)
        forward = dict(calls)
        calls.clear()
        value.sum().backward()
    return products.count, forward, dict(calls)


COST = [
    # function, settings, GEMMs a chunk, reductions forward and backward
    ("row_loss", {}, 3, 3, 0),
    ("row_loss", {"entropy": False}, 3, 3, 0),
    ("row_loss", {"reduction": "sum"}, 3, 3, 0),
    ("row_loss", {"reduction": "none"}, 4, 0, 3),
    ("token_logprobs", {}, 4, 0, 3),
    ("cross_entropy", {}, 3, 3, 0),
    ("cross_entropy", {"reduction": "none"}, 4, 0, 3),
]
DTYPES = [torch.float32, torch.bfloat16]
COSTS = Batch(_cost, [(one[0], one[1], dtype) for one in COST for dtype in DTYPES])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("one", COST, ids=str)
def test_three_gemms_and_one_exchange_a_chunk(one, dtype):
    function, settings, gemms, forward, backward = one
    last = function == "row_loss"  # one more header: the function may have failed in the last chunk
    for count, calls, later in COSTS(2, function, settings, dtype):
        assert count == 3 * gemms
        assert calls == {"all_gather": 3 + last} | ({"all_reduce": forward} if forward else {})
        assert later == ({"all_reduce": backward} if backward else {})


def _bytes(rank: int, entropy: bool) -> int:
    """Sent in forward, at the second time: the first one tells the ranks the size."""
    shard = shard_of(9)
    rows = 5000  # above what an exchange has room for while nothing is known
    input, weight, target = torch.randn(rows, 4, generator=torch.Generator().manual_seed(0)), torch.ones(9, 4), None
    target = torch.arange(rows) % 9
    for _ in range(2):
        shard.traffic.reset()
        loss.linear_row_loss(
            input, shard.slice(weight), target, reinforce, target.float(), shard=shard, entropy=entropy, chunk_size=rows
        )
    return shard.traffic.bytes["all_gather"]


BYTES = Batch(_bytes, [(True,), (False,)])


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("entropy", [True, False])
def test_16_bytes_a_row_with_the_entropy_and_12_without(entropy, tp):
    a_row = 16 if entropy else 12
    assert BYTES(tp, entropy) == [(64 + a_row * 5000 + 64) * (tp - 1)] * tp


# Functions that misbehave.


class UnheardOf(Exception):
    """Of a class that other ranks cannot build."""


def _raise(error: Exception) -> Any:
    raise error


# What the function does to its rows, the class of the error, and its words; n rows are a chunk.
FAULTS = {
    "raises": (lambda rows: _raise(ValueError("the judge said no")), "ValueError", ["the judge said no"]),
    "raises its own": (
        lambda rows: _raise(UnheardOf("the judge said no")), "VocabParallelError", ["UnheardOf", "the judge said no"],
    ),
    "a column": (lambda rows: rows[:, None], "LayoutMismatchError", ["row loss", "[{n}]", "[{n}, 1]"]),
    "a mean": (lambda rows: rows.mean(), "LayoutMismatchError", ["row loss", "[{n}]", "[]"]),
    "nothing": (lambda rows: None, "LayoutMismatchError", ["row loss", "NoneType"]),
    "a list": (lambda rows: rows.tolist(), "LayoutMismatchError", ["row loss", "list"]),
    "a row less": (lambda rows: rows[:-1], "LayoutMismatchError", ["row loss", "[{n}]", "[{less}]"]),
}  # fmt: skip
SHAPES = {  # each of three chunks
    "mean": {"leading": (9,), "chunk_size": 3},
    "none": {"leading": (9,), "chunk_size": 3, "options": {"reduction": "none"}},
    "spread": {"leading": (18,), "chunk_size": 6, "spread": "even", "options": {"reduction": "sum"}},
    "deferred": {"leading": (9,), "chunk_size": 3},
}
WHERE = [(chunk, everywhere) for chunk in (1, 2, 3) for everywhere in (False, True)]


def _misbehave(rank: int, fault: str, chunk: int, everywhere: bool, shape: str) -> Any:
    """The function fails in one chunk, on the last rank or on all; and then the group goes on."""
    row = Row(ppo, case_of("", ignored="none", upstream_one=True, **SHAPES[shape]))
    shard = VocabShard(shard_of(9).layout, torch.distributed.group.WORLD, deferred_errors=shape == "deferred")
    mine, chunks = own(row, wholes(row), shard), []
    if shape == "deferred":  # the ranks know the call, and no longer wait for each other's headers
        for _ in range(4):
            run(row, mine, shard).backward()
        mine["weight"].grad = mine["input"].grad = None

    def fn(rows: Any, *data: Tensor) -> Any:
        chunks.append(rows)
        fails = len(chunks) == chunk and (everywhere or rank == shard.tp_size - 1)
        return FAULTS[fault][0](ppo(rows, *data)) if fails else ppo(rows, *data)

    def once() -> None:
        run(row, mine, shard, fn)
        shard.raise_deferred()

    met = attempt(once)
    value = run(row, mine, shard)
    return met, {"loss": value.detach(), **gradients(row, value, mine, shard)}


MISBEHAVE = Batch(
    _misbehave,
    [
        (fault, *where, shape)
        for fault in ("raises", "a column")
        for where in WHERE
        for shape in SHAPES
        if fault == "raises" or shape in ("mean", "none")
    ]
    + [(fault, 2, False, "mean") for fault in FAULTS if fault not in ("raises", "a column")],
)


@pytest.mark.parametrize("case", MISBEHAVE.cases, ids=str)
def test_a_function_that_fails_on_one_rank_or_on_all_is_one_error_on_every_rank(case):
    fault, _, _, shape = case
    ranks = MISBEHAVE(2, *case)
    _, kind, words = FAULTS[fault]
    n = 6 if shape == "spread" else 3
    mets = [met for met, _ in ranks]
    if shape == "deferred":  # a rank that has gone on knows the class of another's error only
        assert {met.kind for met in mets} == {kind}
        mets = mets[-1:]
    words = [word.format(n=n, less=n - 1) for word in words]
    if kind == "VocabParallelError":
        assert {(met.kind, met.message) for met in mets} == {(kind, mets[0].message)}
        assert all(word in mets[0].message for word in words)
    else:
        assert_all_raise(str(case), mets, [kind], words)
    row = Row(ppo, case_of("", ignored="none", upstream_one=True, **SHAPES[shape]))
    require_oracle(row, [after for _, after in ranks])


def test_one_rank_alone_raises_what_the_function_raised():
    row = Row(ppo, case_of("", chunk_size=3))
    shard = VocabShard(VocabLayout(9, 1, multiple_of=1))
    mine = own(row, wholes(row), shard)
    for reduction in ("mean", "none"):
        with pytest.raises(UnheardOf, match="no"):
            run(row, mine, shard, lambda rows, *_: _raise(UnheardOf("no")), reduction=reduction)


def _only_with_a_gradient(rank: int, reduction: str) -> Any:
    """The last rank's function fails where its rows require a gradient: "none" must find that in forward."""
    row, shard = Row(ppo, case_of("", ignored="none", leading=(6,), chunk_size=3)), shard_of(9)
    mine = own(row, wholes(row), shard)

    def fn(rows: Any, *data: Tensor) -> Tensor:
        if rank == 1 and rows.logprob.requires_grad:
            raise ValueError("no gradient here")
        return ppo(rows, *data)

    def no_derivative(rows: Any, *data: Tensor) -> Tensor:
        return _NoDerivative.apply(rows.logprob) if rank == 1 else rows.logprob * 1.0

    first = attempt(lambda: run(row, mine, shard, fn, reduction=reduction).sum().backward())
    second = attempt(lambda: run(row, mine, shard, no_derivative, reduction=reduction).sum().backward())
    with torch.no_grad():
        third = attempt(lambda: run(row, mine, shard, fn, reduction=reduction))
    return first, second, third


class _NoDerivative(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        raise ValueError("no derivative here")


ONLY_WITH_A_GRADIENT = Batch(_only_with_a_gradient, [("mean",), ("none",)])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_what_fails_only_with_a_gradient_fails_in_forward_on_every_rank(reduction):
    first, second, third = zip(*ONLY_WITH_A_GRADIENT(2, reduction), strict=True)
    assert_all_raise("in the function", list(first), ["ValueError"], ["no gradient here"])
    assert_all_raise("in its derivative", list(second), ["ValueError"], ["no derivative here"])
    assert [met.kind for met in third] == [None, None]


# Row data that is wrong.


def _bad_data(rank: int, fault: str, where: str, spread: str | None) -> Any:
    row = Row(ppo, case_of("", ignored="none", leading=(6,), chunk_size=3, spread=spread))
    shard = shard_of(9)
    mine = own(row, wholes(row), shard)
    wrong = dict(mine)
    if where == "everywhere" or rank == 1:
        wrong["old"] = BAD_DATA[fault][0](mine["old"])
    met = attempt(lambda: run(row, wrong, shard, flexible))
    value = run(row, mine, shard)
    return met, {"loss": value.detach(), **gradients(row, value, mine, shard)}


def flexible(rows: Any, old: Tensor, advantage: Tensor) -> Tensor:
    return ppo(rows, old.flatten(1).sum(1) if old.dim() > 1 else old, advantage)


BAD_DATA = {  # what is done to the first row data; the words of the error
    "a row too many": (lambda x: torch.cat([x, x[:1]]), ["row data 0"]),
    "a number": (lambda x: 1.0, ["row data 0", "float"]),
    "wants a gradient": (lambda x: x.clone().requires_grad_(), ["row data 0", "gradient", "detach"]),
    "other values": (lambda x: x + 1, []),
    "another type": (lambda x: x.float(), []),
    "two columns": (lambda x: x[:, None].expand(-1, 2), []),
}
BAD_CASES = [
    (fault, where, spread)
    for (fault, (_, words)), where, spread in product(BAD_DATA.items(), ["everywhere", "one rank"], [None, "even"])
    if where == "one rank" or words  # on every rank, they are fine
    if not (fault == "other values" and spread)  # nor is there anything to compare them with
]
BATCH_BAD = Batch(_bad_data, BAD_CASES)


@pytest.mark.parametrize("case", BAD_CASES, ids=str)
def test_bad_row_data_is_the_same_error_on_every_rank(case):
    fault, _, spread = case
    ranks = BATCH_BAD(2, *case)
    words = BAD_DATA[fault][1]
    assert_all_raise(str(case), [met for met, _ in ranks], ["LayoutMismatchError", "ValueError"], words)
    row = Row(ppo, case_of("", ignored="none", leading=(6,), chunk_size=3, spread=spread))
    require_oracle(row, [after for _, after in ranks])
