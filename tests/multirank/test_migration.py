"""Rows that move to their new ids on 1 to 4 ranks, bit for bit what one process does with the whole table."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.multirank.migration_cases import OLD, edited, joined, oracle, raised, shard_of, whole
from tests.multirank.shared_world import ALL_SIZES, Batch
from tests.tolerances import bits
from vocab_parallel import VocabLayout, VocabShard, collectives
from vocab_parallel.vocabulary.mapping import VocabMap
from vocab_parallel.vocabulary.migration import migrate, moving
from vocab_parallel.vocabulary.migration.initialization import CopyOf, MeanOfRows, MeanOfSources, Normal, RowInit, Zeros

MAPS = {
    "edited": edited(),
    "append": VocabMap.append(OLD, 64),
    "shrunk": edited(appended=0, permuted=0, dropped=500),
    "reversed": VocabMap.permutation(list(range(OLD - 1, -1, -1))),
    "same": VocabMap.append(OLD, 0),
    "stays": VocabMap.append(OLD, 0),
    "tiny": edited(9, 2, 6, 2, seed=3),
    "to few": VocabMap.from_pairs(9, 3, {8: 0, 0: 1}, allow_drop=True),
}
MULTIPLES = {"edited": (1, 7), "append": (64, 64), "reversed": (4, 4), "same": (1, 128), "stays": (8, 8)}
INITS: dict[str, RowInit] = {
    "zeros": Zeros(),
    "mean": MeanOfRows(),
    "sources": MeanOfSources(),
    "copy": CopyOf({int(new): at for at, new in enumerate(MAPS["edited"].new_ids)}),
    "normal": Normal(7),
}
ZERO = ("exp_avg", "row_var", "mask", "count")


def tables(rows: int) -> dict[str, Tensor]:
    """Weights and states of many kinds; some bits that arithmetic would not keep."""
    exp_avg = whole(rows, 5, seed=3)
    exp_avg.view(torch.int32)[1, 2] = 0x7FC12345  # a NaN with a message
    exp_avg[0] = -0.0
    return {
        "weight": whole(rows, 5),
        "low": whole(rows, 3, 2, dtype=torch.bfloat16, seed=1),
        "bias": whole(rows, seed=2),
        "exp_avg": exp_avg,
        "row_var": whole(rows, 1, dtype=torch.float64, seed=4),
        "mask": whole(rows, seed=5) > 0,
        "count": torch.arange(rows),
    }


@functools.cache
def expected_of(name: str, init: str | None, key: str) -> Tensor:
    return oracle(tables(MAPS[name].old_size)[key], MAPS[name], INITS[init] if init is not None else None)


def local_state(shard: VocabShard) -> dict[str, Tensor]:
    state = {name: shard.slice(table) for name, table in tables(shard.vocab_size).items()}
    state["low"] = state["low"].transpose(1, 2).contiguous().transpose(1, 2)  # rows that are not contiguous
    for name in ("weight", "bias"):
        state[name][shard.num_valid :] = torch.nan  # what padding holds is nobody's matter
    return state


def layouts(name: str, tp: int) -> tuple[VocabShard, VocabShard]:
    old, new = MULTIPLES.get(name, (1, 1))
    vocab_map = MAPS[name]
    return shard_of(vocab_map.old_size, tp, old), shard_of(vocab_map.new_size, tp, new)


def _moves(rank: int, name: str, init: str, block: int) -> dict[str, Any]:
    src, dst = layouts(name, dist.get_world_size())
    state = local_state(src)
    before = {key: value.clone() for key, value in state.items()}
    largest = []
    start, size = collectives._start, moving.BLOCK_BYTES

    def counting(what: str, group: Any, sent: int, result: Tensor, keep: Tensor, issue: Any) -> Any:
        largest.append(max(result.nbytes, keep.nbytes))
        return start(what, group, sent, result, keep, issue)

    collectives._start, moving.BLOCK_BYTES = counting, block
    try:
        moved = migrate(state, MAPS[name], src=src, dst=dst, init=INITS[init], zero=ZERO)
    finally:
        collectives._start, moving.BLOCK_BYTES = start, size
    unchanged = all(torch.equal(bits(before[key]), bits(state[key])) for key in state)
    return {
        "moved": moved, "unchanged": unchanged, "largest": max(largest, default=0), "calls": len(largest),
        "sent": src.traffic.bytes["all_to_all"],
    }  # fmt: skip


def _refused(rank: int, what: str) -> tuple[str, str]:
    tp = dist.get_world_size()
    vocab_map, init, last = MAPS["tiny"], INITS["sources"], rank == tp - 1
    src, dst = layouts("tiny", tp)
    state = {"weight": shard_of(9, tp).slice(whole(9, 4)), "exp_avg": shard_of(9, tp).slice(whole(9, 4))}
    zero: tuple[str, ...] = ("exp_avg",)
    if what == "another map" and last:
        vocab_map = edited(9, 2, 6, 2, seed=4)
    if what == "another init" and last:
        init = Normal(1)
    if what == "a NaN row that is a source":
        source = next(iter(vocab_map.sources.values()))[0]
        if src.start <= source < src.stop:
            state["weight"][source - src.start, 2] = torch.nan
    if what == "a NaN row under the mean":
        init = MeanOfRows()
        if rank == 0:
            state["weight"][1, 0] = torch.inf
    if what == "another shape" and last:
        state["weight"] = state["weight"][:-1]
    if what == "another dtype" and last:
        state["exp_avg"] = state["exp_avg"].double()
    if what == "no rows" and last:
        state["weight"] = state["weight"][:0]
    if what == "a map of another vocabulary":
        vocab_map = MAPS["same"]
    if what == "integer weights":
        state["weight"] = state["weight"].long()
    if what == "an unknown name":
        zero = ("exp_avg", "exp_avg_sq")
    if what == "rows to copy that are not named":
        init = CopyOf({7: 1})
    if what == "other ranks" and tp > 1:
        dst = VocabShard(VocabLayout(vocab_map.new_size, 1))
    traffic = src.traffic.total_calls
    kind, words = raised(migrate, state, vocab_map, src=src, dst=dst, init=init, zero=zero)
    assert src.traffic.total_calls - traffic <= 2, "something went on after the error"
    dist.barrier()  # the ranks are still in step
    return kind, words


MOVES = [
    ("edited", "zeros", 2**22), ("edited", "mean", 2**22), ("edited", "sources", 2**22), ("edited", "copy", 4096),
    ("edited", "normal", 4096), ("edited", "sources", 4096), ("append", "sources", 2**22), ("shrunk", "mean", 2048),
    ("reversed", "zeros", 1024), ("same", "zeros", 2**22), ("stays", "zeros", 2**22), ("tiny", "sources", 1),
    ("to few", "mean", 2**22),
]  # fmt: skip
ERRORS = {
    "another map": ("LayoutMismatchError", "disagree"),
    "another init": ("LayoutMismatchError", "new rows normal:1"),
    "a NaN row that is a source": ("NonFiniteError", "of weight holds NaN"),
    "a NaN row under the mean": ("NonFiniteError", "row 1 of weight holds NaN"),
    "another shape": ("LayoutMismatchError", "weight must be this rank's rows"),
    "another dtype": ("LayoutMismatchError", "float64"),
    "no rows": ("UngatheredWeightError", "python -m vocab_parallel migrate"),
    "a map of another vocabulary": ("VocabularyError", "map's old vocabulary has 3001 ids, src has 9"),
    "integer weights": ("LayoutMismatchError", "torch.int64"),
    "an unknown name": ("VocabularyError", "exp_avg_sq"),
    "rows to copy that are not named": ("VocabularyError", "no row is named"),
    "other ranks": ("LayoutMismatchError", "one group of ranks"),
}
AGREEMENT = ("another map", "another init", "another dtype", "other ranks")  # need a second rank


def _either(rank: int, kind: str, *case: Any) -> Any:
    return _moves(rank, *case) if kind == "moves" else _refused(rank, *case)


RUN = Batch(_either, [*(("moves", *case) for case in MOVES), *(("refused", what) for what in ERRORS)])


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize(("name", "init", "block"), MOVES)
def test_every_row_moves_and_begins_as_in_one_process(name: str, init: str, block: int, tp: int):
    vocab_map = MAPS[name]
    ranks = RUN(tp, "moves", name, init, block)
    layout = VocabLayout(vocab_map.new_size, tp, multiple_of=MULTIPLES.get(name, (1, 1))[1])
    assert all(result["unchanged"] for result in ranks), "a tensor that was given has changed"
    for key, table in tables(vocab_map.old_size).items():
        got = joined([result["moved"][key] for result in ranks], layout)
        if init == "normal" and key not in ZERO:
            expected = joined([RUN(1, "moves", name, init, block)[0]["moved"][key]], VocabLayout(
                vocab_map.new_size, 1, multiple_of=MULTIPLES[name][1]))  # fmt: skip
            kept = vocab_map.new_to_old >= 0
            assert torch.equal(bits(expected[kept]), bits(oracle(table, vocab_map, Zeros())[kept]))
            assert expected[~kept].double().std() > 0.5
        else:
            expected = expected_of(name, None if key in ZERO else init, key)
        assert got.dtype == table.dtype
        wrong = (bits(got) != bits(expected)).view(len(got), -1).any(1).nonzero()[:, 0].tolist()
        assert not wrong, f"{key}: rows {wrong[:5]} differ"


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(("name", "init", "block"), [case for case in MOVES if 1 < case[2] < 2**22])
def test_no_rank_hands_a_collective_more_than_a_block(name: str, init: str, block: int, tp: int):
    # A row takes up to 48 bytes, a new row up to four of them on each rank, an exchange of headers or errors 4 KiB.
    for result in RUN(tp, "moves", name, init, block):
        assert 0 < result["largest"] <= max(block, 4 * 40 * tp, 64 * tp), result["largest"]


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_rows_that_stay_on_their_rank_are_not_sent(tp: int):
    header_alone = {result["calls"] for result in RUN(tp, "moves", "stays", "zeros", 2**22)}
    assert header_alone == {1}
    assert all(result["calls"] > 1 for result in RUN(tp, "moves", "same", "zeros", 2**22))


@pytest.mark.parametrize("tp", [2, 3, 4])
def test_traffic_counts_the_rows_that_leave_their_rank_and_no_others(tp: int):
    vocab_map, layout = MAPS["reversed"], VocabLayout(OLD, tp, multiple_of=4)
    row_bytes = sum(table[:1].nbytes for table in tables(OLD).values())
    for rank, result in enumerate(RUN(tp, "moves", "reversed", "zeros", 1024)):
        leave = sum(layout.owner(new) != rank for new in vocab_map.old_to_new[list(layout.range(rank))].tolist())
        assert 0 < result["sent"] == leave * row_bytes


@pytest.mark.parametrize("tp", ALL_SIZES)
@pytest.mark.parametrize("what", ERRORS)
def test_what_cannot_be_is_refused_with_one_error_on_every_rank(what: str, tp: int):
    kinds_and_words = RUN(tp, "refused", what)
    if tp == 1 and what in AGREEMENT:
        assert kinds_and_words == [("nothing", "")]
        return
    kind, words = ERRORS[what]
    assert {found for found, _ in kinds_and_words} == {kind}, kinds_and_words
    assert all(words in found for _, found in kinds_and_words), kinds_and_words
    assert len({found for _, found in kinds_and_words}) == 1
