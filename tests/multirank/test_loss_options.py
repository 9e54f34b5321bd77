"""Each option of the losses by itself on 1 to 4 ranks against the float64 oracle, and its edges.

V=9 over 4 ranks is 3, 3, 3 and 0 ids. Combinations are in `test_loss_drawn.py`.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.multirank.sharded import OUTPUTS, TP, Case, Cases, both, call, local, oracle, shard_of, whole
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import require_close, require_equal
from vocab_parallel import VocabLayout, VocabShard, loss, reference

ROWS_ONLY = tuple(name for name in OUTPUTS if name not in ("logprob", "correct"))  # what no target id is needed for
EACH = {
    "softcap": {"softcap": 1.5},
    "a softcap far above the logits": {"softcap": 1000.0},
    "temperature 0.7": {"temperature": 0.7},
    "temperature 2": {"temperature": 2},  # an int will do
    "softcap, then temperature": {"softcap": 1.5, "temperature": 0.5},
    "z_loss": {"z_loss": 0.3},
    "z_loss and smoothing": {"z_loss": 0.01, "label_smoothing": 0.1},
    "softcap and smoothing over the others": {"softcap": 2, "label_smoothing": 0.1, "smoothing_over": "others"},
}
OPTIONS = Cases(
    [
        replace(case, bias=case.linear, chunk_size=3 if case.linear else None)
        for (name, options), reduction in product(EACH.items(), ["none", "mean"])
        for case in both(f"{name}, {reduction}", options=options | {"reduction": reduction})
        if case.linear or reduction == "none"  # of logits, the reductions are sums of "none"
    ],
    on_two=True,
)


@OPTIONS.each_on_two
def test_each_option_equals_the_oracle(case, tp):
    OPTIONS.check(case, tp)


SOFT_OPTIONS = {
    "": {},
    ", smoothed": {"label_smoothing": 0.1},
    ", all smoothed": {"label_smoothing": 1.0},
    ", softcap, temperature, z_loss": {"softcap": 1.5, "temperature": 0.7, "z_loss": 0.1},
}
SOFT = Cases(
    [
        replace(case, bias=case.linear, chunk_size=3 if case.linear else None, weighted=bool(options))
        for (name, options), reduction in product(SOFT_OPTIONS.items(), ["none", "mean"])
        for case in both(f"soft{name}, {reduction}", soft=True, options=options | {"reduction": reduction})
    ]
    + both("soft, layout 13 of 16", soft=True, vocab=13, multiple_of=4)
    + both("soft, layout 1 of 16", soft=True, vocab=1, multiple_of=4)
    + both("soft, no rows", soft=True, leading=(0,))
    + both("soft, leading [s, b]", soft=True, leading=(3, 2), options={"reduction": "none"})
    + both("soft, ids equal to ignore_index are no matter", soft=True, options={"ignore_index": 0}),
    on_two=True,
)


@SOFT.each_on_two
def test_a_distribution_as_target_is_read_where_its_ids_live(case, tp):
    SOFT.check(case, tp)


KL = Cases(
    [
        replace(case, bias=case.linear, chunk_size=2 if case.linear else None)
        for log_target, reduction in product([False, True], ["none", "mean"])
        for case in both(
            f"kl, {'log-' if log_target else ''}probabilities, {reduction}",
            function="kl_div",
            soft=True,
            options={"log_target": log_target, "reduction": reduction},
        )
    ]
    + both("kl with outputs", function="kl_div", soft=True, outputs=ROWS_ONLY)
    + both("kl, no rows", function="kl_div", soft=True, leading=(0,))
    + both("kl, weighted", function="kl_div", soft=True, weighted=True, options={"reduction": "none"})
    + both("kl, scores", function="kl_div", soft=True, options={"softcap": 1.5, "temperature": 0.7})
    + both("kl, V=1", function="kl_div", soft=True, vocab=1, options={"log_target": True}),
    on_two=True,
)


@KL.each_on_two
def test_the_divergence_from_a_sharded_distribution(case, tp):
    KL.check(case, tp)


WEIGHTED = Cases(
    [
        replace(case, bias=case.linear, chunk_size=3 if case.linear else None)
        for reduction in ("none", "sum", "mean")
        for case in both(f"weighted, {reduction}", weighted=True, options={"reduction": reduction, "z_loss": 0.1})
    ]
    + both("weighted, every row ignored", weighted=True, ignored="all")
    + both("weighted, leading [s, b]", weighted=True, leading=(3, 4), options={"label_smoothing": 0.2}),
    on_two=True,
)


@WEIGHTED.each_on_two
def test_rows_have_weights_and_the_mean_is_over_valid_rows_whatever_their_weight(case, tp):
    WEIGHTED.check(case, tp)


SPREAD = Cases(
    [
        Case(
            f"{name}, {spread}, {'local' if target_local else 'all'} targets",
            bias=True,
            spread=spread,
            target_local=target_local,
            chunk_size=chunk_size,
            **settings,
        )
        for (name, settings), (spread, target_local, chunk_size) in product(
            {
                "weighted": {"weighted": True, "outputs": OUTPUTS, "options": {"reduction": "none", "z_loss": 0.1}},
                "weighted mean": {"weighted": True, "options": {"softcap": 1.5}},
                "soft": {"soft": True, "weighted": True, "options": {"label_smoothing": 0.1}},
                "soft, none": {"soft": True, "options": {"reduction": "none"}},
                "kl": {"function": "kl_div", "soft": True, "options": {"log_target": True, "reduction": "sum"}},
                "logprobs": {"function": "token_logprobs", "options": {"temperature": 0.7}},
                "row loss": {"function": "row_loss", "options": {"reduction": "sum"}},
            }.items(),
            [("uneven", True, 3), ("last has none", False, None)],
        )
        if not (target_local and settings.get("soft"))  # no rank would hold the other columns of another's rows
    ]
    + [
        Case(f"{name}, {spread}, all", spread=spread, target_local=False, chunk_size=3, soft=True, **settings)
        for spread in ("even", "only last has any")
        for name, settings in {
            "soft": {"weighted": True, "outputs": ("lse", "entropy"), "options": {"reduction": "none"}},
            "kl": {"function": "kl_div", "bias": True},
        }.items()
    ],
    on_two=True,
)


@SPREAD.each_on_two
def test_what_follows_the_targets_rows_under_sequence_parallelism(case, tp):
    SPREAD.check(case, tp)


LOGPROBS = Cases(
    [
        *both("logprobs", function="token_logprobs"),
        *both("logprobs, scores", function="token_logprobs", options={"softcap": 1.5, "temperature": 0.7}),
        *both("logprobs, all ignored", function="token_logprobs", ignored="all"),
        *both("logprobs, no rows", function="token_logprobs", leading=(0,)),
        *both("logprobs, [s, b]", function="token_logprobs", leading=(3, 2), options={"ignore_index": 2}),
        Case("logprobs, chunks", function="token_logprobs", chunk_size=2, bias=True),
        Case("row loss", function="row_loss", chunk_size=2, bias=True),
        Case("row loss, none", function="row_loss", chunk_size=3, options={"reduction": "none", "softcap": 1.5}),
        Case("row loss, [s, b]", function="row_loss", leading=(3, 2), options={"temperature": 0.7}),
        Case("row loss, no entropy", function="row_loss", chunk_size=2, bias=True, execution={"entropy": False}),
        Case(
            "row loss, no entropy, capped", function="row_loss", options={"softcap": 1.5}, execution={"entropy": False}
        ),
        Case("row loss with outputs", function="row_loss", chunk_size=2, outputs=OUTPUTS),
        Case("row loss, all ignored", function="row_loss", ignored="all"),
        Case("row loss, no rows", function="row_loss", leading=(0,)),
    ],
    on_two=True,
)


@LOGPROBS.each_on_two
def test_log_probabilities_and_entropies_and_losses_made_of_them(case, tp):
    LOGPROBS.check(case, tp)


OUT = Cases(
    [Case(f"{name} alone", chunk_size=3, outputs=(name,)) for name in OUTPUTS]
    + both("all, ties within and across shards", outputs=OUTPUTS, grid=0.5, scale=0.5, leading=(40,))
    + both("all, every logit equal", outputs=OUTPUTS, scale=0.0, grid=1.0, leading=(9,), every_id=True, ignored="none")
    + both("all, smoothed, capped", outputs=OUTPUTS, options={"label_smoothing": 0.1, "softcap": 1.5, "z_loss": 0.1})
    + both("all, every row ignored", outputs=OUTPUTS, ignored="all", options={"reduction": "sum"})
    + both("all, ignore_index is an id", outputs=OUTPUTS, leading=(20,), options={"ignore_index": 3})
    + both("all, no rows", outputs=OUTPUTS, leading=(0,))
    + both("all, leading [s, b]", outputs=OUTPUTS, leading=(3, 2), options={"reduction": "none"})
    + both("all, V=1", outputs=OUTPUTS, vocab=1)
    + both("all, V=2", outputs=OUTPUTS, vocab=2, grid=0.5)
    + both("all, frozen", outputs=OUTPUTS, frozen=("input", "weight"))
    + both("rows of a soft target", outputs=ROWS_ONLY, soft=True, grid=0.5)
    + [Case("all, logits masked", linear=False, outputs=OUTPUTS, masked=(0, 3, 4, 5, 8))]
    + [Case("all, one id left", linear=False, outputs=OUTPUTS, masked=(0, 1, 2, 3, 4, 5, 7, 8))]
    + [Case("all, bias masked", bias=True, chunk_size=3, outputs=OUTPUTS, masked=(0, 3, 4, 5, 8))],
    on_two=True,
)


@OUT.each_on_two
def test_outputs_of_rows_ride_on_the_loss(case, tp):
    OUT.check(case, tp)


FLOOR = Cases(  # at every number of ranks above 1 some shard is -inf altogether
    [
        replace(case, masked=tuple(range(3, 9)), bias=case.linear, chunk_size=3 if case.linear else None)
        for name, settings in {
            "": {"outputs": OUTPUTS},
            "none": {"options": {"reduction": "none"}},
            "z_loss, temperature": {"options": {"z_loss": 0.1, "temperature": 0.7}},
            "capped: -inf is -softcap": {"options": {"softcap": 1.5, "label_smoothing": 0.1}, "outputs": OUTPUTS},
            "soft": {"soft": True, "outputs": ROWS_ONLY},
            "kl": {"function": "kl_div", "soft": True},
            "kl of logs": {"function": "kl_div", "soft": True, "options": {"log_target": True, "reduction": "none"}},
            "logprobs": {"function": "token_logprobs"},
        }.items()
        for case in both(f"shards of -inf {name}", **settings)
    ]
    + [Case("shards of -inf, row loss", function="row_loss", masked=tuple(range(3, 9)), bias=True)]
)


@TP
@FLOOR.each
def test_shards_that_are_minus_infinity_and_targets_without_mass_there(case, tp):
    FLOOR.check(case, tp)


def _mass_on_masked_ids(rank, linear, options, soft):
    """Row losses and gradients of a target that wants a masked id: infinite losses, gradients as ever."""
    case = Case("masked", linear=linear, bias=linear, masked=(2, 7), soft=soft, ignored="none", options=options)
    tensors = whole(case)
    if soft:
        tensors["target"][:3, 7] = 0.25
    else:
        tensors["target"][:3] = 7
    shard = shard_of(9)
    mine = local(case, tensors, shard)
    wholes = {name: tensors[name].detach().clone().requires_grad_() for name in case.names}
    for name in case.names:
        mine[name].requires_grad_()
    value = call(case, mine, shard)
    value.backward(mine["upstream"])
    logits = reference.logits(*wholes.values()) if linear else wholes["input"]
    expected = reference.cross_entropy(logits, tensors["target"], **options)
    expected.backward(tensors["upstream"])
    assert expected[:3].isinf().all()
    require_close("loss", value.detach(), expected.detach(), torch.float64)
    for name, gradient in local(
        case, {n: t.grad for n, t in wholes.items()} | {"target": tensors["target"]}, shard
    ).items():
        if name in case.names:
            real = gradient.nan_to_num(0.0)  # padding is NaN there, and zero in ours
            require_close(f"d_{name}", mine[name].grad, real, torch.float64)


MASS = Batch(
    _mass_on_masked_ids,
    [
        (linear, {"reduction": "none"} | options, soft)
        for linear in (False, True)
        for options in ({}, {"label_smoothing": 0.1}, {"label_smoothing": 1.0})
        for soft in (False, True)
    ],
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", MASS.cases, ids=str)
def test_mass_on_a_masked_id_is_an_infinite_loss_with_a_finite_gradient(case, tp):
    MASS(tp, *case)


EVERY_OPTION = {
    "plain": {},
    "z_loss": {"options": {"z_loss": 1e-4}},
    "smoothed": {"options": {"label_smoothing": 0.1}},
    "capped": {"options": {"softcap": 30.0}},
    "temperature": {"options": {"temperature": 0.5}},
    "outputs": {"outputs": OUTPUTS},
    "soft": {"soft": True},
    "kl": {"function": "kl_div", "soft": True, "options": {"log_target": True}},
    "logprobs": {"function": "token_logprobs"},
    "row loss": {"function": "row_loss"},
}
# On the grid the float32 projection is exact. Its input's gradient holds 1e4 times the sum of dz, which is zero.
OFFSETS = Cases(
    [
        replace(case, frozen=("input",) if case.linear else ())
        for (name, settings), offset, dtype in product(
            EVERY_OPTION.items(), [1e4, -1e4], [torch.float32, torch.float64]
        )
        for case in both(f"{name} at {offset:g} in {dtype}", dtype=dtype, offset=offset, grid=0.125, **settings)
        if (case.linear or case.function != "row_loss") and not (dtype == torch.float64 and offset < 0)
    ]
)


@pytest.mark.parametrize("tp", [1, 3])
@OFFSETS.each
def test_offsets_of_ten_thousand_cost_no_digit(case, tp):
    OFFSETS.check(case, tp)


FAR_APART = Cases(  # exp(m - M) of a shard is 0, and yet a target may have mass there
    [
        replace(case, bias=case.linear, chunk_size=3 if case.linear else None)
        for name, settings in EVERY_OPTION.items()
        for case in both(f"{name}, logits far apart", scale=1000.0, weighted="function" not in settings, **settings)
        if case.linear or case.function != "row_loss"
    ]
)


@pytest.mark.parametrize("tp", [3])
@FAR_APART.each
def test_shards_whose_probabilities_underflow(case, tp):
    FAR_APART.check(case, tp)


EDGES = Cases(
    [
        replace(case, every_id=True, ignored="none", leading=(case.vocab,))
        for vocab, multiple_of in [(9, 1), (13, 4), (8, 2)]
        for settings in (
            {"outputs": OUTPUTS, "options": {"reduction": "none", "label_smoothing": 0.1}},
            {"function": "token_logprobs"},
        )
        for case in both(
            f"every id of {vocab} {settings.get('function', '')}", vocab=vocab, multiple_of=multiple_of, **settings
        )
    ],
    on_two=True,
)


@EDGES.each_on_two
def test_targets_at_every_edge_of_every_shard(case, tp):
    EDGES.check(case, tp)


def _ignored_rows(rank, case):
    """Loss and gradients with something in the ignored rows, and with zeros there."""
    shard = shard_of(case.vocab)
    results = []
    for filling in (torch.nan, torch.inf, -torch.inf, 0.0):
        tensors = whole(case)
        ignored = tensors["target"] == -100
        tensors["input"][ignored] = filling
        if case.function == "token_logprobs":  # the entropies of those rows are values like any other
            tensors["upstream"][ignored] = 0.0
        mine = local(case, tensors, shard)
        for name in case.names:
            mine[name].requires_grad_()
        outputs = loss.RowOutputs(*case.outputs) if case.outputs else None
        value = call(case, mine, shard, outputs)
        value.backward(mine["upstream"])
        gradients = [mine[name].grad for name in case.names]
        valid = mine["target"] != -100
        rows = [getattr(outputs, name)[valid] for name in case.outputs] if outputs else []
        value = value[valid] if case.function == "token_logprobs" else value
        results.append([value.detach(), *gradients, *rows])
    return results


IGNORED = Batch(
    _ignored_rows,
    [
        (replace(case, bias=case.linear),)
        for name, settings in {
            "": {"outputs": OUTPUTS},
            "none": {"outputs": OUTPUTS, "options": {"reduction": "none"}},
            "capped": {"options": {"softcap": 1.5, "temperature": 0.7, "z_loss": 0.1}},
            "smoothed": {"options": {"label_smoothing": 0.1, "softcap": 1.5}},
            "weighted": {"weighted": True, "options": {"z_loss": 0.1, "reduction": "none"}},
            "logprobs": {"function": "token_logprobs"},
        }.items()
        for case in both(f"ignored rows {name}", **settings)
    ]
    + [
        (Case("ignored rows, row loss", function="row_loss"),),
        (Case("ignored rows, row loss, none", function="row_loss", options={"reduction": "none"}),),
        (Case("ignored rows, uneven", spread="uneven", outputs=OUTPUTS, options={"reduction": "none"}),),
    ],
)


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", [case for (case,) in IGNORED.cases], ids=lambda case: case.name.replace(" ", "_"))
def test_what_ignored_rows_hold_changes_no_bit(case, tp):
    for rank, (*fillings, with_zeros) in enumerate(IGNORED(tp, case)):
        for filling, results in zip(("NaN", "inf", "-inf"), fillings, strict=True):
            for index, (one, other) in enumerate(zip(with_zeros, results, strict=True)):
                require_equal(f"result {index} on rank {rank}, zeros and {filling}", [one, other])


BFLOAT16 = Cases(
    [
        replace(case, bias=case.linear, leading=(24,), chunk_size=10 if case.linear else None)
        for name, settings in EVERY_OPTION.items()
        for case in both(f"{name} in bfloat16", dtype=torch.bfloat16, weighted="function" not in settings, **settings)
        if case.linear or case.function != "row_loss"
    ]
)


@pytest.mark.parametrize("tp", [2])
@BFLOAT16.each
def test_options_in_bfloat16_have_losses_in_float32_and_gradients_in_bfloat16(case, tp):
    BFLOAT16.check(case, tp)


def _any_upstream(rank, linear, options):
    """Upstream gradients as callers make them: of stride 0, zero, huge and tiny, and of one row."""
    case = Case("upstream", linear=linear, bias=linear, ignored="none", options=options)
    shard = shard_of(case.vocab)
    for make in (
        lambda rows: torch.ones((), dtype=torch.float64).expand(rows.shape),
        torch.zeros_like,
        lambda rows: torch.logspace(-200, 200, rows.numel(), dtype=torch.float64).reshape(rows.shape),
        lambda rows: -torch.nn.functional.one_hot(torch.tensor(3), rows.numel()).double(),
    ):
        tensors = whole(case)
        mine = local(case, tensors, shard)
        for name in case.names:
            mine[name].requires_grad_()
        value = call(case, mine, shard)
        upstream = make(value)
        value.backward(upstream)
        expected = oracle_gradients(case, tensors, upstream)
        shares = local(case, expected | {"target": tensors["target"]}, shard)
        for name in case.names:
            wanted = shares[name].nan_to_num(0.0)
            for row, other in zip(mine[name].grad, wanted, strict=True):  # each row on its own scale
                scale = other.abs().max().clamp(min=1e-300)
                require_close(f"d_{name}", row / scale, other / scale, torch.float64)


def oracle_gradients(case, tensors, upstream):
    wholes = {name: tensors[name].detach().clone().requires_grad_() for name in case.names}
    logits = reference.logits(*wholes.values()) if case.linear else wholes["input"]
    reference.cross_entropy(logits, tensors["target"], **case.options).backward(upstream)
    return {name: tensor.grad for name, tensor in wholes.items()}


UPSTREAM = Batch(
    _any_upstream,
    [
        (linear, {"reduction": "none"} | options)
        for linear in (False, True)
        for options in ({}, {"z_loss": 0.1, "softcap": 1.5, "label_smoothing": 0.1})
    ],
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", UPSTREAM.cases, ids=str)
def test_any_gradient_of_the_rows(case, tp):
    UPSTREAM(tp, *case)


def _same_bits_by_default(rank):
    """Saying a default, or weights of one, changes nothing."""
    shard = shard_of(9)
    said = {"z_loss": 0.0, "softcap": None, "temperature": 1.0, "row_weight": None, "mean_group": None, "outputs": None}
    for linear, options in product(
        [False, True], [said, {"row_weight": torch.ones(7)}, {"row_weight": torch.ones(7).bfloat16()}]
    ):
        case = Case("defaults", linear=linear, dtype=torch.float32, options={"reduction": "none"})
        mine = local(case, whole(case), shard)
        mine["input"].requires_grad_()
        plain, other = call(case, mine, shard), call(replace(case, options=case.options | options), mine, shard)
        grads = [torch.autograd.grad(one, mine["input"], mine["upstream"].float())[0] for one in (plain, other)]
        require_equal("loss", [plain.detach(), other.detach()])
        require_equal("gradient", grads)


def test_defaults_and_weights_of_one_change_no_bit():
    run_ranks(_same_bits_by_default, 2)


def test_one_collector_holds_the_rows_of_the_latest_loss():
    rows, shard = loss.RowOutputs("lse", "correct"), VocabShard(VocabLayout(9, 1, multiple_of=1))
    for leading in ((3,), (2, 5)):
        case = Case("latest", linear=False, leading=leading)
        tensors = whole(case)
        call(case, tensors, shard, rows)
        require_close("lse", rows.lse, tensors["input"].logsumexp(-1), torch.float64)
        assert rows.correct.shape == leading


def test_one_rank_alone_runs_each_case_of_the_options():
    """Without torch.distributed at all."""
    assert not dist.is_initialized()
    for case in (OPTIONS.cases[0][0], SOFT.cases[0][0], KL.cases[1][0], OUT.cases[0][0]):
        tensors = whole(case)
        shard = VocabShard(VocabLayout(case.vocab, 1, multiple_of=case.multiple_of))
        require_close("loss", call(case, local(case, tensors, shard), shard), oracle(case)["loss"], torch.float64)
        assert shard.traffic.total_calls == 0
