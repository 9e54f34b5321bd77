"""Data-parallel ranks with different batches share one sharded vocabulary: equal to one process on all the batches."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

from tests.integrations.transformers_models import (
    FAMILIES,
    DdpBatch,
    batch,
    build,
    clip_plain,
    largest_difference,
    make_optimizer,
    make_shard,
    state_count,
    whole_parameters,
)
from tests.tolerances import require_equal
from vocab_parallel.gradient_norm import clip_gradients_
from vocab_parallel.integrations import transformers as vp

STEPS = 10
LOSSES = ["mean", "items", "uneven items", "logits"]


def shape(rank, step):
    """Rows and columns of a rank's batch: no two ranks have as many tokens."""
    return 1 + (rank + step) % 3, 4 + 2 * rank


def own_loss(model, ids, labels, items):
    return model(input_ids=ids, labels=labels, num_items_in_batch=items).loss


def valid_rows(labels):
    return int((labels[:, 1:] != -100).sum())


def logits_loss(model, ids, labels):
    """A loss of one's own, from the logits."""
    logits = model(input_ids=ids).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten())


def expected_loss(plain, vocab, step, world, kind):
    """What the ranks' average stands for, on one process."""
    batches = [batch(vocab, 1000 * rank + step, *shape(rank, step)) for rank in range(world)]
    counts = [valid_rows(labels) for _, labels in batches]
    means = [plain(input_ids=ids, labels=labels).loss for ids, labels in batches]
    if kind in ("mean", "items"):
        return sum(mean * count for mean, count in zip(means, counts, strict=True)) / sum(counts)
    return sum(means) / world


def _train(rank, family, vocab, multiple_of, kind):
    model = build(family, vocab)
    plain = copy.deepcopy(model)
    shard = make_shard(vocab, multiple_of)
    names = vp.apply(model, shard=shard, data_parallel=True)
    wrapped = DistributedDataParallel(model)
    optimizer, plain_optimizer = make_optimizer(model), make_optimizer(plain)
    world = shard.tp_size
    result = {"tied": vp.verify(wrapped, optimizer), "loss": [], "norm": [], "expected": [], "expected norm": []}
    for step in range(STEPS):
        ids, labels = batch(vocab, 1000 * rank + step, *shape(rank, step))
        counts = [valid_rows(batch(vocab, 1000 * r + step, *shape(r, step))[1]) for r in range(world)]
        if kind == "logits":
            loss = logits_loss(wrapped, ids, labels)
        else:
            items = {"mean": None, "items": sum(counts), "uneven items": counts[rank]}[kind]
            loss = own_loss(wrapped, ids, labels, items)
            loss = loss * world if kind == "items" else loss  # as the Trainer does
        optimizer.zero_grad()
        loss.backward()
        result["norm"].append(clip_gradients_(model, 1.0))
        optimizer.step()
        result["loss"].append(loss.detach())
        expected = expected_loss(plain, vocab, step, world, kind)
        plain_optimizer.zero_grad()
        expected.backward()
        result["expected norm"].append(clip_plain(plain, 1.0).double())
        plain_optimizer.step()
        result["expected"].append(expected.detach())
    for key in ("loss", "norm", "expected", "expected norm"):
        result[key] = torch.stack(result[key])
    vp.verify(wrapped, optimizer)
    return result | {
        "names": names, "states": state_count(model, optimizer), "parameters": len(list(model.parameters())),
        "rows": len(model.lm_head.weight), "alias": model.lm_head.weight is model.model.embed_tokens.weight,
        "end": largest_difference(whole_parameters(model), whole_parameters(plain)),
    }  # fmt: skip


CASES = [("llama", 19, 8, kind) for kind in LOSSES] + [("phi", 19, 8, "mean"), ("phi", 19, 8, "logits")]
TWO = DdpBatch(_train, CASES)
MORE = DdpBatch(_train, [("llama", 9, 1, "mean"), ("phi", 9, 1, "items"), ("phi", 9, 1, "logits")])


def check(ranks, family, vocab, multiple_of, kind):
    tied = FAMILIES[family][1]
    require_equal("gradient norms on every rank", [rank["norm"] for rank in ranks])
    average = torch.stack([rank["loss"] for rank in ranks]).mean(0)
    for rank in ranks:
        if kind != "logits":
            # the mean over all ranks' tokens, on every rank
            assert torch.allclose(rank["loss"], average, rtol=0, atol=2e-6) or kind == "uneven items"
        assert torch.allclose(average, rank["expected"], rtol=0, atol=1e-5), average - rank["expected"]
        assert torch.allclose(rank["norm"], rank["expected norm"], rtol=2e-5), rank["norm"] / rank["expected norm"] - 1
        assert rank["end"] < 2e-5, f"weights after {STEPS} steps differ by {rank['end']}"
        assert rank["states"] == [1] * len(rank["names"]) + [rank["parameters"]]
        assert rank["rows"] == -(-vocab // (len(ranks) * multiple_of)) * multiple_of, "each rank keeps its part only"
        assert rank["alias"] == tied
        assert len(rank["tied"]) == int(tied)


@pytest.mark.parametrize(("family", "vocab", "multiple_of", "kind"), CASES)
def test_two_ranks_with_different_batches_train_as_one_process_on_both(family, vocab, multiple_of, kind):
    check(TWO(2, family, vocab, multiple_of, kind), family, vocab, multiple_of, kind)


@pytest.mark.parametrize("tp", [3, 4])
@pytest.mark.parametrize(("family", "vocab", "multiple_of", "kind"), MORE.cases)
def test_more_ranks_also_with_an_empty_shard(tp, family, vocab, multiple_of, kind):
    check(MORE(tp, family, vocab, multiple_of, kind), family, vocab, multiple_of, kind)


def _generate(rank):
    model = build("llama", 19)
    plain = copy.deepcopy(model).eval()
    vp.apply(model, shard=make_shard(19), data_parallel=True)
    model.eval()
    ids, _ = batch(19, rank, rows=1 + rank, columns=3 + rank)
    settings = {"do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    # each rank's own number of tokens: one is done long before the other
    same = [
        torch.equal(
            model.generate(ids, max_new_tokens=2 + 4 * rank, **settings),
            plain.generate(ids, max_new_tokens=2 + 4 * rank, **settings),
        )
    ]
    with torch.no_grad():
        same.append(torch.allclose(model(ids).logits, plain(ids).logits, atol=1e-5))
    vp.unapply(model)
    DistributedDataParallel(model)  # of all parameters again
    same.append(torch.equal(model(ids).logits, plain(ids).logits))
    return same


def test_ranks_generate_from_prompts_of_their_own_and_get_the_model_back():
    assert DdpBatch(_generate, [()])(2) == [[True, True, True]] * 2
