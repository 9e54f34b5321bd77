"""Options and tensors of them that are wrong, on every rank or on one: all ranks raise the same, and go on working."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.batch import assert_all_raise, attempt
from tests.multirank.sharded import Case, call, local, oracle, shard_of, whole
from tests.multirank.shared_world import Batch
from tests.multirank.test_deferred_errors import no_host_reads
from tests.tolerances import require_close
from vocab_parallel import VocabLayout, VocabShard, kl_div, linear_kl_div, loss
from vocab_parallel.agreement import raise_deferred

CAPS = [{"softcap": value} for value in (0.0, -1.0, math.nan, math.inf, True, "30")]
HEATS = [{"temperature": value} for value in (0.0, -1.0, math.nan, math.inf, None)]
REFUSED = {
    "cross_entropy": [
        *CAPS,
        *HEATS,
        *({"z_loss": value} for value in (-1e-4, math.nan, math.inf, None)),
        {"reduction": "average"},
    ],
    "kl_div": [*CAPS, *HEATS, {"reduction": "batchmean"}],
    "token_logprobs": [*CAPS, *HEATS, {"ignore_index": 0.5}],
    "row_loss": [*CAPS, *HEATS, {"reduction": "average"}],
}


def _option_value(rank, function, linear, options):
    """The call with the option, and then the call without: the group goes on."""
    case = Case("refused", function=function, linear=linear, soft=function == "kl_div", dtype=torch.float32)
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    met = attempt(lambda: call(replace(case, options=options), mine, shard))
    return met, call(case, mine, shard)


REFUSALS = Batch(
    _option_value,
    [
        (function, linear, options)
        for function, every in REFUSED.items()
        for linear in (False, True)
        for options in every
        if linear or function != "row_loss"
    ],
)


@pytest.mark.parametrize("case", REFUSALS.cases, ids=str)
def test_an_option_outside_its_range_is_the_same_value_error_on_every_rank(case):
    function, linear, options = case
    ranks = REFUSALS(2, *case)
    ((name, value),) = options.items()
    assert_all_raise(str(case), [met for met, _ in ranks], ["ValueError"], [name, repr(value)])
    plain = Case("refused", function=function, linear=linear, soft=function == "kl_div", dtype=torch.float32)
    for _, after in ranks:
        require_close("the call afterwards", after, oracle(plain)["loss"], torch.float32)


def _bad_tensor(rank, fault, where, settings):
    """A tensor argument that is wrong on every rank or on the last alone, and then the right call."""
    case = Case("bad", dtype=torch.float32, ignored="none", **settings)
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    wrong = dict(mine)
    if where == "everywhere" or rank == shard.tp_size - 1:
        name, change = FAULTS[fault]
        wrong[name] = change(mine[name].clone())
    met = attempt(lambda: call(case, wrong, shard))
    return met, call(case, mine, shard)


def _put(value):
    def change(tensor):
        tensor[-1] = value
        return tensor

    return change


FAULTS = {  # name -> the argument and what is wrong with it
    "a weight is NaN": ("row_weight", _put(math.nan)),
    "a weight is infinite": ("row_weight", _put(math.inf)),
    "a weight too many": ("row_weight", lambda x: torch.cat([x, x[:1]])),
    "weights of two dimensions": ("row_weight", lambda x: x[:, None]),
    "integer weights": ("row_weight", lambda x: x.long()),
    "weights that want a gradient": ("row_weight", lambda x: x.requires_grad_()),
    "a soft target of ids": ("target", lambda x: torch.zeros(x.shape[:-1])),
    "a soft target with a column too many": ("target", lambda x: torch.cat([x, x[:, :1]], 1)),
    "a soft target with a row too many": ("target", lambda x: torch.cat([x, x[:1]])),
    "a soft target below 0": ("target", lambda x: x - 0.5),
}
ROW_WEIGHT = [{"weighted": True}, {"weighted": True, "linear": False}, {"weighted": True, "spread": "uneven"}]
SOFT_TARGET = [{"soft": True}, {"soft": True, "linear": False}]
BAD = Batch(
    _bad_tensor,
    [
        (fault, where, settings)
        for fault, (name, _) in FAULTS.items()
        for settings in (ROW_WEIGHT if name == "row_weight" else SOFT_TARGET)
        for where in ("everywhere", "on one rank")
    ],
)


@pytest.mark.parametrize("case", BAD.cases, ids=str)
def test_a_bad_row_weight_or_soft_target_is_the_same_error_on_every_rank(case):
    fault, _, settings = case
    ranks = BAD(2, *case)
    errors = ["ValueError", "LayoutMismatchError", "NonFiniteError"]
    assert_all_raise(str(case), [met for met, _ in ranks], errors, [FAULTS[fault][0]])
    right = Case("bad", dtype=torch.float32, ignored="none", **settings)
    after = [after for _, after in ranks]
    require_close("the call afterwards", after[0], oracle(right)["loss"], torch.float32)


def _ranks_disagree(rank, linear, one, other):
    """Rank 1 is asked for another loss: other options, or other weights (None)."""
    case = Case("disagree", linear=linear, weighted=one is None, options=one or {})
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    if rank == 1 and one is None:
        mine["row_weight"] = mine["row_weight"] + 1.0
    return attempt(lambda: call(replace(case, options=other or {}) if rank == 1 else case, mine, shard))


DIFFERENT = [
    ({"softcap": 30.0}, {"softcap": 20.0}),
    ({"softcap": 30.0}, {}),
    ({"temperature": 0.7}, {"temperature": 0.8}),
    ({"z_loss": 1e-4}, {"z_loss": 2e-4}),
    (None, None),
]
DISAGREE = Batch(_ranks_disagree, [(linear, *pair) for linear in (False, True) for pair in DIFFERENT])


@pytest.mark.parametrize("case", DISAGREE.cases, ids=str)
def test_ranks_that_are_asked_for_different_losses_find_out(case):
    words = ["rank 0", "rank 1"] if case[1] is not None else []
    assert_all_raise(str(case), DISAGREE(2, *case), ["LayoutMismatchError"], words)


def _own_rows_of_a_distribution(rank, function):
    """Each rank's columns of its own rows: nobody holds the other columns of them."""
    case = Case("own rows", function=function, soft=True, spread="even", target_local=False)
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    own = mine["target"].tensor_split(shard.tp_size)[rank]
    met = attempt(lambda: call(case, mine | {"target": own, "input": mine["input"][: len(own)]}, shard))
    return met, call(case, mine, shard)


OWN_ROWS = Batch(_own_rows_of_a_distribution, [("cross_entropy",), ("kl_div",)])


@pytest.mark.parametrize("function", ["cross_entropy", "kl_div"])
def test_a_distribution_over_own_rows_only_is_refused_as_half_of_it_is_nowhere(function):
    ranks = OWN_ROWS(2, function)
    assert_all_raise(function, [met for met, _ in ranks], ["LayoutMismatchError"], ["target", "sequence_parallel"])
    right = Case("own rows", function=function, soft=True, spread="even", target_local=False)
    require_close("the call afterwards", ranks[0][1], oracle(right)["loss"], torch.float64)


def _refused_together(rank, linear, combination):
    case = Case("refused", linear=linear, soft="soft" in combination, dtype=torch.float32)
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    options = {
        "soft, over the others": {"label_smoothing": 0.1, "smoothing_over": "others"},
        "mean_group without a mean": {"reduction": "sum", "mean_group": dist.group.WORLD},
        "outputs by name": {"outputs": "entropy"},
        "soft, logprob": {"outputs": loss.RowOutputs("logprob")},
        "soft, correct": {"outputs": loss.RowOutputs("correct")},
    }[combination]
    return attempt(lambda: call(replace(case, options=options), mine, shard))


TOGETHER = {
    "soft, over the others": "smoothing_over",
    "mean_group without a mean": "mean_group",
    "outputs by name": "outputs",
    "soft, logprob": "logprob",
    "soft, correct": "correct",
}
COMBINED = Batch(_refused_together, list(product([False, True], TOGETHER)))


@pytest.mark.parametrize("combination", TOGETHER)
@pytest.mark.parametrize("linear", [False, True])
def test_options_that_do_not_go_together_are_refused(linear, combination):
    assert_all_raise(combination, COMBINED(2, linear, combination), ["ValueError"], [TOGETHER[combination]])


def test_unknown_outputs_are_refused_by_name():
    with pytest.raises(ValueError, match="perplexity"):
        loss.RowOutputs("lse", "perplexity")


@pytest.mark.parametrize("linear", [False, True])
def test_a_target_that_is_no_distribution_is_told_of_later_where_errors_are_deferred(linear):
    shard = VocabShard(VocabLayout(9, 1, multiple_of=1), deferred_errors=True)
    draw = torch.Generator().manual_seed(0)
    input, weight, teacher = (torch.randn(shape, generator=draw) for shape in ((4, 9), (9, 9), (4, 9)))
    arguments = (input, weight) if linear else (input,)
    divergence = linear_kl_div if linear else kl_div
    for is_log, right, wrong in ((True, teacher.log_softmax(1), teacher), (False, teacher.softmax(1), teacher)):
        with no_host_reads():
            divergence(*arguments, right, shard=shard, log_target=is_log)
        raise_deferred(shard)
        with no_host_reads():
            divergence(*arguments, wrong, shard=shard, log_target=is_log)
        with pytest.raises(ValueError, match="the target of row 0 holds"):
            raise_deferred(shard)
