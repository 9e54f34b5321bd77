"""Failures of searches over sequences, on toy trees: `table` gives the probabilities after each prefix."""

from __future__ import annotations

import math

import pytest
import torch

from tests.beam_models import Toy, random_tree, table
from tests.failures.decoding import log_of
from tests.failures.lab import failure, whole_shard
from vocab_parallel import Streams
from vocab_parallel.decode import Stepped, beam_search, beam_step, reorder, split_flat
from vocab_parallel.reference import beam as oracle


def listed(result, request=0):
    """The hypotheses of a request, best first."""
    rows = zip(result.token_ids[request].tolist(), result.lengths[request].tolist(), strict=True)
    return [tuple(ids[:length]) for ids, length in rows]


@failure(
    43,
    "Continuations ranked without the scores of the beams that they continue",
    "impossible",
    "`beam_step` has no form without `beam_scores`: a candidate is its parent's sum plus its own log-probability.",
)
def test_a_candidate_carries_its_parents_score():
    logits = log_of((0.5, 0.3, 0.2), (0.98, 0.01, 0.01))[None]
    sums = torch.tensor([[0.9, 0.01]], dtype=torch.float64).log()
    locally = logits.log_softmax(-1).flatten().topk(2).indices
    assert locally.tolist() == [3, 0], "the unlikely beam's token is first"
    step = beam_step(logits, sums, shard=whole_shard(3), candidates=2)
    assert (step.parents.tolist(), step.token_ids.tolist()) == ([[0, 0]], [[0, 1]])
    assert step.scores[0].exp().tolist() == pytest.approx([0.45, 0.27])
    with pytest.raises(TypeError, match="beam_scores"):
        beam_step(logits, shard=whole_shard(3))


@failure(
    44,
    "A flat candidate taken apart by the number of beams",
    "impossible",
    "`beam_step` gives parents and ids apart, no flat index; `split_flat` divides one by the vocabulary, in integers.",
)
def test_parents_and_ids_come_apart_already():
    vocab, beams = 5, 2
    logits = torch.randn(1, beams, vocab, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    sums = torch.tensor([[-1.0, -1.2]], dtype=torch.float64)
    flat = (sums[..., None] + logits.log_softmax(-1)).flatten(1).topk(6).indices
    step = beam_step(logits, sums, shard=whole_shard(vocab), candidates=6)
    assert torch.equal(step.parents * vocab + step.token_ids, flat)
    assert not torch.equal(flat % beams, step.token_ids) and (flat % beams).max() < beams, "ids 2 to 4 are never chosen"
    assert all(torch.equal(*pair) for pair in zip(split_flat(flat, vocab), step[1:3], strict=True))


class Remembering:
    """A model that knows its prefixes by its state alone, as a cache does: in the search's state, or in its own."""

    def __init__(self, whole, *, hidden):
        self.whole, self.hidden, self.own = whole, hidden, None

    def __call__(self, prefix, parents, state):
        past = self.own if self.hidden else state
        last = prefix[:, -1:]
        past = last[:, :0] if past is None else past["cache"][0]
        if prefix.shape[1] > 1:
            rows = past if not self.hidden else past[: len(last)].expand(len(last), -1)
            past = torch.cat([rows, last], 1)
        self.own = {"cache": (past,)}
        logits = torch.tensor([self.whole(tuple(ids)) for ids in past.tolist()], dtype=torch.float64)
        return Stepped(logits, {"cache": (past,)})


@failure(
    45,
    "Ids reordered by their parents, and what else belongs to the beams left where it was",
    "refused",
    "Searches move a model's state, views, constraints and streams to the parents before they ask again; `reorder` "
    "takes any nesting, and names the place of what it cannot move.",
)
def test_all_state_follows_the_parents_or_is_refused():
    differ = 0
    for seed in range(4):
        whole = random_tree(5, seed)
        options = {"shard": whole_shard(5), "num_beams": 3, "max_new_tokens": 4}
        moved = beam_search(Remembering(whole, hidden=False), [[0]], **options)
        best = oracle.beam_search(whole, 3, 4)
        assert listed(moved) == [ids for ids, _ in best]
        left = beam_search(Remembering(whole, hidden=True), [[0]], **options)
        differ += listed(left) != listed(moved)
    assert differ, "a state that stays behind changes what is found"
    rows, parents = torch.arange(3), torch.tensor([2, 0, 0])
    state = {"cache": [(rows, rows[:, None])], "streams": Streams.of([7, 8, 9])}
    after = reorder(state, parents)
    assert after["cache"][0][1].flatten().tolist() == [2, 0, 0] and after["streams"].seeds.tolist() == [9, 7, 7]
    for kind, one in {"object": object(), "list of 3 plain values": ["a", "b", "c"], "set": {1}}.items():
        with pytest.raises(TypeError, match=rf"state\['kept'\] is a {kind}"):
            reorder({"kept": one}, parents)
    with pytest.raises(ValueError, match=r"state\['kept'\] has 2 rows"):
        reorder({"kept": rows[:2]}, parents)


@failure(
    46,
    "A search begun with K active copies of the prompt",
    "refused",
    "`beam_search` has one beam at its first step; `beam_step` refuses a second score of 0 in a request, since two "
    "different prefixes cannot both be certain.",
)
def test_a_search_begins_with_one_beam():
    vocab = 5
    row = random_tree(vocab, 3)(())
    copies = torch.tensor([[row] * 3], dtype=torch.float64)
    naive = copies.log_softmax(-1).flatten(1).topk(3).indices % vocab
    assert naive.unique().numel() == 1, "one continuation, three times"
    shard = whole_shard(vocab)
    with pytest.raises(ValueError, match="beam_scores of request 0 are 0 for two beams, the second is beam 1"):
        beam_step(copies, torch.zeros(1, 3), shard=shard)
    alone = torch.tensor([[0.0, -math.inf, -math.inf]])
    assert beam_step(copies, alone, shard=shard).token_ids[0, :3].unique().numel() == 3
    model = Toy(shard, lambda _, ids: random_tree(vocab, 3)(ids), [1])
    result = beam_search(model, [[0]], shard=shard, num_beams=3, max_new_tokens=3)
    assert model.rows == [1, 3, 3] and len(set(listed(result))) == 3


@failure(
    47,
    "A search stopped at the first sequence that ends",
    "shown",
    "By default a request goes on while a live beam can still pass its worst finished one under the length penalty in "
    "use; nothing that could win is given up.",
)
def test_a_search_goes_on_while_a_live_beam_can_win():
    end = 2
    whole = table({(): {0: 0.6, end: 0.4}, (0,): {0: 0.05, end: 0.95}, (0, 0): {end: 1.0}}, 3)
    model = Toy(whole_shard(3), lambda _, ids: whole(ids), [1])
    result = beam_search(model, [[0]], shard=model.shard, num_beams=2, max_new_tokens=3, eos_ids=(end,), trace=True)
    first = result.trace[0][0]
    assert first.token_ids[0, 1] == end and first.scores[0, 1].exp().item() == pytest.approx(0.4), "it ends first"
    assert listed(result) == [(0, end), (end,)] and result.ended.all()
    assert result.sums[0].exp().tolist() == pytest.approx([0.57, 0.4])
    assert result.steps == 2, "0.03 is left, which cannot win: the bound ends the search too"
