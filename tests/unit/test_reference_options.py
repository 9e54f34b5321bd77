"""The oracle's loss options, outputs and divergences, against PyTorch, the definition written out, and differences."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import gradcheck
from torch.distributions import Categorical
from torch.nn import functional

from vocab_parallel import reference

V = 9
TARGET = torch.tensor([0, 8, -100, 3, 3, -100, 1])
INF = torch.inf


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape
    assert torch.allclose(left, right, rtol=1e-12, atol=1e-13), (left, right)


def same_with_gradient(ours, theirs, logits):
    """Two losses of the same logits, and their gradients under one arbitrary upstream gradient."""
    one, two = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    left, right = ours(one), theirs(two)
    close(left, right)
    upstream = draw(left.numel(), seed=9).reshape(left.shape)
    left.backward(upstream)
    right.backward(upstream)
    close(one.grad, two.grad)


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
def test_a_floating_target_is_pytorchs_probability_target(reduction, label_smoothing):
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    q = draw(7, V, seed=1).exp()  # sums to what it likes
    same_with_gradient(
        lambda z: reference.cross_entropy(z, q, **options),
        lambda z: functional.cross_entropy(z, q, **options),
        draw(7, V),
    )


def test_a_one_hot_distribution_is_the_id():
    ids = torch.tensor([[0, 8], [3, 3]])
    q = functional.one_hot(ids, V).double()
    same_with_gradient(
        lambda z: reference.cross_entropy(z, q, z_loss=0.1, label_smoothing=0.2),
        lambda z: reference.cross_entropy(z, ids, z_loss=0.1, label_smoothing=0.2),
        draw(2, 2, V),
    )


@pytest.mark.parametrize("smoothing_over", ["all", "others"])
def test_every_option_together_equals_the_formula_written_row_by_row(smoothing_over):
    eps, z_loss, softcap, temperature = 0.1, 0.3, 1.5, 0.7
    weight = draw(7, seed=2).abs()

    def by_row(logits):
        total = 0.0
        for row, target in enumerate(TARGET.tolist()):
            if target == -100:
                continue
            z = [softcap * (x / softcap).tanh() / temperature for x in logits[row]]
            lse = sum(one.exp() for one in z).log()
            other = eps / V if smoothing_over == "all" else eps / (V - 1)
            at_target = 1 - eps + eps / V if smoothing_over == "all" else 1 - eps
            entropy = sum((at_target if v == target else other) * (lse - one) for v, one in enumerate(z))
            total = total + weight[row] * (entropy + z_loss * lse**2)
        return total / 5  # valid rows, whatever their weights

    options = {"label_smoothing": eps, "smoothing_over": smoothing_over, "z_loss": z_loss, "softcap": softcap}
    same_with_gradient(
        lambda x: reference.cross_entropy(x, TARGET, temperature=temperature, row_weight=weight, **options),
        by_row,
        3 * draw(7, V),
    )


def test_a_weight_of_zero_is_still_a_row_of_the_mean():
    logits, target = draw(4, V), torch.tensor([1, -100, 3, 4])
    loss = reference.cross_entropy(logits, target, row_weight=torch.tensor([1.0, 1.0, 0.0, 0.0]))
    close(loss, functional.cross_entropy(logits[:1], target[:1]) / 3)


def test_float64_stays_float64_whatever_the_weights_dtype():
    loss = reference.cross_entropy(draw(7, V), TARGET, row_weight=torch.full((7,), 0.5))
    close(loss, functional.cross_entropy(draw(7, V), TARGET) / 2)
    assert reference.cross_entropy(draw(7, V).float(), TARGET, row_weight=draw(7)).dtype == torch.float32


def test_z_loss_is_the_square_of_pytorchs_logsumexp():
    with_it, without = (reference.cross_entropy(draw(7, V), TARGET, reduction="none", z_loss=c) for c in (0.5, 0.0))
    close(with_it - without, torch.where(TARGET == -100, 0.0, 0.5 * draw(7, V).logsumexp(1) ** 2))


@pytest.mark.parametrize("log_target", [False, True])
@pytest.mark.parametrize(("ours", "theirs"), [("none", "none"), ("sum", "sum"), ("mean", "batchmean")])
def test_kl_div_is_pytorchs(log_target, ours, theirs):
    q = draw(7, V, seed=1).softmax(1)
    q[0, 3] = q[2, 5:] = 0.0
    target = q.log() if log_target else q

    def pytorch(z):
        rows = functional.kl_div(z.log_softmax(1), q, reduction=theirs)  # with log_target PyTorch's 0 log 0 is NaN
        return rows.sum(1) if theirs == "none" else rows

    same_with_gradient(
        lambda z: reference.kl_div(z, target, log_target=log_target, reduction=ours), pytorch, draw(7, V)
    )


def test_kl_div_differs_from_the_cross_entropy_by_the_targets_entropy():
    q, options = draw(7, V, seed=1).softmax(1), {"softcap": 2.0, "temperature": 0.6, "row_weight": draw(7, seed=4)}
    difference = reference.cross_entropy(draw(7, V), q, reduction="none", **options) - reference.kl_div(
        draw(7, V), q, reduction="none", **options
    )
    close(difference, Categorical(q).entropy() * options["row_weight"])


@pytest.mark.parametrize(
    "loss",
    [
        lambda z, q, target: reference.cross_entropy(z, q),
        lambda z, q, target: reference.cross_entropy(z, target),
        lambda z, q, target: reference.kl_div(z, q),
        lambda z, q, target: reference.kl_div(z, q.log(), log_target=True),
        lambda z, q, target: torch.stack(reference.token_logprobs(z, target)).sum(),
        lambda z, q, target: reference.distillation(z, q.log()).sum(),
        lambda z, q, target: reference.distillation(z, q.log(), divergence="reverse_kl").sum(),
        lambda z, q, target: reference.distillation(z, q.log(), divergence="jensen_shannon", beta=0.3).sum(),
    ],
)
def test_masked_ids_count_nothing_where_the_target_has_nothing(loss):
    logits, q, keep = draw(3, V), draw(3, V, seed=1).softmax(1), [0, 1, 2, 3, 6, 7, 8]
    masked, masked_q = logits.clone(), q.clone()
    masked[:, 4:6], masked_q[:, 4:6] = -INF, 0.0
    left, right = masked.requires_grad_(), logits[:, keep].clone().requires_grad_()
    one = loss(left, masked_q, torch.tensor([0, 8, -100]))
    two = loss(right, q[:, keep], torch.tensor([0, 6, -100]))
    close(one, two)
    one.backward()
    two.backward()
    close(left.grad[:, keep], right.grad)
    assert (left.grad[:, 4:6] == 0).all()


def test_ignored_rows_may_hold_anything():
    logits, target = draw(3, V), torch.tensor([1, -100, -100])
    logits[1], logits[2] = torch.nan, -INF
    logits.requires_grad_()
    loss = reference.cross_entropy(logits, target, label_smoothing=0.1, z_loss=0.1, softcap=3.0)
    loss.backward()
    assert loss.isfinite() and logits.grad[0].isfinite().all() and (logits.grad[1:] == 0).all()


def test_row_outputs_are_pytorchs():
    logits = 3 * draw(7, V)
    rows = reference.row_outputs(logits, TARGET, temperature=0.5, softcap=4.0)
    z = 4.0 * (logits / 4.0).tanh() / 0.5
    close(rows.logprob, -functional.cross_entropy(z, TARGET, reduction="none"))
    close(rows.entropy, Categorical(logits=z).entropy())
    close(rows.lse, z.logsumexp(1))
    assert rows.argmax.tolist() == z.argmax(1).tolist()
    assert rows.correct.tolist() == (z.argmax(1) == TARGET).tolist()
    two = z.topk(2).values
    close(rows.margin, two[:, 0] - two[:, 1])
    close(torch.stack(reference.token_logprobs(z, TARGET)), torch.stack([rows.logprob, rows.entropy]))


def test_row_outputs_of_ties_of_one_id_and_of_masked_ids():
    rows = reference.row_outputs(
        torch.tensor([[1.0, 2, 2], [-0.0, 0, -1], [-INF, 5, -INF]]), torch.tensor([1, 1, -100])
    )
    assert rows.argmax.tolist() == [1, 0, 1] and rows.correct.tolist() == [True, False, False]
    assert rows.margin.tolist() == [0, 0, INF] and rows.entropy[2] == 0
    assert reference.row_outputs(torch.zeros(2, 1), torch.tensor([0, -100])).margin.tolist() == [INF, INF]


def test_a_row_loss_is_the_callers_function_of_the_rows():
    input, weight, bias, old = draw(7, 4), draw(V, 4, seed=1), draw(V, seed=2), draw(7, seed=3)

    def surrogate(rows, old):
        return -(rows.logprob - old).exp() - 0.01 * rows.entropy + 0.1 * rows.lse

    loss = reference.linear_row_loss(input, weight, TARGET, surrogate, old, bias=bias, temperature=0.8)
    logprob, entropy = reference.linear_token_logprobs(input, weight, TARGET, bias=bias, temperature=0.8)
    lse = (functional.linear(input, weight, bias) / 0.8).logsumexp(1)
    rows = -(logprob - old).exp() - 0.01 * entropy + 0.1 * lse
    close(loss, rows[TARGET != -100].mean())


def test_linear_forms_are_those_of_the_projection():
    input, weight, bias, q = draw(7, 4), draw(V, 4, seed=1), draw(V, seed=2), draw(7, V, seed=3).softmax(1)
    logits = functional.linear(input, weight, bias)
    close(
        reference.linear_cross_entropy(input, weight, q, bias=bias, softcap=2.0),
        reference.cross_entropy(logits, q, softcap=2.0),
    )
    close(reference.linear_kl_div(input, weight, q, bias=bias), reference.kl_div(logits, q))


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergences_are_pytorchs(temperature):
    student, teacher = draw(7, V), draw(7, V, seed=1)
    s, t = (student / temperature).softmax(1), (teacher / temperature).softmax(1)

    def kl(p, q):
        return functional.kl_div(q.log(), p, reduction="none").sum(1)

    for name, beta, expected in [
        ("forward_kl", 0.5, kl(t, s)),
        ("reverse_kl", 0.5, kl(s, t)),
        ("jensen_shannon", 0.5, (kl(t, (s + t) / 2) + kl(s, (s + t) / 2)) / 2),
        ("jensen_shannon", 0.2, 0.2 * kl(t, 0.2 * t + 0.8 * s) + 0.8 * kl(s, 0.2 * t + 0.8 * s)),
    ]:
        close(reference.distillation(student, teacher, divergence=name, temperature=temperature, beta=beta), expected)


Q = draw(4, V, seed=1).softmax(1)
SOME = torch.tensor([0, 8, -100, 3])
ALL = {"z_loss": 0.2, "softcap": 2.0, "temperature": 0.7, "row_weight": draw(4, seed=2)}


@pytest.mark.parametrize(
    "function",
    [
        lambda z: reference.cross_entropy(z, SOME, reduction="none", label_smoothing=0.1, **ALL),
        lambda z: reference.cross_entropy(z, SOME, label_smoothing=0.1, smoothing_over="others", **ALL),
        lambda z: reference.cross_entropy(z, Q, reduction="sum", label_smoothing=0.1, **ALL),
        lambda z: reference.kl_div(z, Q, softcap=2.0, temperature=0.7),
        lambda z: reference.kl_div(z, Q.log(), log_target=True, reduction="none"),
        lambda z: reference.row_outputs(z, SOME, softcap=2.0, temperature=0.7)[:3],
        lambda z: reference.distillation(z, Q.log(), temperature=1.3),
        lambda z: reference.distillation(z, Q.log(), divergence="reverse_kl", temperature=1.3),
        lambda z: reference.distillation(z, Q.log(), divergence="jensen_shannon", beta=0.3),
    ],
    ids=["cross_entropy", "others", "soft", "kl_div", "log_target", "outputs", "forward_kl", "reverse_kl", "jensen"],
)
def test_gradients_are_slopes(function):
    assert gradcheck(function, (draw(4, V, seed=5).requires_grad_(),))
