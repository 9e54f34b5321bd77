"""Indices past 2^31 and ids at the limits of their dtype: arithmetic that must not be 32-bit, without the memory.

Tensors with more than 2^31 elements are on the meta device, or lie in a file without blocks, where only what is touched
exists.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from tests.batch import attempt
from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from tests.tolerances import require_equal
from vocab_parallel import RowOutputs, VocabLayout, VocabShard, cross_entropy, linear_cross_entropy, reference
from vocab_parallel.agreement import checksum
from vocab_parallel.arguments import check_target, target_found
from vocab_parallel.loss.gradients import RangeGradients, logits_gradient
from vocab_parallel.loss.normalizer import LocalStatistics, Wanted, merge, row_blocks, statistics
from vocab_parallel.loss.objective import CrossEntropy, LogProbability
from vocab_parallel.loss.options import LossOptions, Scores
from vocab_parallel.loss.targets import Targets, soft_statistics

INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
LOWEST, HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
MANY = (1 << 15, (1 << 17) + 1)  # rows and columns: more than 2^32 logits


def alone(vocab, **settings):
    return VocabShard(VocabLayout(vocab, 1, multiple_of=1), **settings)


@pytest.mark.parametrize("shape", [(1 << 20, 1 << 17), MANY, (3, 1 << 33), (1 << 33, 3), (5, 0), (0, 5), (1, 1)])
@pytest.mark.parametrize("expanded", [False, True])
def test_blocks_cover_every_row_once_however_many_logits_there_are(shape, expanded):
    if expanded:  # blocks as they are on a CPU: many
        shape = (min(shape[0], 1 << 16), shape[1])
    logits = torch.zeros(1, 1).expand(shape) if expanded else torch.empty(shape, device="meta")
    blocks = row_blocks(logits)
    edges = [0, *(block.stop for block in blocks)]
    assert [block.start for block in blocks] == edges[:-1] and edges[-1] == shape[0]
    heights = [block.stop - block.start for block in blocks]
    assert all(height > 0 for height in heights)
    assert all(height * shape[1] < 1 << 31 or height == 1 for height in heights)
    assert len(blocks) <= 1 + shape[0] * math.ceil(max(shape[1], 1) / 1024) // 64, "the blocks are too small"


def test_layouts_are_plain_integers_of_any_size():
    for vocab, tp in [((1 << 31) + 1, 2), ((1 << 40) - 1, 8), ((1 << 62) + 3, 64)]:
        layout = VocabLayout(vocab, tp)
        assert layout.padded_size == layout.shard_size * tp >= vocab
        ranges = [layout.range(rank) for rank in range(tp)]
        assert ranges[0].start == 0 and ranges[-1].stop == vocab
        assert all(a.stop == b.start for a, b in itertools.pairwise(ranges))
        for rank, ids in enumerate(ranges):
            if ids:
                assert layout.owner(ids.start) == layout.owner(ids.stop - 1) == rank
        assert VocabLayout.from_padded(vocab, layout.padded_size, tp) == layout


# Ranges of ids that lie past what the narrow dtypes can hold, or across their limits.
RANGES = [(0, 100), (100, 200), (200, 300), (0, 1 << 31), (1 << 31, 1 << 32), (1 << 33, (1 << 33) + 9), (-1, -1)]


IGNORED = [-100, -1, 0, 156, 255, 300, 1 << 31, 1 << 40, LOWEST, HIGHEST]


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_targets_of_every_integer_dtype_are_compared_as_the_numbers_they_are(dtype):
    limits = torch.iinfo(dtype)
    edges = {limits.min, limits.max, *IGNORED} | {
        bound + step for pair in RANGES for bound in pair for step in (-1, 0, 1)
    }
    values = sorted(value for value in edges if limits.min <= value <= limits.max)
    target = torch.tensor(values, dtype=dtype)
    for ignore_index, (start, stop) in itertools.product(IGNORED, RANGES):
        targets, what = (
            Targets(target, start, stop, ignore_index),
            f"ids [{start}, {stop}), ignore_index {ignore_index}",
        )
        owned = [value != ignore_index and start <= value < stop for value in values]
        assert targets.valid.tolist() == [value != ignore_index for value in values], what
        assert targets.owned.tolist() == owned, what
        expected = [value - start if mine else 0 for value, mine in zip(values, owned, strict=True)]
        assert targets.local.tolist() == expected, what
        assert targets.local.dtype == torch.int64
        assert int(targets.count) == sum(value != ignore_index for value in values)
        some = targets.rows(torch.tensor([len(values) - 1, 0]))
        assert some.local.tolist() == [expected[-1], expected[0]]


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (LOWEST, torch.int64), (HIGHEST, torch.int64), (1 << 31, torch.int64), (-(1 << 31) - 1, torch.int64),
        ((1 << 32) + 5, torch.int64), (torch.iinfo(torch.int32).max, torch.int32),
        (torch.iinfo(torch.int32).min, torch.int32), (-128, torch.int8), (255, torch.uint8), (300, torch.int16),
    ],
)  # fmt: skip
def test_a_target_outside_the_vocabulary_is_named_by_its_number(value, dtype, deferred):
    """Numbers that are a real id modulo 2^32, or 2^8, are none of the vocabulary."""
    shard = alone(200, deferred_errors=deferred)
    target = torch.tensor([5, value, 7], dtype=dtype)
    if deferred:
        found = target_found(target, shard, -100)
        assert found.words.tolist() == [1, value]
        error = found.describe(1, value)
    else:
        error = attempt(lambda: check_target(target, shard, -100))
        assert error.kind == "TargetRangeError"
        error = error.message
    assert f"target {value} at row 1" in str(error)
    check_target(target, shard, value)  # as ignore_index it is fine
    if deferred:
        assert target_found(target, shard, value).words.tolist()[0] == -1


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.bool])
def test_dtypes_that_hold_no_ids_are_refused(dtype):
    target = torch.zeros(3).to(dtype)
    found = attempt(lambda: cross_entropy(torch.zeros(3, 9), target, shard=alone(9)))
    assert found.kind == "LayoutMismatchError" and str(dtype) in found.message


def test_the_checksum_of_ids_is_that_of_64_bit_numbers():
    ids = [LOWEST, HIGHEST, 0, -1, 1 << 31, (1 << 31) - 1, 1 << 33, -100]
    found = int(checksum(torch.tensor(ids)))
    for at, value in enumerate(ids):
        other = list(ids)
        other[at] = value ^ (1 << 32)  # the same in its low half
        assert int(checksum(torch.tensor(other))) != found
    assert int(checksum(torch.tensor(ids[::-1]))) != found
    assert int(checksum(torch.tensor([3], dtype=torch.uint8))) == int(checksum(torch.tensor([3])))


def test_no_two_lists_of_small_ids_or_round_floats_have_one_checksum():
    ids = torch.cartesian_prod(*[torch.arange(6)] * 5)
    floats = torch.cartesian_prod(*[torch.tensor([0.25, 0.5, 1.0, 2.0], dtype=torch.float64)] * 6)
    for lists in (ids, floats.view(torch.int64)):
        assert len({int(checksum(one)) for one in lists}) == len(lists)


WANTED = [Wanted(), Wanted(shifted_sum=True), Wanted(expected=True, top=True), Wanted(soft=True)]


@pytest.mark.parametrize("wanted", WANTED, ids=lambda wanted: "-".join(wanted.words[3:]) or "plain")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_statistics_and_gradients_of_more_than_2_to_the_32_logits_have_the_right_form(wanted, dtype):
    """On the meta device, where shapes and dtypes are real and no number is."""
    rows, columns = MANY
    logits = torch.empty(MANY, dtype=dtype, device="meta")
    target = torch.empty(rows, dtype=torch.int64, device="meta")
    targets, scores = Targets(target, 0, columns, -100), Scores(3.0, 0.7)
    local = statistics(logits, scores=scores, wanted=wanted, in_place=False)
    soft, extra = None, None
    if wanted.soft:
        soft = torch.empty(MANY, device="meta")
        extra = soft_statistics(logits, local.maximum, local.sumexp, soft, scores, False)
    payload = local.pack(targets.pick(logits, scores), extra)
    assert payload.shape == (len(wanted.words), rows) and payload.dtype == torch.float32
    if wanted.top:
        assert local.argmax.dtype == torch.int64
    normalizer = merge(payload[None], wanted, [range(columns)])
    if wanted.expected:
        objective = LogProbability()
        upstream = (torch.empty(rows, device="meta"),) * 2
    else:
        smoothing = 0.1 if wanted.shifted_sum else 0.0
        objective = CrossEntropy(
            LossOptions(soft="probabilities" if wanted.soft else "", label_smoothing=smoothing), columns
        )
        upstream = (torch.empty(rows, device="meta"),)
    values, coefficients = objective.evaluate(normalizer, targets, slice(None), upstream)
    assert all(value.shape == (rows,) for value in values)
    out = torch.empty_like(logits)
    logits_gradient(logits, out, normalizer, coefficients, targets, scores, soft)
    assert out.shape == MANY and out.dtype == dtype


def test_the_first_of_equal_maxima_is_found_past_2_to_the_31_ids():
    """Each range gives its column; the id is that and the range's start, which 32 bits do not hold."""
    ids = [range(start, start + (1 << 30)) for start in (0, 1 << 31, 1 << 33, 1 << 40)]
    column = (1 << 30) - 1
    for dtype in (torch.float32, torch.float64):
        payloads = []
        for rank in range(len(ids)):
            maximum = torch.tensor([float(rank == 0), float(rank >= 2), float(rank == 3)], dtype=dtype)
            one = torch.ones_like(maximum)
            local = LocalStatistics(maximum, one, second=maximum - 1, argmax=torch.full((3,), column))
            payloads.append(local.pack(torch.zeros_like(maximum)))
        found = merge(torch.stack(payloads), Wanted(top=True), ids)
        assert found.argmax.tolist() == [column, (1 << 33) + column, (1 << 40) + column]
        assert found.argmax.dtype == torch.int64


def sparse(path, shape, dtype=torch.bfloat16):
    """Zeros in a file that takes no disk and no memory until something is written."""
    elements = math.prod(shape)
    assert elements > 1 << 31
    size = elements * dtype.itemsize
    with open(path, "wb") as file:
        file.truncate(size)
    storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=size)
    return torch.empty(0, dtype=dtype).set_(storage, 0, shape)


def test_a_targets_score_is_read_past_2_to_the_31_elements(tmp_path):
    rows, columns = 9, 1 << 28
    logits = sparse(tmp_path / "logits", (rows, columns))
    target = torch.tensor([columns - 1, 0, 5, -100, 7, columns - 2, 1 << 27, 3, columns - 1])
    for row, column in enumerate(target.tolist()):
        if column >= 0:
            logits[row, column] = row + 1
    picked = Targets(target, 0, columns, -100).pick(logits, Scores())
    assert picked.tolist() == [1, 2, 3, 0, 5, 6, 7, 8, 9]
    shifted = Targets(target + (1 << 40), 1 << 40, (1 << 40) + columns, (1 << 40) - 100).pick(logits, Scores())
    require_equal("the same far up in the vocabulary", [picked, shifted])


def test_a_targets_entry_is_cleared_past_2_to_the_31_elements(tmp_path):
    rows, columns = 9, 1 << 28
    exponentials = sparse(tmp_path / "exponentials", (rows, columns))
    target = torch.tensor([columns - 1, 0, 5, -100, 7, columns - 2, 1 << 27, 3, columns - 1])
    touched = [(row, column) for row, column in enumerate(target.tolist()) if column >= 0]
    neighbours = [(row, column - 1 if column else 1) for row, column in touched]
    for row, column in touched + neighbours:
        exponentials[row, column] = 1.0
    exponentials[3, 0] = 1.0  # the column that stands in for the target of an ignored row
    gradients = RangeGradients(torch.empty(columns, 0, dtype=torch.bfloat16), None, None, False, Scores())
    gradients.start(exponentials, Targets(target, 0, columns, -100))
    assert all(exponentials[at] == 0 for at in touched)
    assert all(exponentials[at] == 1 for at in [*neighbours, (3, 0)])


def test_a_targets_row_of_the_weight_is_read_past_2_to_the_31_elements(tmp_path):
    rows, width = (1 << 28) + 2, 9
    weight = sparse(tmp_path / "weight", (rows, width))
    target = torch.tensor([rows - 1, 0, -100, 1 << 27])
    weight[rows - 1], weight[0], weight[1 << 27] = 1.0, 2.0, 3.0
    targets = Targets(target, 0, rows, -100)
    gradients = RangeGradients(weight, None, None, True, Scores())
    zeros, ones = torch.zeros(4), torch.ones(4)
    hidden, product = torch.ones(4, width, dtype=torch.bfloat16), torch.zeros(4, width, dtype=torch.bfloat16)
    at_target = torch.where(targets.owned, ones, zeros)
    grad = gradients.combine(hidden, product, zeros, at_target, None, targets, torch.ones(()))[0]
    assert grad[:, 0].tolist() == [1.0, 2.0, 0.0, 3.0]


def _narrow(rank, dtype):
    """What differs between both losses of narrow ids, on shards past what the dtype holds, and those of int64 ids."""
    shard = shard_of(50_000)
    draw = torch.Generator().manual_seed(1)
    whole_logits = torch.randn(8, 50_000, generator=draw)
    hidden, weight = torch.randn(8, 4, generator=draw), torch.randn(50_000, 4, generator=draw)
    logits, rows = shard.slice(whole_logits, -1).requires_grad_(), shard.slice(weight).requires_grad_()
    limits, wrong = torch.iinfo(dtype), []
    ids = [0, 1, 44, 99, 100, 127, 44, min(limits.max, 49_999)]
    target = torch.tensor(ids)
    for ignore_index, reduction in itertools.product((-100, 44, 156, 300, -156, 1 << 40, LOWEST), ("none", "mean")):
        options, seen = {"reduction": reduction, "ignore_index": ignore_index}, []
        for given in (target, target.to(dtype)):
            outputs = RowOutputs("correct", "argmax", "logprob")
            value = cross_entropy(logits, given, shard=shard, outputs=outputs, **options)
            fused = linear_cross_entropy(hidden, rows, given, shard=shard, **options)
            (gradient,) = torch.autograd.grad(value.sum(), logits)
            seen.append([value.detach(), fused.detach(), gradient, outputs.correct, outputs.logprob])
        right = reference.cross_entropy(whole_logits.double(), target, **options)
        if not torch.allclose(seen[0][0].double(), right, rtol=1e-5):
            wrong.append(f"int64 ids, {options}: {seen[0][0]}, expected {right}")
        for name, mine, wide in zip(
            ("loss", "fused loss", "gradient", "correct", "logprob"), seen[1], seen[0], strict=True
        ):
            if not torch.equal(mine, wide):
                wrong.append(f"{name} of {dtype} ids, {options}: off by {(mine.double() - wide.double()).abs().max()}")
    return wrong


NARROW = Batch(_narrow, [(dtype,) for dtype in INTEGERS])


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_narrow_ids_give_the_loss_of_wide_ones(dtype, tp):
    """For a vocabulary that the dtype cannot count, of ids that it can hold."""
    assert NARROW(tp, dtype) == [[]] * tp
