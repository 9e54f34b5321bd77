"""Layouts and the embedding."""

from __future__ import annotations

from typing import Any

import torch

from tests.batch import Attempt, assert_all_raise, attempt, has_word
from tests.case_runners.common import Expected, Ranks
from tests.cases import Case, as_target, as_tensor, local_part
from vocab_parallel import (
    VocabLayout,
    vocab_parallel_embedding,
)


def check_pad_plan(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    for row in expect.take("table"):
        layout = VocabLayout(row["vocab"], row["tp"], multiple_of=row["multiple"])
        real = [len(layout.range(rank)) for rank in range(row["tp"])]
        plan = (layout.padded_size, layout.shard_size, layout.padded_size - layout.vocab_size, real)
        assert plan == (row["padded"], row["per_rank"], row["pad_rows"], row["real_rows_per_rank"]), row


def check_pad_error(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    assert expect.take("raises") == "ValueError"
    made = attempt(lambda: VocabLayout.from_padded(case.inputs["vocab"], case.inputs["pad_to"], tp))
    assert_all_raise(case.id, [made], ["LayoutError"], expect.take("message_names"))


def check_other_tp(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Any]) -> None:
    padded = {
        case.inputs[key]: VocabLayout(
            case.inputs["vocab"], case.inputs[key], multiple_of=case.inputs["multiple"]
        ).padded_size
        for key in ("tp_from", "tp_to")
    }
    assert padded == {
        case.inputs["tp_from"]: expect.take("padded_from"),
        case.inputs["tp_to"]: expect.take("padded_to"),
    }


def observe_embedding_error(case: Case, dtype: torch.dtype, ranks: Ranks) -> Attempt:
    shard = ranks.shard(case)
    weight = local_part(as_tensor(case.inputs["weight"], dtype), 0, shard.shard_size, shard.rank)
    return attempt(lambda: vocab_parallel_embedding(as_target(case.inputs["ids"]), weight, shard=shard))


def check_embedding_error(case: Case, dtype: str, tp: int, expect: Expected, seen: list[Attempt]) -> None:
    assert "ValueError" in expect.take("raises")
    assert expect.take("all_ranks") is True
    *words, valid_range = expect.take("message_names")
    assert_all_raise(case.id, seen, ["TokenRangeError"], [*words, valid_range])
    rest = seen[0].message.replace(valid_range, "")
    assert all(has_word(rest, word) for word in words), f"{case.id}: not both {words} are named in: {rest}"
