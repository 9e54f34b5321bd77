"""Failures 15 to 20: what goes into the training loss."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.failures.lab import failure, refusal, the_same_on_all, whole_shard
from tests.multirank.loss_case import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import ConfigError, RowOutputs, VocabParallelLMHead, cross_entropy, kl_div, linear_kl_div
from vocab_parallel.app.data import Stream

VOCAB, WIDTH, SHAPE = 9, 6, (2, 5)  # B, S


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS, TEACHER = 2.0 * normal(*SHAPE, VOCAB), 2.0 * normal(*SHAPE, VOCAB, seed=1)
HIDDEN = normal(*SHAPE, WIDTH, seed=2)
IDS = torch.randint(0, VOCAB, SHAPE, generator=torch.Generator().manual_seed(3))


def with_bad_padding(shard):
    target = IDS.clone()
    target[1, 3:] = -1
    return cross_entropy(shard.slice(LOGITS, -1), target, shard=shard)


CALLS = {
    "probabilities to the head": lambda shard: VocabParallelLMHead(WIDTH, shard=shard, dtype=torch.float64).loss(
        shard.slice(LOGITS.softmax(-1), -1), IDS
    ),
    "logits as log-probabilities": lambda shard: kl_div(
        shard.slice(LOGITS, -1), shard.slice(TEACHER, -1), shard=shard, log_target=True
    ),
    "logits as log-probabilities, fused": lambda shard: linear_kl_div(
        HIDDEN, torch.ones(shard.shard_size, WIDTH).double(), shard.slice(TEACHER, -1), shard=shard, log_target=True
    ),
    "log-probabilities as probabilities": lambda shard: kl_div(
        shard.slice(LOGITS, -1), shard.slice(TEACHER.log_softmax(-1), -1), shard=shard
    ),
    "chosen ids": lambda shard: cross_entropy(LOGITS.argmax(-1), IDS, shard=shard),
    "chosen ids as numbers": lambda shard: cross_entropy(LOGITS.argmax(-1).double(), IDS, shard=shard),
    "time last": lambda shard: cross_entropy(shard.slice(LOGITS, -1).transpose(1, 2), IDS, shard=shard),
    "flattened to time": lambda shard: cross_entropy(
        shard.slice(LOGITS, -1).reshape(-1, 2), IDS.flatten(), shard=shard
    ),
    "padding labels of -1": with_bad_padding,
}


def _refused(rank, name):
    return refusal(CALLS[name], shard_of(VOCAB))


REFUSED = Batch(_refused, [(name,) for name in CALLS])


def refused(name):
    """The error of a call at 4 ranks, with an empty shard, and at 3."""
    return [the_same_on_all(REFUSED(tp, name)) for tp in (3, 4)]


@failure(
    15, "Probabilities given to a loss that takes logits", "shown",
    "The head's loss takes hidden states, so there are no scores to spoil, and probabilities in their place have "
    "another width, an error on every rank; the test shows the floor under which the careless loss cannot fall.",
)  # fmt: skip
def test_the_heads_loss_has_no_place_for_probabilities():
    shard = whole_shard(VOCAB)
    certain = 50.0 * F.one_hot(IDS, VOCAB).double()  # a model that is right, and sure of it
    careless = cross_entropy(certain.softmax(-1), IDS, shard=shard)
    floor = math.log(VOCAB - 1 + math.e) - 1.0
    assert math.isclose(float(careless), floor, rel_tol=1e-9) and floor > 1.3
    head = VocabParallelLMHead(VOCAB, shard=shard, dtype=torch.float64)
    head.load_state_dict({"weight": torch.eye(VOCAB, dtype=torch.float64)})
    assert float(head.loss(certain, IDS).detach()) < 1e-12
    for kind, message in refused("probabilities to the head"):
        assert kind == "LayoutMismatchError" and "disagree: expected [..., D] and [shard_size, D]" in message


@failure(
    16, "Logits given to a divergence that takes log-probabilities", "refused",
    "The student's side takes logits and normalises them itself; a target whose probabilities are below 0 or, as "
    "logarithms, sum to more than 1 is an error on every rank, seen in the loss's own exchange.",
)  # fmt: skip
def test_a_divergence_from_logits_is_refused():
    log_p, log_q = LOGITS.log_softmax(-1), TEACHER.log_softmax(-1)
    right = (log_q.exp() * (log_q - log_p)).sum(-1).mean()
    careless = F.kl_div(LOGITS, log_q, log_target=True, reduction="sum") / IDS.numel()
    assert right > 0.0 and not torch.allclose(careless, right, rtol=0.1)
    for kind, message in refused("logits as log-probabilities") + refused("logits as log-probabilities, fused"):
        assert kind == "ValueError" and "sum to" in message and "these look like logits" in message
    for kind, message in refused("log-probabilities as probabilities"):
        assert kind == "ValueError" and "the target of row 0 holds a probability below 0" in message
    shard = whole_shard(VOCAB)
    for student in (LOGITS, log_p):
        assert torch.allclose(kl_div(student, log_q, shard=shard, log_target=True), right)
        assert torch.allclose(kl_div(student, log_q.exp(), shard=shard), right)
    left_out = torch.ones(SHAPE, dtype=torch.float64)
    left_out[0] = 0.0  # rows of padding may hold anything
    target = torch.where(left_out[..., None] > 0, log_q, 0.0)
    loss = kl_div(LOGITS, target, shard=shard, log_target=True, row_weight=left_out, reduction="sum")
    assert torch.allclose(loss, (log_q.exp() * (log_q - log_p))[1].sum())


@pytest.mark.parametrize("largest", [0.0, 20.0, 50.0, 100.0])
def test_log_probabilities_that_bfloat16_has_rounded_are_no_logits(largest):
    """Those of the row's own logsumexp too, which is rounded by up to a quarter."""
    logits = (2.0 * normal(64, 512, seed=4) + largest).bfloat16()
    student, shard = torch.zeros(64, 512), whole_shard(512)
    for log_q in (logits.log_softmax(-1), logits - logits.logsumexp(-1, keepdim=True), logits.softmax(-1).log()):
        assert torch.isfinite(kl_div(student, log_q, shard=shard, log_target=True))
    assert torch.isfinite(cross_entropy(student, logits.softmax(-1), shard=shard))


@failure(
    17, "An argmax before the training loss", "refused",
    "Chosen ids are no floating scores, nor have they the shard's columns: an error on every rank; who wants the "
    "decisions beside the loss asks for them as `RowOutputs`, and the gradient stays whole.",
)  # fmt: skip
def test_decisions_are_no_scores():
    for kind, message in refused("chosen ids"):
        assert kind == "LayoutMismatchError" and "logits must be a floating tensor" in message
    for kind, message in refused("chosen ids as numbers"):
        assert kind == "LayoutMismatchError" and "another axis than the vocabulary" in message
    logits, rows = LOGITS.clone().requires_grad_(), RowOutputs("argmax", "correct")
    assert not LOGITS.argmax(-1).double().requires_grad  # where a careless loss would end
    cross_entropy(logits, IDS, shard=whole_shard(VOCAB), outputs=rows).backward()
    assert torch.equal(rows.argmax, LOGITS.argmax(-1)) and torch.equal(rows.correct, LOGITS.argmax(-1) == IDS)
    expected = (LOGITS.softmax(-1) - F.one_hot(IDS, VOCAB)) / IDS.numel()
    assert torch.allclose(logits.grad, expected)


@failure(
    18, "Time taken for the class axis", "refused",
    "The last dimension is the vocabulary and must have the shard's columns, the others are rows and must be the "
    "target's: nothing is flattened by the caller, and another order is an error on every rank.",
)  # fmt: skip
def test_the_vocabulary_is_the_last_axis_or_nothing():
    moved = F.cross_entropy(LOGITS.reshape(-1, VOCAB), IDS.flatten())
    by_time = LOGITS.transpose(1, 2).reshape(-1, SHAPE[1])  # [B V, S]: a loss of 18 rows over 5 "classes"
    careless = F.cross_entropy(by_time, torch.arange(len(by_time)) % SHAPE[1])
    assert not torch.allclose(careless, moved, rtol=0.1)
    for kind, message in refused("time last") + refused("flattened to time"):
        assert kind == "LayoutMismatchError" and "another axis than the vocabulary" in message
    whole = cross_entropy(LOGITS, IDS, shard=whole_shard(VOCAB))  # [B, S, V] as it is
    assert torch.allclose(whole, moved)


@failure(
    19, "Labels shifted by the data and by the model", "refused",
    "Losses never shift; a converted Transformers model does, once, and labels that are the following ids already are "
    "an error on every rank; the app's data gives targets one place ahead.",
)  # fmt: skip
def test_labels_are_shifted_once():
    from tests.integrations.transformers_models import build
    from vocab_parallel.integrations import transformers as vp

    model, ids = build("llama", 19), torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    shifted = F.pad(ids, (0, 1), value=-100)[:, 1:]
    once, twice = model(ids, labels=ids).loss, model(ids, labels=shifted).loss
    assert not torch.allclose(once, twice, rtol=0.01)  # and nothing says so
    vp.apply(model, shard=whole_shard(19))
    with pytest.raises(ConfigError, match="labels are shifted already: at all 7 places"):
        model(ids, labels=shifted)
    assert torch.allclose(model(ids, labels=ids).loss, once)
    assert torch.allclose(model(ids, labels=ids, shift_labels=shifted).loss, once)
    prompt = ids.clone()
    prompt[:, :5] = -100  # only the answer is trained
    assert model(ids, labels=prompt).loss.isfinite()
    tokens = np.arange(20, dtype=np.int32)
    inputs, targets = Stream(tokens, np.array([0]), np.array([20])).windows(np.array([2, 9]), 5)
    assert (targets == inputs + 1).all()


@failure(
    20, "Padding trained as if it were text", "shown",
    "Rows of `ignore_index`, which may be the padding's own id, have no loss and no gradient and do not count in "
    "the mean; a padding label outside the vocabulary that is not `ignore_index` is an error on every rank.",
)  # fmt: skip
def test_padding_is_ignored_or_refused():
    for kind, message in refused("padding labels of -1"):
        assert kind == "TargetRangeError" and "target -1 at row 8 is outside [0, 9)" in message
    head, pad = VocabParallelLMHead(WIDTH, shard=whole_shard(VOCAB), dtype=torch.float64), 0
    head.reset_parameters(std=1.0)
    real = IDS.clone().clamp(min=1)  # id 0 is nowhere in the text
    trained, ignored = real.clone(), real.clone()
    trained[1, 2:], ignored[1, 2:] = pad, -100
    hidden = HIDDEN.clone().requires_grad_()
    loss = head.loss(hidden, ignored)
    assert torch.allclose(loss, F.cross_entropy((HIDDEN @ head.weight.T).flatten(0, 1), ignored.flatten()))
    loss.backward()
    assert bool((hidden.grad[1, 2:] == 0).all()) and bool((hidden.grad[0] != 0).any())
    careless = head.loss(HIDDEN, trained)
    assert not torch.allclose(careless, loss, rtol=1e-3)
    by_id = head.loss(HIDDEN, trained, ignore_index=pad)  # where the padding has an id of its own
    assert torch.allclose(by_id, loss)
