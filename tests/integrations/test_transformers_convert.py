"""Converted models of many families on 2 to 4 ranks: they train, generate and come back as the model itself does."""

from __future__ import annotations

import copy

import pytest
import torch

from tests.integrations.transformers_models import (
    FAMILIES,
    batch,
    build,
    largest_difference,
    make_optimizer,
    make_shard,
    state_count,
    train,
    whole_parameters,
)
from tests.multirank.shared_world import Batch
from tests.tolerances import require_equal
from vocab_parallel import VocabParallelEmbedding, VocabParallelLMHead
from vocab_parallel.integrations import transformers as vp

STEPS = 10


def _convert(rank, family, vocab, multiple_of):
    model = build(family, vocab)
    plain = copy.deepcopy(model)
    names = vp.apply(model, shard=make_shard(vocab, multiple_of))
    start = largest_difference(whole_parameters(model), whole_parameters(plain))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert isinstance(embedding, VocabParallelEmbedding) and isinstance(head, VocabParallelLMHead)
    alias = [embedding.weight is head.weight]
    optimizer = make_optimizer(model)
    tied = vp.verify(model, optimizer)
    mine, theirs = train(model, vocab, STEPS, optimizer), train(plain, vocab, STEPS)
    alias.append(embedding.weight is head.weight)
    result = {
        "names": names, "start": start, "tied": tied, "alias": alias, "states": state_count(model, optimizer),
        "parameters": len(list(model.parameters())), "loss": mine["loss"], "expected": theirs["loss"],
        "norm": mine["norm"], "expected norm": theirs["norm"],
        "end": largest_difference(whole_parameters(model), whole_parameters(plain)),
    }  # fmt: skip
    model.load_state_dict(plain.state_dict())  # whole tables
    result["loaded"] = largest_difference(whole_parameters(model), whole_parameters(plain))
    alias.append(embedding.weight is head.weight)
    model.eval(), plain.eval()
    ids, _ = batch(vocab, 50, rows=2, columns=4)
    with torch.no_grad():
        result["logits"] = float((model(ids).logits - plain(ids).logits).abs().max())
        last = model(ids, logits_to_keep=1).logits
        result["kept"] = list(last.shape)
    settings = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids), "pad_token_id": 0}
    result["generated"] = torch.equal(model.generate(ids, **settings), plain.generate(ids, **settings))
    kind = type(plain)
    vp.unapply(model)
    result["restored"] = (
        type(model) is kind
        and type(model.get_input_embeddings()) is type(plain.get_input_embeddings())
        and type(model.get_output_embeddings()) is torch.nn.Linear
        and not hasattr(model, "_vocab_parallel")
        and largest_difference(whole_parameters(model), whole_parameters(plain)) == 0.0
        and torch.equal(model(ids).logits, plain(ids).logits)
        and (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == FAMILIES[family][1]
    )
    return result


FAMILY = Batch(_convert, [(family, 19, 8) for family in FAMILIES])
ODD = Batch(_convert, [("llama", 9, 1), ("phi", 9, 1)])


def check(ranks, family, vocab):
    tied = FAMILIES[family][1]
    require_equal("losses on every rank", [rank["loss"] for rank in ranks])
    require_equal("gradient norms on every rank", [rank["norm"] for rank in ranks])
    for rank in ranks:
        assert rank["start"] == 0.0, "a conversion changes no value"
        # float32, 10 steps of lr 1e-2: the products of the trunk are the same, the loss is summed in another order
        assert torch.allclose(rank["loss"], rank["expected"], rtol=0, atol=1e-5), rank["loss"] - rank["expected"]
        assert torch.allclose(rank["norm"], rank["expected norm"], rtol=1e-5), rank["norm"] / rank["expected norm"] - 1
        assert rank["end"] < 2e-5, f"weights after {STEPS} steps differ by {rank['end']}"
        assert rank["alias"] == [tied] * 3, "before training, after it, and after a load"
        assert len(rank["tied"]) == int(tied)
        assert rank["states"] == [1] * len(rank["names"]) + [rank["parameters"]], "one state a parameter"
        assert rank["loaded"] == 0.0
        assert rank["logits"] < 1e-5, rank["logits"]
        assert rank["kept"] == [2, 1, vocab], "only the last position's logits"
        assert rank["generated"], "other tokens than the model itself"
        assert rank["restored"], "unapply must give the model back"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_converted_family_trains_and_generates_as_the_model_itself(family):
    check(FAMILY(2, family, 19, 8), family, 19)


@pytest.mark.parametrize("family", ["llama", "phi"])
@pytest.mark.parametrize("tp", [3, 4])
def test_any_number_of_ranks_also_with_an_empty_shard(tp, family):
    check(ODD(tp, family, 9, 1), family, 9)
