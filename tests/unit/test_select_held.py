"""What is told of a few candidates in Python's numbers, beside the exact steps on the same candidates."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vocab_parallel import Streams, VocabLayout, VocabShard
from vocab_parallel.select import held, order
from vocab_parallel.select.crossing import reach
from vocab_parallel.select.keys import ids_of, keys_of, values_of
from vocab_parallel.select.masses import CLOSE, measure
from vocab_parallel.select.prefix import smallest_prefix
from vocab_parallel.select.sampling import draw
from vocab_parallel.select.scores import Scores, open_scores

VOCAB = 50_000
SIZES = [1, 2, 9, 40, 300]
ROWS = 200  # of each kind and size: 6 x 5 x 200 = 6,000
TRUE, WIDE = held._ERROR, 0.05


class Numbers(Streams):
    """Streams whose next numbers are their seeds."""

    @classmethod
    def of_rows(cls, numbers: list[int]) -> Numbers:
        return cls(*[torch.tensor(numbers)] * 3)

    def bits(self) -> Tensor:
        return self.seeds


def normal(columns: int) -> Tensor:
    return 2 * torch.randn(ROWS, columns, generator=torch.Generator().manual_seed(columns))


def flat(columns: int) -> Tensor:
    return normal(columns) * 0.01


def peaked(columns: int) -> Tensor:
    return normal(columns) * 5


def ties(columns: int) -> Tensor:
    """Few values, both zeros among them."""
    return (normal(columns)).round() / 2


def equal(columns: int) -> Tensor:
    return torch.full((ROWS, columns), -7.25)


def masked(columns: int) -> Tensor:
    """Places at -inf, in every row but one; of two thirds of the rows the last places are not in use."""
    x = normal(columns)
    masks = torch.rand(ROWS, columns, generator=torch.Generator().manual_seed(columns)) < 0.6
    masks[0] = False
    x[torch.arange(ROWS) % 3 > 0, columns // 2 + 1 :] = -math.inf
    return x.masked_fill(masks.index_fill(1, torch.tensor([columns // 2]), False), -math.inf)


KINDS: list[Callable[[int], Tensor]] = [normal, flat, peaked, masked, ties, equal]
CONTINUOUS = [normal, flat, peaked, masked]


def candidates(values: Tensor) -> Scores:
    """Candidates `[T, n]` that every rank holds; those not in use, at the end of a row, have no id."""
    rows, columns = values.shape
    steps = torch.randint(1, VOCAB // columns, (rows, columns), generator=torch.Generator().manual_seed(columns))
    unused = (values > -math.inf).flip(1).cumsum(1).flip(1) == 0
    token_ids = (steps.cumsum(1) - 1).masked_fill(unused, VOCAB)
    channel = open_scores(values, VocabShard(VocabLayout(columns, 1, multiple_of=1)), "held").channel.alone()
    return Scores(values=values, token_ids=token_ids, channel=channel, vocab_size=VOCAB, largest=values.amax(1))


def parts_and_draws(columns: int) -> tuple[list[float], list[int]]:
    drawn = torch.Generator().manual_seed(columns)
    parts = torch.rand(ROWS, generator=drawn, dtype=torch.float64).clamp(min=1e-3)
    parts[::2] = torch.tensor([1e-9, 0.3, 0.5, 0.9, 0.999999, 1.0], dtype=torch.float64).repeat(ROWS)[: ROWS // 2]
    return parts.tolist(), torch.randint(0, 1 << 62, (ROWS,), generator=drawn).tolist()


def exact_nucleus(scores: Scores, p: list[float]) -> Scores:
    masses, parts = measure(scores), torch.tensor(p, dtype=torch.float64)
    inside = smallest_prefix(scores, scores.values, masses, reach(masses.total, parts), by_value=True)
    return scores.keep(inside | (parts >= 1.0)[:, None])


def exact_tokens(scores: Scores, draws: list[int]) -> list[int]:
    token_ids: list[int] = draw(scores, Numbers.of_rows(draws)).token_ids.tolist()
    return token_ids


def rows_of(scores: Scores) -> list[Scores]:
    return [scores.at(torch.tensor([row])) for row in range(scores.rows)]


def check_rare(answers: list[bool], kind: Callable[[int], Tensor], error: float) -> None:
    """Whether so many rows were answered as should be."""
    unclear = answers.count(False) / len(answers)
    if error == WIDE:
        assert unclear > 0.05 and True in answers
    elif kind in CONTINUOUS:
        assert unclear < 0.01


EACH = pytest.mark.parametrize("kind", KINDS)
ERRORS = pytest.mark.parametrize("error", [TRUE, WIDE])


@ERRORS
@EACH
def test_a_nucleus_that_is_clear_is_the_exact_one(
    kind: Callable[[int], Tensor], error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "_ERROR", error)
    answers = []
    for columns in SIZES:
        scores, (p, _) = candidates(kind(columns)), parts_and_draws(columns)
        for one, part, expected in zip(rows_of(scores), p, exact_nucleus(scores, p).values, strict=True):
            found = held.nucleus_of(one, [part])
            answers.append(found is not None)
            assert found is None or torch.equal(found.values[0], expected), f"{columns=} {part=}"
    check_rare(answers, kind, error)


@ERRORS
@EACH
def test_a_token_that_is_clear_is_the_exact_one(
    kind: Callable[[int], Tensor], error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "_ERROR", error)
    answers = []
    for columns in SIZES:
        scores, (_, draws) = candidates(kind(columns)), parts_and_draws(columns)
        for one, number, expected in zip(rows_of(scores), draws, exact_tokens(scores, draws), strict=True):
            found = held.tokens_of(one, [number])
            answers.append(found is not None)
            assert found is None or found == [expected], f"{columns=} {number=}"
    check_rare(answers, kind, error)


@ERRORS
@EACH
def test_a_token_among_the_nucleus_of_the_best_k_that_is_clear_is_the_exact_one(
    kind: Callable[[int], Tensor], error: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held, "_ERROR", error)
    answers = []
    for columns in SIZES:
        scores, (p, draws) = candidates(kind(columns)), parts_and_draws(columns)
        k = torch.randint(1, columns + 1, (ROWS,), generator=torch.Generator().manual_seed(columns))
        places = scores.values.argsort(dim=1, descending=True, stable=True).argsort(dim=1)
        tokens = exact_tokens(exact_nucleus(scores.keep(places < k[:, None]), p), draws)
        each = zip(scores.values.tolist(), scores.token_ids.tolist(), k.tolist(), p, draws, tokens, strict=True)
        for values, token_ids, count, part, number, expected in each:
            keys = sorted(keys_of(values, token_ids), reverse=True)
            found = held.tokens_of_best([keys], [count], [part], [number], VOCAB)
            answers.append(found is not None)
            assert found is None or found == [expected], f"{columns=} {count=} {part=} {number=}"
    check_rare(answers, kind, error)


def test_rows_of_a_batch_are_answered_together_or_not_at_all() -> None:
    scores, (p, draws) = candidates(normal(40)), parts_and_draws(40)
    found = held.nucleus_of(scores, p)
    assert found is not None and torch.equal(found.values, exact_nucleus(scores, p).values)
    assert held.tokens_of(found, draws) == exact_tokens(found, draws)
    draws[17] = 2**62 - 1
    assert held.tokens_of(found, draws) is None


def on_boundary(part: float) -> float:
    """The p whose nucleus reaches `part` of all exactly, `CLOSE` taken into account."""
    p = part / (1.0 - CLOSE)
    return p if p <= 0.5 else (part + CLOSE) / (1.0 + CLOSE)


@pytest.mark.parametrize("columns", [2, 3, 8, 40])
def test_what_lies_on_a_boundary_of_equal_masses_is_left_to_the_exact_steps(columns: int) -> None:
    one = candidates(torch.full((1, columns), 1.5))
    keys = sorted(keys_of(one.values[0].tolist(), one.token_ids[0].tolist()), reverse=True)
    for count in range(1, columns):
        part, first = on_boundary(count / columns), -(-count * 2**62 // columns)
        assert held.nucleus_of(one, [part]) is None, f"{count} of {columns}"
        assert held.tokens_of_best([keys], [columns], [part], [5], VOCAB) is None
        for number in (first - 1, first):
            assert held.tokens_of(one, [number]) is None, f"{count} of {columns}"
            assert held.tokens_of_best([keys], [columns], [1.0], [number], VOCAB) is None
        for away in (-1e-6, 1e-6):
            clear, number = held.nucleus_of(one, [part + away]), first + int(away * 2**62)
            assert clear is not None and torch.equal(clear.values, exact_nucleus(one, [part + away]).values)
            assert held.tokens_of(one, [number]) == exact_tokens(one, [number])


@pytest.mark.parametrize("ends", [slice(0, 1), slice(-1, None)])
def test_masses_of_a_few_units_at_an_end_are_left_to_the_exact_steps(ends: slice) -> None:
    values = torch.zeros(1, 9)
    values[:, ends] = -29.0
    number = 0 if ends.start == 0 else 2**62 - 1
    assert held.tokens_of(candidates(values), [number]) is None


# a NaN is looked for only where the sum is not finite
ALL = [0.0, -0.0, 1e-45, -1e-45, 1.1754942e-38, 1.5, -1.5, 3.4028235e38, -3.4028235e38]
LISTS = {
    "finite": ALL,
    "+inf": [*ALL, math.inf],
    "-inf": [-math.inf, *ALL],
    "both infinities": [math.inf, *ALL, -math.inf],
    "NaN": [*ALL, math.nan, -math.nan],
    "all": [math.nan, -math.inf, *ALL, math.inf, math.copysign(math.nan, -1.0)],
    "none": [],
}


@pytest.mark.parametrize("values", LISTS.values(), ids=LISTS.keys())
def test_keys_of_pythons_integers_are_those_of_tensors_and_give_value_and_id_back(values: list[float]) -> None:
    x = torch.tensor(values, dtype=torch.float32)
    for first in (0, 2**31 - 3, order.LOW - len(values)):
        ids = list(range(first, first + len(values)))
        keys = keys_of(x.tolist(), ids)
        packed = order.pack(x, torch.tensor(ids, dtype=torch.int64))
        assert keys == packed.tolist()
        wanted, wanted_ids = order.unpack(packed)
        got = torch.tensor(values_of(keys), dtype=torch.float32)
        assert torch.equal(got.isnan(), x.isnan()) and torch.equal(got.isnan(), wanted.isnan())
        assert torch.equal(got.nan_to_num(7.5, math.inf, -math.inf).view(torch.int32), bits_of(x))
        assert ids_of(keys) == wanted_ids.tolist() == ids
        assert torch.equal(wanted.nan_to_num(7.5, math.inf, -math.inf).view(torch.int32), bits_of(x))


def bits_of(x: Tensor) -> Tensor:
    """Of what a key gives back: 0.0 for -0.0, and here one number for all NaN."""
    return (x + 0.0).nan_to_num(7.5, math.inf, -math.inf).view(torch.int32)
