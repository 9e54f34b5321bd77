"""Tokens told from approximate masses: those of the exact ones, however wide the bounds are, wherever a draw falls."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import pytest
import torch

from tests.multirank.counting import collectives
from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import Streams, VocabLayout, VocabShard, reference, sample
from vocab_parallel.select import approximate, position
from vocab_parallel.select.masses import mass_bits, masses_of
from vocab_parallel.select.sampling import draw
from vocab_parallel.select.scores import open_scores

SEVERAL = pytest.mark.parametrize("tp", [2, 3, 4])
TRUE = approximate.ERROR
WIDE = [0.3, 1e-3]
# vocabulary, rows a shard is a multiple of. Without columns: of 9 the last of 4 ranks, of 4 that of 3, of 1 all but one
LAYOUTS = [(9, 1), (4, 1), (1, 1), (37, 1), (300, 8), (3000, 1)]
KINDS = ["normal", "flat", "peaked", "ties", "masked"]
ROWS = 24  # of each: 5 x 6 x 24 x (3 numbers of ranks) x (3 errors) = 6,480 draws


def logits_of(kind, vocab, rows=ROWS):
    drawn = torch.Generator().manual_seed(vocab)
    normal = torch.randn(rows, vocab, generator=drawn)
    if kind == "masked":  # in some rows all of the first ranks
        masked = normal.masked_fill(torch.rand(rows, vocab, generator=drawn) < 0.7, -torch.inf)
        masked[::4, : vocab // 2] = -torch.inf
        masked[:, -1] = 0.5
        return masked
    return {"normal": normal * 2, "flat": normal * 0.01, "peaked": normal * 8, "ties": (normal * 2).round() / 2}[kind]


def streams_of(rows):
    return Streams.of([11] * rows, list(range(rows)))


class Numbers(Streams):
    """Streams whose next numbers are their seeds."""

    def bits(self):
        return self.seeds


@contextmanager
def bounds_of(error):
    """Takes what is approximate to be off by `error`. Yields how often exact masses decided, by what was not sure."""
    ways, exactly = Counter(), position._exactly

    def counted(scores, row, peak, draw, owner, masses):
        ways["no owner" if owner is None else "no column"] += 1
        return exactly(scores, row, peak, draw, owner, masses)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(approximate, "ERROR", error)
        patch.setattr(position, "ERROR", error)
        patch.setattr(position, "_exactly", counted)
        yield ways


def tokens(shard, whole, draws):
    mine = shard.slice(whole, -1, fill=float("nan"))
    return position.tokens(open_scores(mine, shard, "tokens", kind="sample", may_hide_nan=False), draws)


def _drawn(rank, kind, vocab, multiple_of, error):
    with bounds_of(error) as ways:
        return tokens(shard_of(vocab, multiple_of), logits_of(kind, vocab), streams_of(ROWS).bits().tolist()), ways


DRAWN = Batch(_drawn, [(kind, *layout, error) for kind in KINDS for layout in LAYOUTS for error in (*WIDE, TRUE)])


@SEVERAL
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_are_those_of_the_oracle_whatever_the_bounds_leave_open(kind, tp):
    for _, *layout, error in (case for case in DRAWN.cases if case[0] == kind):
        expected = reference.draw(logits_of(kind, layout[0]), streams_of(ROWS).bits()).tolist()
        for got, _ in DRAWN(tp, kind, *layout, error):
            assert got == expected, f"{layout}, {error=}"


@SEVERAL
def test_wide_bounds_leave_ranks_and_columns_open_and_the_true_ones_hardly_any(tp):
    open_, exact = Counter(), Counter()
    for case in DRAWN.cases:
        (_, ways), *others = DRAWN(tp, *case)
        assert all(one == ways for _, one in others), "the ranks took other ways"
        (exact if case[-1] == TRUE else open_).update(ways)
    assert open_["no owner"] >= 100 and open_["no column"] >= 100
    assert exact.total() <= 1


FAINT = -29.0  # nats: a mass of a few units


def edge_rows():
    """Rows by name, with what makes a boundary or an end hard to tell."""
    normal = torch.randn(48, generator=torch.Generator().manual_seed(1)) * 2
    rows = {f"{n} equal": torch.full((n,), -3.25) for n in (8, 12, 768)}
    rows |= {name: normal.clone() for name in ("uneven", "masked ends", "faint ends", "one rank", "faint ranks")}
    rows["masked ends"][:17], rows["masked ends"][-17:] = -torch.inf, -torch.inf
    rows["faint ends"][[0, 1, -2, -1]] = normal.max() + FAINT
    rows["one rank"][12:] = -torch.inf
    rows["faint ranks"][:32] = normal.max() + FAINT  # more than all of the first, of 2 to 4
    return rows


def edges_of(row):
    """The two ends of all numbers; and at cumulative masses of columns the last number below and the first above.

    At 48 of these, among them those between ranks and between blocks of 256 columns.
    """
    through = masses_of(row, row.max(), mass_bits(len(row))).cumsum(0).tolist()
    step = max(1, len(row) // 48)
    first = {-(-(reached << 62) // through[-1]) for reached in through[step - 1 :: step]}
    return [0, 2**62 - 1, *sorted(number for one in first if 0 < one < 2**62 for number in (one - 1, one))]


def _edges(rank, name, error):
    row = edge_rows()[name]
    draws, shard = edges_of(row), shard_of(len(row))
    with bounds_of(error) as ways:
        return tokens(shard, row.expand(len(draws), -1), draws), ways


EDGES = Batch(_edges, [(name, error) for name in edge_rows() for error in (TRUE, WIDE[1])])


@SEVERAL
@pytest.mark.parametrize("name", edge_rows())
def test_draws_at_both_ends_and_on_every_boundary_take_the_exact_token(name, tp):
    row = edge_rows()[name]
    draws = edges_of(row)
    alone = VocabShard(VocabLayout(len(row), 1, multiple_of=1))
    whole = open_scores(row.expand(len(draws), -1).contiguous(), alone, "draw")
    numbers = torch.tensor(draws)
    expected = draw(whole, Numbers(numbers, numbers, numbers)).token_ids.tolist()
    if "equal" in name:
        assert expected == [0, len(row) - 1] + [number * len(row) >> 62 for number in draws[2:]]
    for error in (TRUE, WIDE[1]):
        results = EDGES(tp, name, error)
        assert all(got == expected for got, _ in results), f"{error=}"
        assert results[0][1].total() >= len(draws) - 2, "a draw beside a boundary was told from approximate masses"
        assert results[0][1]["no column"] and (results[0][1]["no owner"] or name == "one rank")


# what a rank sends each other one of a row's bytes, at most: its mass and then the token; once more where that waits
MOST = {"sure": 16, "no column": 24, "no owner": 24}
HEADER = 64


def _sent(rank, error):
    """Bytes to each other rank, above the header and the unused part of the first payload, of one row after another."""
    shard, whole = shard_of(37), logits_of("normal", 37, 60)
    others, seen = shard.tp_size - 1, []
    for row in range(60):
        room = max(shard.sizes("sample")) - 8
        shard.traffic.reset()
        with bounds_of(error) as ways, collectives() as (issued, sent):
            token = sample(shard.slice(whole[row : row + 1], -1), shard=shard, streams=streams_of(60).rows([row]))
        (way,) = ways or ["sure"]
        assert shard.traffic.bytes == sent and shard.traffic.calls == issued
        assert issued.keys() <= {"all_gather", "broadcast", "gather"}
        each = (sent["all_gather"] + sent["broadcast"]) // others + sent["gather"]  # a gather is to one of them
        seen.append((way, each - HEADER - room, int(token.token_ids)))
    assert room == 0, "the first payload has the size of what it carries by now"
    return seen


SENT = Batch(_sent, [(error,) for error in (0.05, TRUE)])


@SEVERAL
def test_a_row_sends_16_bytes_to_each_rank_and_24_where_it_waits_for_exact_masses(tp):
    expected = reference.draw(logits_of("normal", 37, 60), streams_of(60).bits()).tolist()
    most = Counter()
    for error in (0.05, TRUE):
        for seen in SENT(tp, error):
            assert [token for *_, token in seen] == expected
            for way, each, _ in seen:
                most[way] = max(most[way], each)
    assert most == MOST
