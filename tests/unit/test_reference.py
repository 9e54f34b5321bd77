"""The oracle against PyTorch where PyTorch has the same thing, and against the definition where it has not."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from vocab_parallel import reference


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def close(left, right):
    assert left.dtype == right.dtype and left.shape == right.shape
    assert torch.allclose(left, right, rtol=1e-12, atol=1e-13), (left, right)


TARGET = torch.tensor([0, 8, -100, 3, 3, -100, 1])


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("ignore_index", [-100, 3])
def test_cross_entropy_and_its_gradient_are_pytorchs(reduction, label_smoothing, ignore_index):
    target = TARGET.where(TARGET != -100, ignore_index)
    options = {"reduction": reduction, "label_smoothing": label_smoothing, "ignore_index": ignore_index}
    ours, theirs = draw(7, 9).requires_grad_(), draw(7, 9).requires_grad_()
    left = reference.cross_entropy(ours, target, **options)
    right = functional.cross_entropy(theirs, target, **options)
    close(left, right)
    upstream = draw(7, seed=1) if reduction == "none" else draw(1, seed=1)[0]
    left.backward(upstream)
    right.backward(upstream)
    close(ours.grad, theirs.grad)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.1, 0.7])
def test_smoothing_over_the_others_puts_the_mass_on_them_and_none_on_the_target(label_smoothing):
    logits, target = draw(4, 5), torch.tensor([0, 4, 2, 2])
    q = torch.full((4, 5), label_smoothing / 4, dtype=torch.float64)
    q[torch.arange(4), target] = 1 - label_smoothing
    close(
        reference.cross_entropy(
            logits, target, reduction="none", label_smoothing=label_smoothing, smoothing_over="others"
        ),
        functional.cross_entropy(logits, q, reduction="none"),
    )


def test_smoothing_conventions_are_the_same_distribution_at_other_strengths():
    """Over all classes with `a (V - 1) / V` on the others is over the others with `a (V - 1) / V`."""
    logits, target = draw(4, 5), torch.tensor([0, 4, 2, 2])
    close(
        reference.cross_entropy(logits, target, label_smoothing=0.5),
        reference.cross_entropy(logits, target, label_smoothing=0.5 * 4 / 5, smoothing_over="others"),
    )


@pytest.mark.parametrize("smoothing_over", ["all", "others"])
def test_a_vocabulary_of_one_has_no_loss(smoothing_over):
    loss = reference.cross_entropy(draw(3, 1), torch.zeros(3, dtype=torch.int64), label_smoothing=0.1,
                                   smoothing_over=smoothing_over)  # fmt: skip
    close(loss, torch.zeros((), dtype=torch.float64))


def test_all_rows_ignored_or_none_given_is_zero_with_zero_gradient():
    for logits in (draw(3, 5), draw(0, 5)):
        logits.requires_grad_()
        loss = reference.cross_entropy(logits, torch.full((len(logits),), -100))
        loss.backward()
        assert loss == 0
        assert logits.grad.shape == logits.shape and (logits.grad == 0).all()


def test_leading_shapes_are_kept():
    logits, target = draw(2, 3, 5), torch.tensor([[0, 1, 2], [3, 4, -100]])
    rows = reference.cross_entropy(logits, target, reduction="none")
    close(rows, functional.cross_entropy(logits.permute(0, 2, 1), target, reduction="none"))


def test_linear_cross_entropy_is_the_loss_of_the_projection():
    input, weight, bias = draw(7, 4), draw(9, 4, seed=1), draw(9, seed=2)
    close(
        reference.linear_cross_entropy(input, weight, TARGET, bias=bias, label_smoothing=0.1),
        functional.cross_entropy(functional.linear(input, weight, bias), TARGET, label_smoothing=0.1),
    )
    close(reference.logits(input, weight), functional.linear(input, weight))


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_embedding_is_pytorchs(padding_idx):
    ids = torch.tensor([[0, 3], [3, 8]])
    ours, theirs = draw(9, 4).requires_grad_(), draw(9, 4).requires_grad_()
    left = reference.embedding(ids, ours, padding_idx=padding_idx)
    right = functional.embedding(ids, theirs, padding_idx=padding_idx)
    close(left, right)
    left.square().sum().backward()
    right.square().sum().backward()
    close(ours.grad, theirs.grad)


def test_selection_follows_value_then_id_and_zero_has_no_sign():
    logits = torch.tensor([[-1.0, 0.0, -0.0, 2.0, 2.0], [-5.0, -5.0, -torch.inf, -5.0, -6.0]])
    assert reference.greedy(logits).tolist() == [3, 0]
    values, ids = reference.top_k(logits, 5)
    assert ids.tolist() == [[3, 4, 1, 2, 0], [0, 1, 3, 4, 2]]
    assert values[0].tolist() == [2.0, 2.0, 0.0, 0.0, -1.0]
