"""Log-probabilities and entropies of tokens: values and both gradients, whatever is asked of them and of how many.

`test_loss_options.py` has the plain cases, `test_loss_drawn.py` combinations.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

from tests.batch import assert_all_raise, attempt
from tests.multirank import test_accuracy as accuracy
from tests.multirank.counting import collectives
from tests.multirank.sharded import TP, Case, Cases, both, local, oracle, shard_of, whole
from tests.multirank.sharded import call as call_case
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import WORSE_THAN_PYTORCH, floor, require_close, require_equal
from vocab_parallel import LayoutMismatchError, VocabLayout, VocabShard, loss, reference
from vocab_parallel.collectives import gather_vocab

NAME = "token_logprobs"
SCORES = {"softcap": 1.5, "temperature": 0.7}
EVERYWHERE = Cases(
    [
        replace(case, function=NAME, bias=case.linear, chunk_size=3 if case.linear else None)
        for case in [
            *both("13 of 16 ids", vocab=13, multiple_of=4, options=SCORES),
            *both("5 of 8 or more ids", vocab=5, multiple_of=2),
            *both("one id: certainty", vocab=1, multiple_of=4),
            *both("two ids", vocab=2, options={"temperature": 2.0}),
            *both("every id is a target", vocab=9, every_id=True, leading=(9,), ignored="none"),
            *both("float32", dtype=torch.float32, options=SCORES),
            *both("all ignored: entropies all the same", ignored="all", options=SCORES),
            *both("ignore_index is an id", leading=(12,), options={"ignore_index": 8}),
            *both("one row without a dimension", leading=(), ignored="none"),
            *both("leading [s, 0]", leading=(3, 0)),
            *both("some ids at -inf", masked=(0, 3, 4, 5, 8)),
            *both("one id left", masked=(0, 1, 2, 3, 4, 5, 7, 8)),
            *both("-inf under a softcap", masked=(1, 2), options={"softcap": 1.5}),
            *both("frozen input", frozen=("input",)),
        ]
        if case.linear or "input" not in case.frozen
    ]
    + [
        Case("frozen weight and bias", function=NAME, bias=True, frozen=("weight", "bias")),
        Case("chunks of one row", function=NAME, chunk_size=1),
        Case("a chunk from a budget", function=NAME, bias=True, execution={"memory_budget": 300}),
        *both("offset 1e4", function=NAME, offset=1e4, grid=0.125, dtype=torch.float32, frozen=("input",))[1:],
        Case("logits offset 1e4", function=NAME, linear=False, offset=1e4, grid=0.125, dtype=torch.float32),
        Case("logits offset -1e4", function=NAME, linear=False, offset=-1e4, grid=0.125, dtype=torch.float32),
    ]
    + [
        Case(
            f"{spread}, {'local' if target_local else 'all'} targets",
            function=NAME,
            bias=True,
            spread=spread,
            target_local=target_local,
            chunk_size=chunk_size,
            options=SCORES,
            leading=leading,
        )
        for spread, (target_local, chunk_size, leading) in product(
            ["even", "uneven", "last has none", "only last has any"],
            [(True, 3, (7,)), (False, None, (7,)), (True, 5, (5, 2))],
        )
    ],
    on_two=True,
)


@EVERYWHERE.each_on_two
def test_values_and_both_gradients_equal_the_oracle(case, tp):
    EVERYWHERE.check(case, tp)


def _losses(rank: int, case: Case, used: str) -> list[Any]:
    """Gradients of a loss made of one of the outputs, of both, or of some rows of them."""
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    logprob, entropy = call_case(case, mine, shard).unbind(-1)
    USED[used](logprob, entropy, mine["upstream"][:, 0].to(logprob.dtype)).backward()
    return [mine[name].grad for name in case.names]


USED = {
    "logprob": lambda logprob, entropy, factor: (logprob * factor).sum(),
    "entropy": lambda logprob, entropy, factor: (entropy * factor).sum(),
    "squares": lambda logprob, entropy, factor: (logprob.square() * factor).sum() - entropy.square().mean(),
    "products": lambda logprob, entropy, factor: (logprob * entropy).mean(),
    "one row": lambda logprob, entropy, factor: logprob[2] * 3 + entropy[5],
}
LOSSES = Batch(
    _losses,
    [
        (Case(used, function=NAME, linear=linear, ignored="none", chunk_size=3 if linear else None), used)
        for used, linear in product(USED, [False, True])
    ],
)


@TP
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("used", USED)
def test_a_loss_may_use_one_of_them_or_both_or_some_rows(used, linear, tp):
    case = next(case for case, one in LOSSES.cases if one == used and case.linear == linear)
    tensors = whole(case)
    wholes = [tensors[name].requires_grad_() for name in case.names]
    logits = reference.logits(*wholes) if linear else wholes[0]
    factor = tensors["upstream"][:, 0]
    USED[used](*reference.token_logprobs(logits, tensors["target"]), factor).backward()
    ranks = LOSSES(tp, case, used)
    for index, (name, expected) in enumerate(zip(case.names, wholes, strict=True)):
        parts = [rank[index] for rank in ranks]
        if name == "input" and linear:
            require_equal("d_input", parts)
            got = parts[0]
        else:  # V=9 over 4 ranks is 3, 3, 3 and 0: what is past the ninth is padding
            got = torch.cat(parts, 0 if linear else -1).narrow(0 if linear else -1, 0, case.vocab)
        require_close(f"d_{name}", got, expected.grad, torch.float64)


def _nan_rows(rank: int, case: Case) -> list[list[torch.Tensor]]:
    """Gradients with rows that have no upstream gradient and hold NaN, infinities, or zeros."""
    shard = shard_of(case.vocab)
    every = []
    for filling in (torch.nan, torch.inf, -torch.inf, 0.0):
        tensors = whole(case)
        ignored = tensors["target"] == -100
        tensors["input"][ignored] = filling
        tensors["upstream"][ignored] = 0.0
        mine = local(case, tensors, shard)
        for name in case.names:
            mine[name].requires_grad_()
        both_of = call_case(case, mine, shard)
        gradients = torch.autograd.grad(both_of, [mine[name] for name in case.names], mine["upstream"])
        kept = mine["target"] != -100
        real = [x if name == "input" else x[: shard.num_valid] for name, x in zip(case.names, gradients, strict=True)]
        every.append([both_of.detach()[kept], both_of.detach()[~kept, 0], *real])
    return every


NAN_ROWS = Batch(
    _nan_rows,
    [
        (case,)
        for case in [
            *both("ignored rows hold NaN", function=NAME),
            Case("in chunks, with a bias", function=NAME, bias=True, chunk_size=2),
            Case("sequence parallel", function=NAME, spread="uneven", chunk_size=3),
        ]
    ],
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("index", range(4))
def test_ignored_rows_without_a_gradient_may_hold_nan(index, tp):
    ((case,),) = NAN_ROWS.cases[index : index + 1]
    for *fillings, zeros in NAN_ROWS(tp, case):
        for name, expected, *others in zip(
            ["values", "logprobs of ignored rows", *case.names], zeros, *fillings, strict=True
        ):
            assert expected.isfinite().all()
            require_equal(name, [expected, *others])


def _masked_target(rank: int, linear: bool) -> None:
    """A target at -inf has log-probability -inf, and the gradient of any other."""
    case = Case("target at -inf", function=NAME, linear=linear, bias=linear, masked=(2, 7), ignored="none")
    tensors = whole(case)
    tensors["target"][:3] = 7
    shard = shard_of(case.vocab)
    mine = local(case, tensors, shard)
    wholes = {name: tensors[name].clone().requires_grad_() for name in case.names}
    for name in case.names:
        mine[name].requires_grad_()
    value = call_case(case, mine, shard)
    value.backward(mine["upstream"])
    logits = reference.logits(*wholes.values()) if linear else wholes["input"]
    expected = torch.stack(reference.token_logprobs(logits, tensors["target"]), -1)
    expected.backward(tensors["upstream"])
    assert (value[:3, 0] == -torch.inf).all()
    require_close("values", value.detach(), expected.detach(), torch.float64)
    gradients = {name: tensor.grad for name, tensor in wholes.items()} | {"target": tensors["target"]}
    for name, gradient in local(case, gradients, shard).items():
        if name in case.names:
            require_close(f"d_{name}", mine[name].grad, gradient.nan_to_num(0.0), torch.float64)


MASKED_TARGET = Batch(_masked_target, [(False,), (True,)])


@TP
@pytest.mark.parametrize("linear", [False, True])
def test_a_target_at_minus_infinity(linear, tp):
    MASKED_TARGET(tp, linear)


def _dtypes(rank: int, linear: bool) -> list[list[torch.Tensor]]:
    case = Case("dtypes", function=NAME, linear=linear)
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    types = [torch.int64, torch.int32, torch.int16, torch.int8]
    return [list(call_case(case, mine | {"target": mine["target"].to(dtype)}, shard).unbind(-1)) for dtype in types]


def test_targets_of_any_integer_type():
    for linear in (False, True):
        for first, *others in run_ranks(_dtypes, 2, linear):
            for other in others:
                require_equal("logprob", [first[0], other[0]])
                require_equal("entropy", [first[1], other[1]])


def test_the_result_has_names_and_shapes_and_is_one_pair_for_one_rank_without_a_group():
    shard = VocabShard(VocabLayout(9, 1, multiple_of=1))
    tensors = whole(Case("", function=NAME, leading=(3, 2)))
    rows = loss.linear_token_logprobs(tensors["input"], tensors["weight"], tensors["target"], shard=shard)
    assert isinstance(rows, loss.LogProbs) and rows._fields == ("logprob", "entropy")
    assert rows.logprob.shape == rows.entropy.shape == (3, 2)
    logits = reference.logits(tensors["input"], tensors["weight"])
    other = loss.token_logprobs(logits, tensors["target"], shard=shard)
    for name in rows._fields:
        require_close(name, getattr(rows, name), getattr(other, name), torch.float64)


# Accuracy at a realistic size, as in `test_accuracy.py`.


def _measured(rank: int, dtype: torch.dtype, confident: bool, linear: bool) -> list[list[torch.Tensor]]:
    shard = shard_of(accuracy.VOCAB, 16)
    every = []
    for seed in range(accuracy.SEEDS):
        tensors, target = accuracy.batch(seed, dtype, confident)
        if linear:
            mine = [tensors[0].clone(), shard.slice(tensors[1]), shard.slice(tensors[2])]
        else:
            mine = [shard.slice(reference.logits(*tensors), -1)]
        for tensor in mine:
            tensor.requires_grad_()
        if linear:
            rows = loss.linear_token_logprobs(mine[0], mine[1], target, shard=shard, linear_bias=mine[2], chunk_size=80)
        else:
            rows = loss.token_logprobs(mine[0], target, shard=shard)
        first, *vocab = torch.autograd.grad(rows, mine, upstream(len(target)))
        wholes = [gather_vocab(shard, table) for table in vocab] if linear else []
        first = first if linear else gather_vocab(shard, first, -1)
        every.append([rows.logprob.detach(), rows.entropy.detach(), first, *wholes])
    return every


def upstream(rows: int) -> list[torch.Tensor]:
    return [torch.linspace(-1, 2, rows), torch.linspace(1, -1, rows)]


def unsharded(seed: int, dtype: torch.dtype, confident: bool, linear: bool, exact: bool) -> list[torch.Tensor]:
    """PyTorch's own, with the softmax in float32 as training code does it; or the oracle."""
    tensors, target = accuracy.batch(seed, dtype, confident)
    tensors = tensors if linear else [reference.logits(*tensors)]
    tensors = [tensor.to(torch.float64 if exact else dtype).requires_grad_() for tensor in tensors]
    logits = functional.linear(*tensors) if linear else tensors[0]
    if exact:
        rows = reference.token_logprobs(logits, target)
    else:
        log_p = logits.float().log_softmax(-1)
        picked = log_p.gather(-1, target.clamp(min=0)[:, None])[:, 0]
        rows = torch.where(target == -100, 0.0, picked), -(log_p.exp() * log_p).sum(-1)
    gradients = torch.autograd.grad(rows, tensors, [part.to(rows[0].dtype) for part in upstream(len(target))])
    return [*(row.detach() for row in rows), *gradients]


MEASURED = Batch(
    _measured, list(product([torch.float32, torch.bfloat16], [False, True], [False, True]))
)  # dtype, confident, linear


@pytest.mark.parametrize("case", MEASURED.cases, ids=str)
def test_values_and_gradients_are_no_worse_than_twice_pytorch(case):
    dtype, _, linear = case
    ranks = MEASURED(2, *case)
    seeds = range(accuracy.SEEDS)
    theirs, exact = ([unsharded(seed, *case, exact=exact) for seed in seeds] for exact in (False, True))
    for index, name in enumerate(["logprob", "entropy", "d_input", "d_weight", "d_bias"][: 5 if linear else 3]):
        for seed in seeds:
            require_equal(name, [rank[seed][index] for rank in ranks])
        expected = torch.stack([exact[seed][index] for seed in seeds])
        mine, other = (
            torch.stack([results[seed][index].double() for seed in seeds]) - expected for results in (ranks[0], theirs)
        )
        slack = floor(expected, torch.float32 if index < 2 else dtype)
        for measure in (lambda error: error.abs().max(), lambda error: error.square().mean().sqrt()):
            assert measure(mine) <= WORSE_THAN_PYTORCH * measure(other) + slack, f"{name}: {mine.abs().max()}"


# Collectives.


def _sent(rank: int, case: Case, grad: bool) -> list[Any]:
    """Calls and bytes of forward and backward, at the second time: the first one tells the ranks the size."""
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_(grad)
    for _ in range(2):
        shard.traffic.reset()
        with collectives() as (calls, sent):
            value = call_case(case, mine, shard)
        assert shard.traffic.calls == calls and shard.traffic.bytes == sent, f"{shard.traffic} counted, {calls} made"
        forward = dict(calls), dict(sent)
    with collectives() as (calls, _):
        if grad:
            value.backward(mine["upstream"].to(value.dtype))
    return [*forward, dict(calls)]


ROWS = 5000  # above what an exchange has room for while nothing is known of the rows
SENT = Batch(
    _sent,
    [
        (Case("sent", function=NAME, linear=linear, leading=(ROWS,), dtype=torch.float32, **settings), grad)
        for linear, settings, grad in [
            (False, {}, True),
            (False, {}, False),
            (True, {"chunk_size": ROWS}, True),
            (True, {"chunk_size": 2000}, True),
            (True, {"chunk_size": 2000}, False),
            (True, {"chunk_size": 2000, "spread": "even"}, True),
        ]
    ],
)


@pytest.mark.parametrize("tp", [2, 4])
def test_one_exchange_of_16_bytes_a_row_and_the_reductions_of_the_gradient_in_backward(tp):
    def results(index: int) -> list[Any]:
        ranks = SENT(tp, *SENT.cases[index])
        assert all(rank == ranks[0] for rank in ranks)
        return ranks[0]

    once = {"all_gather": 1}, {"all_gather": (64 + 16 * ROWS) * (tp - 1)}
    assert results(0) == [*once, {}]
    assert results(1) == [*once, {}]
    assert results(2) == [*once, {"all_reduce": 1}]
    chunks = {"all_gather": 3}, {"all_gather": 3 * (64 + 16 * 2000) * (tp - 1)}  # the last one has room for 2,000 too
    assert results(4)[0] == chunks[0]
    calls, _, backward = results(3)
    assert calls == chunks[0] and backward == {"all_reduce": 3}
    assert results(3)[1] == results(4)[1]
    calls, _, backward = results(5)
    assert calls == {"all_gather": 1 + 1 + 3 + 3}  # how many rows, their targets, and a chunk's rows and statistics
    assert backward == {"all_gather": 2 + 3, "reduce_scatter": 3}  # both upstream gradients, the rows again


# Bad input.


def _bad(rank: int, fault: str, linear: bool, spread: str | None) -> Any:
    case = Case("bad", function=NAME, linear=linear, ignored="none", spread=spread, leading=(8,), chunk_size=3)
    case = case if linear else replace(case, chunk_size=None)
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    wrong = dict(mine)
    last = rank == shard.tp_size - 1
    if fault == "target 9" and (last or not spread):
        wrong["target"] = mine["target"].index_fill(0, torch.tensor([1]), 9)
    elif fault == "NaN" and (last or (linear and not spread)):
        wrong["input"] = mine["input"].index_fill(0, torch.tensor([1]), torch.nan)
    elif fault == "others' targets" and last:
        wrong["target"] = mine["target"].flip(0)
    elif fault == "a float target" and last:
        wrong["target"] = torch.ones(mine["target"].shape)
    elif fault == "two rows less" and last:
        wrong["target"] = mine["target"][:-2]
    met = attempt(lambda: call_case(case, wrong, shard))
    return met, call_case(case, mine, shard)


BAD = {
    "target 9": (["TargetRangeError"], ["9", "row 1", "ignore_index"]),
    "NaN": (["NonFiniteError"], ["NaN", "row {row}"]),
    "others' targets": (["LayoutMismatchError"], ["different token ids"]),
    "a float target": (["LayoutMismatchError"], ["integer token ids", "torch.float32"]),
    "two rows less": (["LayoutMismatchError"], ["target"]),
}
BATCH_BAD = Batch(
    _bad,
    [
        (fault, linear, spread)
        for fault in BAD
        for linear, spread in [(False, None), (True, None), (True, "even")]
        if not (fault == "others' targets" and spread)
    ],
)


@pytest.mark.parametrize("case", BATCH_BAD.cases, ids=str)
def test_bad_input_is_the_same_error_on_every_rank(case):
    fault, linear, spread = case
    ranks = BATCH_BAD(2, *case)
    kinds, words = BAD[fault]
    row = 5 if spread else 1  # in the rows of the group
    assert_all_raise(str(case), [met for met, _ in ranks], kinds, [word.format(row=row) for word in words])
    right = Case("bad", function=NAME, linear=linear, ignored="none", leading=(8,))
    after = torch.cat([after for _, after in ranks]) if spread else ranks[0][1]
    require_close("the call afterwards", after, oracle(right)["loss"], torch.float64)


def test_every_error_is_one_of_the_packages():
    shard = VocabShard(VocabLayout(9, 1, multiple_of=1))
    with pytest.raises(LayoutMismatchError, match="columns"):
        loss.token_logprobs(torch.zeros(3, 10), torch.zeros(3, dtype=torch.int64), shard=shard)
    with pytest.raises(LayoutMismatchError, match="leading shape"):
        loss.linear_token_logprobs(torch.zeros(3, 4), torch.zeros(9, 4), torch.zeros(2, dtype=torch.int64), shard=shard)
    assert Counter(shard.traffic.calls) == Counter()
