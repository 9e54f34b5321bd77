"""Both losses on 1 to 4 ranks against the float64 oracle: values, gradients, equal ranks, untouched arguments."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from tests.multirank.sharded import TP, Case, Cases, both, run_case, whole
from tests.ranks import run_ranks
from tests.tolerances import require_close
from vocab_parallel import reference

LAYOUTS = Cases(
    [
        replace(case, bias=case.linear and bool(options))
        for vocab, multiple_of in [(9, 1), (5, 2), (1, 1), (2, 1), (1, 4), (13, 4), (16, 4), (3, 128)]
        for name, options in [("", {}), (", smoothed", {"label_smoothing": 0.1, "smoothing_over": "others"})]
        for case in both(
            f"V={vocab} in multiples of {multiple_of}{name}", vocab=vocab, multiple_of=multiple_of, options=options
        )
    ]
)


@TP
@LAYOUTS.each
def test_any_vocabulary_over_any_number_of_ranks(case, tp):
    LAYOUTS.check(case, tp)


OPTIONS = Cases(
    [
        replace(case, bias=case.linear, chunk_size=3 if case.linear else None)
        for reduction, (smoothing, over) in product(
            ["none", "sum", "mean"], [(0.0, "all"), (0.1, "all"), (0.1, "others"), (1.0, "all")]
        )
        for case in both(
            f"{reduction} smoothing {smoothing} over {over}",
            options={"reduction": reduction, "label_smoothing": smoothing, "smoothing_over": over},
        )
    ],
    on_two=True,
)


@OPTIONS.each_on_two
def test_reductions_and_smoothing_equal_the_oracle_with_any_upstream_gradient(case, tp):
    OPTIONS.check(case, tp)


PLAIN = Cases(
    [
        case
        for dtype in (torch.float64, torch.float32, torch.bfloat16)
        for reduction in ("none", "sum", "mean")
        for case in both(f"{dtype} {reduction}", upstream_one=True, dtype=dtype, options={"reduction": reduction})
    ]
)


@pytest.mark.parametrize("tp", [1, 2])
@PLAIN.each
def test_a_plain_backward_gives_gradients_that_the_caller_may_overwrite(case, tp):
    PLAIN.check(case, tp)


DTYPES = Cases(
    [
        replace(case, bias=case.linear)
        for dtype in (torch.float32, torch.bfloat16)
        for reduction in ("none", "mean")
        for case in both(
            f"{dtype} {reduction}", dtype=dtype, options={"reduction": reduction, "label_smoothing": 0.1}, leading=(24,)
        )
    ]
)


@pytest.mark.parametrize("tp", [2, 4])
@DTYPES.each
def test_dtypes_keep_gradients_in_the_arguments_dtype_and_losses_in_float32(case, tp):
    DTYPES.check(case, tp)


ROWS = Cases(
    [
        *both("all rows ignored, mean", ignored="all"),
        *both("all rows ignored, sum", ignored="all", options={"reduction": "sum"}),
        *both("all rows ignored, none", ignored="all", options={"reduction": "none"}),
        *both("all rows ignored, smoothing", ignored="all", options={"label_smoothing": 0.1}),
        *both("no rows, mean", leading=(0,)),
        *both("no rows, sum", leading=(0,), options={"reduction": "sum"}),
        *both("no rows, none", leading=(0,), options={"reduction": "none"}),
        *both("one row", leading=(1,), ignored="none"),
        *both("leading [s, b]", leading=(4, 3), options={"reduction": "none"}),
        *both("leading [s, b, 1] mean", leading=(2, 3, 1)),
        *both("leading [s, 0]", leading=(4, 0), options={"reduction": "none"}),
        *both("one row without a dimension", leading=(), ignored="none", options={"reduction": "none"}),
        *both("ignore_index in the vocabulary", options={"ignore_index": 3, "label_smoothing": 0.2}),
        *both("ignore_index 0", options={"ignore_index": 0, "reduction": "none"}),
        *both("ignore_index of the last rank", options={"ignore_index": 8}),
        *both("ignore_index -1", options={"ignore_index": -1, "reduction": "sum"}),
    ],
    on_two=True,
)


@ROWS.each_on_two
def test_ignored_rows_missing_rows_and_leading_shapes(case, tp):
    ranks = ROWS.check(case, tp)
    if case.ignored == "all" or 0 in case.leading:
        for key in ("d_input", "d_weight")[: 2 if case.linear else 1]:
            for result in ranks:
                assert bool((result[key] == 0).all()), f"{key} must be zero, not missing"


CHUNKS = Cases(
    [
        Case(
            f"chunks of {chunk_size} {reduction}",
            leading=(6,),
            chunk_size=chunk_size,
            bias=True,
            options={"reduction": reduction, "label_smoothing": 0.1},
        )
        for chunk_size, reduction in product([1, 2, 3, 6, 7, 100], ["none", "mean"])
    ],
    on_two=True,
)


@CHUNKS.each_on_two
def test_chunks_need_not_divide_the_rows(case, tp):
    CHUNKS.check(case, tp)


FROZEN = Cases(
    [
        Case(f"frozen {' and '.join(frozen)} {reduction}", frozen=frozen, bias=True, options={"reduction": reduction})
        for frozen in [("input",), ("weight",), ("bias",), ("input", "bias"), ("weight", "bias"), ("input", "weight")]
        for reduction in ("mean", "none")
    ]
    + both("all frozen", frozen=("input", "weight"))
)


@pytest.mark.parametrize("tp", [1, 3])
@FROZEN.each
def test_frozen_arguments_leave_the_other_gradients_right(case, tp):
    FROZEN.check(case, tp)


SPREAD = Cases(
    [
        Case(
            f"{spread}, {'local' if target_local else 'all'} targets, {reduction}",
            spread=spread,
            target_local=target_local,
            chunk_size=chunk_size,
            bias=True,
            options={"reduction": reduction, "label_smoothing": 0.1},
        )
        for spread, target_local, (reduction, chunk_size) in product(
            ["even", "uneven", "last has none", "only last has any"],
            [True, False],
            [("mean", None), ("sum", 2), ("none", 3)],
        )
    ],
    on_two=True,
)


@SPREAD.each_on_two
def test_sequence_parallel_rows_may_be_uneven_or_missing(case, tp):
    SPREAD.check(case, tp)


SPREAD_FURTHER = Cases(
    [
        Case("no rows anywhere", spread="even", leading=(0,)),
        Case("all ignored", spread="even", ignored="all"),
        Case("leading [s, b]", spread="uneven", leading=(5, 2), options={"reduction": "none"}),
        Case("leading [s, b], all targets", spread="uneven", leading=(5, 2), target_local=False, chunk_size=3),
        Case("bfloat16", spread="uneven", leading=(24,), dtype=torch.bfloat16, chunk_size=5),
        Case("frozen weight", spread="uneven", frozen=("weight",), options={"reduction": "none"}),
        Case("frozen input", spread="uneven", frozen=("input",)),
        Case("odd vocabulary", spread="uneven", vocab=13, multiple_of=4),
    ]
)


@pytest.mark.parametrize("tp", [2, 4])
@SPREAD_FURTHER.each
def test_sequence_parallel_with_other_settings(case, tp):
    SPREAD_FURTHER.check(case, tp)


SMOOTHED = [{"label_smoothing": 0.1}, {"label_smoothing": 0.1, "smoothing_over": "others"}]
OFFSETS = Cases(
    [
        Case(f"offset {offset:g} {index}", linear=False, dtype=torch.float32, offset=offset, options=options)
        for index, (offset, options) in enumerate(
            [*product([1e4, -1e5, 1e6], [{"reduction": "none"}]), *product([1e2, -1e3, 1e4], SMOOTHED)]
        )
    ]
)


@TP
@OFFSETS.each
def test_large_offsets_keep_their_digits(case, tp):
    """Logits near 1e6 have a spacing of 0.06 in float32; the loss of those logits is still exact to float32."""
    OFFSETS.check(case, tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_large_offsets_in_a_projection_lose_no_more_than_the_projection(tp):
    """The oracle gets the float32 logits that the projection gives: the loss may add no error of its own."""
    case = Case("offset", dtype=torch.float32, offset=65536.0, scale=64.0, hidden=2, options={"reduction": "none"})
    ranks = run_ranks(run_case, tp, case)
    tensors = whole(case)
    logits = reference.logits(tensors["input"], tensors["weight"]).double()
    expected = reference.cross_entropy(logits, tensors["target"], reduction="none")
    require_close("loss", ranks[0]["loss"], expected, torch.float32)
