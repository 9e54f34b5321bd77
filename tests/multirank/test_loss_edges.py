"""Both losses where values are not finite, padding is filled, arguments are strided, and callers do as they like."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.multirank.sharded import TP, Case, both, call, compare, local, oracle, run_case, shard_of, whole
from tests.multirank.shared_world import Batch
from tests.ranks import run_ranks
from tests.tolerances import require_close, require_equal
from vocab_parallel import VocabLayout, VocabShard, cross_entropy, linear_cross_entropy, reference


def _with_minus_infinity(rank, linear):
    """Some logits of -inf, among them a rank's whole shard; targets stay on finite ones."""
    shard = shard_of(9)
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(5, 9, generator=generator, dtype=torch.float64)
    logits[0, 2], logits[1, :3], logits[2, 4:], logits[3, 1:] = (-torch.inf,) * 4
    target = torch.tensor([0, 7, 3, 0, 8])
    mine = shard.slice(logits, -1, fill=torch.nan).requires_grad_()
    loss = cross_entropy(mine, target, shard=shard, reduction="none")
    loss.backward(torch.arange(1.0, 6.0, dtype=torch.float64))
    whole_logits = logits.clone().requires_grad_()
    expected = reference.cross_entropy(whole_logits, target, reduction="none")
    expected.backward(torch.arange(1.0, 6.0, dtype=torch.float64))
    require_close("loss", loss.detach(), expected.detach(), torch.float64)
    valid = slice(shard.start, shard.stop)
    require_close("d_logits", mine.grad[:, : shard.num_valid], whole_logits.grad[:, valid], torch.float64)
    if linear:  # -inf from a bias: the whole column
        input, weight = torch.randn(5, 4, generator=generator).double(), torch.randn(9, 4, generator=generator).double()
        bias = torch.zeros(9, dtype=torch.float64)
        bias[3:6] = -torch.inf
        target = torch.tensor([0, 7, 2, 0, 8])
        local = [input.clone(), shard.slice(weight), shard.slice(bias)]
        wholes = [input.clone(), weight.clone(), bias.clone()]
        for tensor in local + wholes:
            tensor.requires_grad_()
        linear_cross_entropy(local[0], local[1], target, shard=shard, linear_bias=local[2]).backward()
        reference.linear_cross_entropy(wholes[0], wholes[1], target, bias=wholes[2]).backward()
        require_close("d_input", local[0].grad, wholes[0].grad, torch.float64)
        require_close("d_weight", local[1].grad[: shard.num_valid], wholes[1].grad[valid], torch.float64)
        require_close("d_bias", local[2].grad[: shard.num_valid], wholes[2].grad[valid], torch.float64)


@TP
@pytest.mark.parametrize("linear", [False, True])
def test_a_shard_of_minus_infinity_contributes_nothing(tp, linear):
    run_ranks(_with_minus_infinity, tp, linear)


def _nan_in_ignored_rows(rank, case):
    """Losses and gradients with NaN in the ignored rows' input, and with zeros there."""
    shard = shard_of(case.vocab)
    results = []
    for filling in (torch.nan, torch.inf, -torch.inf, 0.0):
        tensors = whole(case)
        tensors["input"][tensors["target"] == -100] = filling
        mine = local(case, tensors, shard)
        for name in case.names:
            mine[name].requires_grad_()
        loss = call(case, mine, shard)
        loss.backward(mine["upstream"].to(loss.dtype))
        gradients = [mine[name].grad for name in case.names]
        if case.linear:
            gradients[1] = gradients[1][: shard.num_valid]
        results.append([loss.detach(), *gradients])
    return results


NAN = Batch(
    _nan_in_ignored_rows,
    [
        (case,)
        for case in [
            *both("none", options={"reduction": "none"}),
            *both("mean", options={"reduction": "mean"}),
            *both("smoothing", options={"label_smoothing": 0.1}),
            Case("linear: sequence parallel", spread="uneven"),
            Case("linear: chunks", chunk_size=2),
            Case("linear: bias", bias=True),
        ]
    ],
)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", [case for (case,) in NAN.cases], ids=lambda case: case.name.replace(" ", "_"))
def test_ignored_rows_may_hold_nan_without_poisoning_anything(case, tp):
    for rank, (*fillings, with_zeros) in enumerate(NAN(tp, case)):
        for index, name in enumerate(["loss", *case.names]):
            for filling, results in zip(("NaN", "inf", "-inf"), fillings, strict=True):
                require_equal(f"{name} on rank {rank}, zeros and {filling}", [with_zeros[index], results[index]])


def _with_padding(rank, linear, filling):
    shard = shard_of(5, 4)
    case = Case("padding", linear=linear, vocab=5, multiple_of=4, bias=linear)
    mine = local(case, whole(case), shard)
    sharded = {"weight": 0, "bias": 0} if linear else {"input": -1}
    for name, dim in sharded.items():
        mine[name].narrow(dim, shard.num_valid, shard.shard_size - shard.num_valid).fill_(filling)
    for name in case.names:
        mine[name].requires_grad_()
    loss = call(case, mine, shard)
    loss.backward()
    for name, dim in sharded.items():
        padding = mine[name].grad.narrow(dim, shard.num_valid, shard.shard_size - shard.num_valid)
        assert bool((padding == 0).all()), f"padding of {name} has a gradient"
    return [loss.detach(), *(mine[name].grad for name in case.names)]


FILLINGS = [0.0, float("nan"), 1e30, float("inf")]
PADDING = Batch(_with_padding, list(product([False, True], FILLINGS)))


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("linear", [False, True])
def test_what_padding_holds_changes_no_bit(tp, linear):
    fillings = [PADDING(tp, linear, filling) for filling in FILLINGS]
    for rank in range(tp):
        for index in range(len(fillings[0][rank])):
            require_equal(f"result {index} of rank {rank}", [filling[rank][index] for filling in fillings])


def _not_contiguous(rank):
    """Transposed and strided arguments, as a [s, b, D] model hands them over."""
    case = Case("strided", leading=(4, 3), options={"reduction": "none"})
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    plain = call(case, mine, shard)
    mine["input"] = mine["input"].transpose(0, 1).contiguous().transpose(0, 1).requires_grad_()
    mine["weight"] = mine["weight"].T.contiguous().T.requires_grad_()
    mine["target"] = mine["target"].T.contiguous().T
    strided = call(case, mine, shard)
    strided.backward(mine["upstream"].T.contiguous().T)
    require_close("loss", strided.detach(), plain, torch.float64)
    expanded = call(case, mine, shard).sum()
    expanded.backward()  # the gradient of sum() is an expanded tensor of stride 0
    assert mine["input"].grad.isfinite().all()
    logits = torch.randn(9, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    target = torch.arange(6)
    transposed = shard.slice(logits, 0).T.requires_grad_()
    contiguous = shard.slice(logits.T, 1).requires_grad_()
    losses = [cross_entropy(z, target, shard=shard) for z in (transposed, contiguous)]
    gradients = [torch.autograd.grad(loss, z)[0] for loss, z in zip(losses, (transposed, contiguous), strict=True)]
    require_close("loss of transposed logits", losses[0].detach(), losses[1].detach(), torch.float64)
    require_close("gradient of transposed logits", gradients[0], gradients[1], torch.float64)


def test_arguments_need_not_be_contiguous():
    run_ranks(_not_contiguous, 2)


def _settings_of_the_caller(rank):
    """Autocast, inference mode, accumulation, narrow targets, and calls larger than any before."""
    shard = shard_of(9)
    case = Case("settings", leading=(11,), dtype=torch.float32, bias=True)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    loss = call(case, mine, shard)
    with torch.inference_mode():
        require_equal("loss in inference mode", [loss.detach(), call(case, mine, shard).clone()])
    for dtype in (torch.int32, torch.int16, torch.int8):
        require_equal(f"{dtype} targets", [loss, call(case, mine | {"target": mine["target"].to(dtype)}, shard)])
    once = torch.autograd.grad(loss, [mine[name] for name in case.names])
    for _ in range(2):
        call(case, mine, shard).backward()
    for name, gradient in zip(case.names, once, strict=True):
        require_close(f"two backwards accumulate in {name}", mine[name].grad, 2 * gradient, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = call(case, mine, shard)
    low = {name: tensor.detach().bfloat16() if name in case.names else tensor for name, tensor in mine.items()}
    require_equal("loss under autocast", [call(case, low, shard), mixed.detach()])
    for name, gradient in zip(case.names, torch.autograd.grad(mixed, [mine[n] for n in case.names]), strict=True):
        assert gradient.dtype == torch.float32, f"{name} under autocast"
    large = replace(case, leading=(9001,), chunk_size=4500)
    mine = local(large, whole(large), shard)
    expected = oracle(replace(large, frozen=tuple(case.names)))["loss"]
    for attempt in range(2):
        require_close(f"large call {attempt}", call(large, mine, shard), expected, torch.float32)
    require_close("a small call after it", call(case, local(case, whole(case), shard), shard), loss, torch.float32)


@pytest.mark.parametrize("tp", [1, 2])
def test_autocast_inference_mode_accumulation_narrow_targets_and_large_calls(tp):
    run_ranks(_settings_of_the_caller, tp)


def _both_losses_agree(rank, options):
    case = Case("agree", bias=True, options=options)
    shard = shard_of(case.vocab)
    mine = local(case, whole(case), shard)
    logits = torch.nn.functional.linear(mine["input"], mine["weight"], mine["bias"])
    fused = call(case, mine, shard)
    require_close("loss", fused, cross_entropy(logits, mine["target"], shard=shard, **options), torch.float64)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_the_fused_loss_equals_the_loss_of_the_logits(reduction):
    run_ranks(_both_losses_agree, 3, {"reduction": reduction, "label_smoothing": 0.1, "smoothing_over": "others"})


def _two_groups(rank, cases):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    crossed = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return [run_case(rank, cases[rank // 2], groups[rank // 2]), run_case(rank, cases[rank % 2], crossed[rank % 2])]


@pytest.mark.parametrize("spread", [None, "uneven"])
def test_two_groups_side_by_side_with_different_data_do_not_meet(spread):
    cases = [
        Case("first", seed=1, spread=spread, chunk_size=2, bias=True),
        Case("second", seed=2, spread=spread, chunk_size=3, vocab=11, leading=(6,), options={"reduction": "sum"}),
    ]
    results = run_ranks(_two_groups, 4, cases)
    for index, case in enumerate(cases):
        expected = oracle(case)
        compare(case, [results[2 * index][0], results[2 * index + 1][0]], expected)
        compare(case, [results[index][1], results[index + 2][1]], expected)


def test_one_rank_needs_no_process_group():
    assert not dist.is_initialized()
    shard = VocabShard(VocabLayout(9, 1, multiple_of=4))
    case = Case("alone", multiple_of=4, bias=True)
    tensors = whole(case)
    loss = call(case, local(case, tensors, shard), shard)
    require_close("loss", loss, oracle(case)["loss"], torch.float64)
    assert shard.traffic.total_calls == 0


def _differences(rank, options):
    """The gradient of the input by central differences of the sharded loss itself, without the oracle."""
    shard = shard_of(5)
    case = Case("differences", vocab=5, leading=(3,), hidden=2, ignored="none", bias=True, options=options)
    mine = local(case, whole(case), shard)
    input = mine["input"].clone().requires_grad_()
    call(case, mine | {"input": input}, shard).sum().backward()
    for index in range(input.numel()):
        step = torch.zeros_like(mine["input"])
        step.view(-1)[index] = 1e-5
        above, below = (call(case, mine | {"input": mine["input"] + sign * step}, shard).sum() for sign in (1, -1))
        slope = (above - below) / 2e-5
        assert abs(slope - input.grad.view(-1)[index]) < 1e-8, f"entry {index}: {slope} by differences"


@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_gradients_are_the_slopes_of_the_sharded_loss(reduction):
    run_ranks(_differences, 2, {"reduction": reduction, "label_smoothing": 0.3, "smoothing_over": "others"})
