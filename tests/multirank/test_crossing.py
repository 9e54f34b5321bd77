"""Nuclei over ranks, wherever it turns out which column is a row's last: in one of the runs, or only in the search."""

from __future__ import annotations

import math
from contextlib import contextmanager

import pytest
import torch

from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import Streams, VocabLayout, VocabShard, reference, sample, top_p
from vocab_parallel.select import approximate, crossing, position
from vocab_parallel.select.order import NONE, unpack
from vocab_parallel.select.runs import first_runs
from vocab_parallel.select.scores import open_scores

SEVERAL = pytest.mark.parametrize("tp", [2, 3, 4])
PARTS = [1e-9, 0.3, 0.9, 0.999999, 1.0]
ALONE = {torch.float32: [0.3, 0.9], torch.bfloat16: [0.9], torch.float64: []}  # also in a batch of one row
TRUE = approximate.ERROR
# with 17,000 a rank has 4,250 columns or more, and there are next runs; with 1,000 there are none
CASES = [
    (vocab, dtype, error)
    for vocab in (17_000, 1_000)
    for dtype, error in (
        (torch.float32, TRUE),
        (torch.float32, 1e-3),
        (torch.bfloat16, TRUE),
        (torch.float64, TRUE),
    )
]


def rows_of(vocab, tp, dtype):
    """Rows by name: whose last column is near the top or far down, in step on all ranks or not."""
    drawn = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=drawn, dtype=torch.float64)
    size = -(-vocab // tp)
    of_rank, place = torch.arange(vocab) // size, torch.arange(vocab) % size
    first, last = of_rank == 0, of_rank == tp - 1
    flat, steps = normal * 0.01, place * 7 % size
    apart = 100 * tp / (tp - 1)  # columns: the last of all is then 100 of them below the place in the first rank
    rows = {
        "peaked": normal * 4,
        "long": normal * 3,
        "longer": normal * 2,
        "flat": flat,
        "hardly different": normal * 1e-9 + 1,
        "ranks a little apart": (apart * first - steps) * (0.01 / size),
        "ranks far apart": flat + 0.03 * of_rank,
        "one rank heavy": torch.where(first, normal * 4 + 10, flat),
        "a hundred of one rank": torch.where(last, torch.where(place < 100, flat, -20.0), flat),
        "equal": normal * 0.0,
        "few values": (normal * 2).round() / 2,
        "few values, flat": (normal * 2).round() / 200,
        "first rank masked": flat.masked_fill(first, -torch.inf),
        "only the last rank": (normal * 3).masked_fill(~last, -torch.inf),
        "most masked": (normal * 2).masked_fill(torch.rand(vocab, generator=drawn) < 0.7, -torch.inf),
        "one column": normal.masked_fill(torch.arange(vocab) != vocab - 7, -torch.inf),
        "a value of all ranks": torch.where(last, -30.0, flat / 10 - 3).masked_fill(place < 10, 0.0),
    }
    # the last rank has 20 columns of more, and 60 at 0: after the 10 of each other rank the 15th is the nucleus' last
    count = 10 * (tp - 1)
    rest = float((rows["a value of all ranks"].exp() * ~last).sum())
    best = (0.9 * (rest + 60) - count - 15) / 2  # of p = 0.9
    rows["a value of all ranks"][last & (place < 80)] = 0.0
    rows["a value of all ranks"][last & (place < 20)] = math.log(best)
    return {name: row.to(dtype) for name, row in rows.items()}


def batch_of(vocab, tp, dtype):
    """Every row with every p: logits, p, streams."""
    rows = list(rows_of(vocab, tp, dtype).values())
    p = torch.tensor(PARTS, dtype=torch.float64).repeat(len(rows))
    return torch.stack(rows).repeat_interleave(len(PARTS), 0), p, Streams.of([5] * len(p), list(range(len(p))))


@contextmanager
def bounds_of(error):
    """Takes what is approximate to be off by `error`. Yields the steps in which the calls looked for last columns."""
    steps = []

    def noted(name, what):
        original = getattr(crossing, name)

        def function(*args, **kwargs):
            found = original(*args, **kwargs)
            steps.append(what(found, *args))
            return found

        patch.setattr(crossing, name, function)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "ERROR", error)
        patch.setattr(position, "ERROR", error)
        noted("first_runs", lambda runs, *_: "first, at a cut" if bool((runs.over > 0).any()) else "first, at the top")
        noted("_next", lambda _, scores, start, *__: f"next, at {'the top' if torch.inf in start else 'a cut'}")
        noted("smallest_prefix", lambda *_: "search")
        yield steps


def _found(rank, vocab, dtype, error):
    """Nuclei and tokens of the batch, and of some rows by themselves the steps."""
    shard = shard_of(vocab)
    whole, p, streams = batch_of(vocab, shard.tp_size, dtype)
    mine = shard.slice(whole, -1, fill=float("nan"))
    steps = {}
    with bounds_of(error) as seen:
        together = top_p(mine, p, shard=shard)
        drawn = sample(mine, shard=shard, streams=streams, top_p=p).token_ids
        for row in (row for row, part in enumerate(p.tolist()) if part in ALONE[dtype]):
            at = slice(row, row + 1)
            seen.clear()
            alone = top_p(mine[at], p[at], shard=shard)
            steps[row] = list(seen)
            assert all(torch.equal(one, each[at]) for one, each in zip(alone, together, strict=True)), f"row {row}"
            token = sample(mine[at], shard=shard, streams=streams.rows(torch.tensor([row])), top_p=p[at]).token_ids
            assert torch.equal(token, drawn[at]), f"row {row}"
    return together, drawn, steps


FOUND = Batch(_found, CASES)


@SEVERAL
@pytest.mark.parametrize(("vocab", "dtype", "error"), CASES)
def test_nuclei_and_draws_from_them_are_the_oracles_wherever_the_last_column_is(vocab, dtype, error, tp):
    whole, p, streams = batch_of(vocab, tp, dtype)
    names = [(name, part) for name in rows_of(vocab, tp, dtype) for part in PARTS]
    expected = reference.nucleus(whole, p) & (whole > -torch.inf)
    tokens = reference.draw(whole.masked_fill(~expected, -torch.inf), streams.bits())
    results = FOUND(tp, vocab, dtype, error)
    kept = torch.cat([nucleus.kept for nucleus, *_ in results], 1)[:, :vocab]
    wrong = [name for name, got, wanted in zip(names, kept, expected, strict=True) if not torch.equal(got, wanted)]
    assert not wrong, f"nuclei of {wrong}"
    values = torch.where(expected, whole.double(), torch.inf)
    for nucleus, drawn, _ in results:
        wrong = [name for name, got, wanted in zip(names, drawn, tokens, strict=True) if got != wanted]
        assert not wrong, f"tokens of {wrong}"
        assert torch.equal(nucleus.size, expected.sum(1))
        assert torch.equal(nucleus.threshold.double(), values.amin(1) + 0.0)
        assert all(torch.equal(*pair) for pair in zip(nucleus[:-1], results[0][0][:-1], strict=True)), "ranks differ"


FIRST = {"first, at the top": "peaked", "first, at a cut": "flat", "first, at both": "a hundred of one rank"}
NEXT = {"next, at the top": "long", "next, at a cut": "ranks a little apart"}
LAST = {17_000: FIRST | NEXT | {"search": "equal"}, 1_000: FIRST | {"search": "equal"}}  # with a row of each


@SEVERAL
@pytest.mark.parametrize("vocab", LAST)
def test_each_step_is_the_last_one_of_some_row(vocab, tp):
    last = {}
    rows = list(rows_of(vocab, tp, torch.float32))
    ranks = [steps for *_, steps in FOUND(tp, vocab, torch.float32, TRUE)]
    for row in ranks[0]:
        each = {tuple(steps[row]) for steps in ranks}
        (step,) = {steps[1:] for steps in each} if len(each) > 1 else each
        last.setdefault(step[-1] if step else "first, at both", []).append(rows[row // len(PARTS)])
    assert last.keys() == LAST[vocab].keys() and all(row in last[step] for step, row in LAST[vocab].items()), last


def test_a_first_run_at_a_p_that_is_hardly_below_1_ends_with_the_last_column():
    for seed in range(20):
        values = torch.randn(1, 4000 + 311 * seed, generator=torch.Generator().manual_seed(seed)) * 0.1
        scores = open_scores(values, VocabShard(VocabLayout(values.shape[1], 1, multiple_of=1)), "first")
        for part in (1.0 - 2.0**-53, 1.0 - 1e-15, 1.0 - 1e-12):
            keys = first_runs(scores, torch.tensor([part], dtype=torch.float64), 64).keys[0]
            assert unpack(keys[keys != NONE])[0].amin() == values.amin(), f"{part=}"
