"""`tp_invariant=True`: loss, outputs and gradients have the same bits on 1, 2 and 4 ranks, some on 8, and are right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.batch import assert_all_raise, attempt
from tests.multirank.counting import collectives
from tests.multirank.sharded import OUTPUTS, Case, call, local, oracle, whole
from tests.multirank.shared_world import Batch
from tests.tolerances import bits, require_close, require_equal
from vocab_parallel import VocabLayout, VocabShard, loss
from vocab_parallel.collectives import gather_vocab

FLOATS = (torch.float32, torch.bfloat16, torch.float64)
DTYPES = {dtype: str(dtype).removeprefix("torch.") for dtype in FLOATS}
ROWS_ONLY = tuple(name for name in OUTPUTS if name not in ("logprob", "correct"))
PADDED = 1024  # of the 1,000 ids that cases have by default: leaves of 128, the last one of 104


def invariant(name: str, padded: int = PADDED, **settings: Any) -> tuple[Case, int]:
    """A case in chunks of 8, 8 and 5 rows, and its padded vocabulary."""
    defaults = {"vocab": 1000, "hidden": 24, "leading": (21,), "chunk_size": 8, "dtype": torch.float32, "bias": True}
    execution = {"tp_invariant": True} | settings.pop("execution", {})
    return Case(name, execution=execution, **defaults | settings), padded


def shard_of(case: Case, padded: int, **settings: Any) -> VocabShard:
    tp = dist.get_world_size()
    layout = VocabLayout.from_padded(case.vocab, padded, tp)
    return VocabShard(layout, dist.group.WORLD if tp > 1 else None, **settings)


def results(case: Case, shard: VocabShard, place: Callable[[Tensor], Tensor] = lambda x: x) -> dict[str, Tensor]:
    """Loss, outputs and whole gradients. `place` puts this rank's weight where the caller keeps it."""
    mine = local(case, whole(case), shard)
    mine["weight"] = place(mine["weight"])
    for name in case.names:
        mine[name].requires_grad_()
    rows = loss.RowOutputs(*case.outputs)
    value = call(case, mine, shard, rows if case.outputs else None)
    gradients = torch.autograd.grad(value, [mine[name] for name in case.names], mine["upstream"].to(value.dtype))
    found = {"loss": value.detach()} | {f"out_{name}": getattr(rows, name) for name in case.outputs}
    for name, gradient in zip(case.names, gradients, strict=True):
        found[f"d_{name}"] = gradient if name == "input" else gather_vocab(shard, gradient)
    return found


def _run(rank: int, case: Case, padded: int) -> dict[str, Tensor]:
    return results(case, shard_of(case, padded))


def same_bits(ranks_of: dict[int, list[dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Requires the same bits on every rank at every TP size, and returns them."""
    (first, *_), *_ = ranks_of.values()
    for key in first:
        for tp, ranks in ranks_of.items():
            require_equal(f"{key} at TP {tp}, after TP 1", [first[key], *(rank[key] for rank in ranks)])
    return first


def require_right(case: Case, found: dict[str, Tensor]) -> None:
    for key, expected in oracle(case).items():
        if key not in ("out_argmax", "out_correct"):  # ties of rounded scores: `test_loss_options.py` knows them
            require_close(key, found[key], expected, case.dtype)


EACH: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"options": {"reduction": "sum"}},
    "none": {"options": {"reduction": "none"}},
    "smoothing over all": {"options": {"label_smoothing": 0.1}},
    "smoothing over the others": {"options": {"label_smoothing": 0.1, "smoothing_over": "others"}},
    "z_loss": {"options": {"z_loss": 0.1}},
    "softcap": {"options": {"softcap": 2.0}},
    "softcap and smoothing": {"options": {"softcap": 2.0, "label_smoothing": 0.1}},
    "temperature": {"options": {"temperature": 0.7}},
    "weighted": {"weighted": True},
    "no bias": {"bias": False},
    "outputs": {"outputs": OUTPUTS},
    "soft": {"soft": True, "outputs": ROWS_ONLY},
    "soft, smoothed, none": {"soft": True, "options": {"label_smoothing": 0.1, "reduction": "none"}},
    "kl": {"soft": True, "function": "kl_div"},
    "kl of logs, sum": {"soft": True, "function": "kl_div", "options": {"log_target": True, "reduction": "sum"}},
    "everything": {
        "weighted": True,
        "outputs": OUTPUTS,
        "options": {"z_loss": 0.1, "label_smoothing": 0.1, "softcap": 3.0, "temperature": 0.7, "reduction": "none"},
    },
}
SIZES = {  # vocabulary, padded vocabulary, width
    "last two leaves are empty": (700, 1024, 16),
    "leaves of 2, half of them empty": (9, 16, 5),
    "leaves of 1, a rank without ids": (4, 8, 3),
    "V=1": (1, 8, 4),
    "leaves begin at odd places": (1001, 1008, 17),
    "width 1": (1001, 1008, 1),
    "wide": (509, 512, 129),
}
ROWS: dict[str, dict[str, Any]] = {
    "one chunk": {"chunk_size": None},
    "chunks of 1": {"chunk_size": 1, "leading": (5,)},
    "the chunk from a budget": {"chunk_size": None, "execution": {"memory_budget": 8 * PADDED * 4}},
    "leading [s, b]": {"leading": (3, 2), "chunk_size": 5, "options": {"reduction": "none"}},
    "all rows ignored": {"ignored": "all"},
    "no rows": {"leading": (0,)},
    "a leaf of -inf": {"masked": tuple(range(128, 256)), "outputs": OUTPUTS},
}
CASES = [
    *(invariant(f"{name}, {word}", dtype=dtype, **settings) for dtype, word in DTYPES.items()
      for name, settings in EACH.items() if dtype != torch.float64 or name in ("mean", "soft", "everything")),
    *(invariant(f"{name}, {word}", padded, vocab=vocab, hidden=hidden, dtype=dtype, options=options)
      for dtype, word in DTYPES.items() for name, (vocab, padded, hidden) in SIZES.items()
      for options in ({"label_smoothing": 0.1}, {"label_smoothing": 0.1, "softcap": 2.0})
      if dtype != torch.float64 or name == "leaves begin at odd places"),
    *(invariant(name, **settings) for name, settings in ROWS.items()),
    *(invariant(f"V=32768, {word}", 32768, vocab=32768, hidden=64, leading=(64,), chunk_size=None, dtype=dtype)
      for dtype, word in DTYPES.items() if dtype != torch.float64),
]  # fmt: skip
ALL = Batch(_run, CASES)


@pytest.mark.parametrize("index", range(len(CASES)), ids=[case.name.replace(" ", "_") for case, _ in CASES])
def test_the_same_bits_at_tp_1_2_and_4(index):
    case, padded = CASES[index]
    require_right(case, same_bits({tp: ALL(tp, case, padded) for tp in (1, 2, 4)}))


EIGHT = Batch(
    _run,
    [
        invariant("softcap", vocab=1001, padded=1008, hidden=17, options={"softcap": 2.0}, outputs=OUTPUTS),
        invariant("mean, bfloat16", vocab=700, options={"label_smoothing": 0.1}, dtype=torch.bfloat16),
        invariant("soft", soft=True, leading=(5,)),
    ],
)


@pytest.mark.parametrize("index", range(3))
def test_the_same_bits_at_tp_8(index):
    case, padded = EIGHT.cases[index]
    same_bits({tp: EIGHT(tp, case, padded) for tp in (1, 8)})


PLAIN = Batch(_run, [invariant("plain", execution={"tp_invariant": False}, options={"reduction": "none"})])


def test_without_it_the_bits_differ():
    """So that equal bits above mean something."""
    first, *others = (PLAIN(tp, *PLAIN.cases[0])[0] for tp in (1, 2, 4))
    for key in ("loss", "d_input", "d_weight", "d_bias"):
        assert any(not torch.equal(bits(first[key]), bits(other[key])) for other in others), f"{key} is the same"


def _elsewhere(rank: int, where: str) -> list[dict[str, Tensor]]:
    """Three calls with the weight somewhere else, or errors deferred."""
    case, padded = invariant(where, 1008, vocab=1001, hidden=17, options={"label_smoothing": 0.1})
    shard = shard_of(case, padded, deferred_errors=where == "deferred")

    def flat(weight: Tensor) -> Tensor:  # as flat parameter buffers do, at a place that depends on the TP size
        buffer = torch.zeros(weight.numel() + 64)
        return buffer[1 + shard.tp_size :][: weight.numel()].view(weight.shape).copy_(weight)

    def strided(weight: Tensor) -> Tensor:
        return torch.cat([weight, weight], 1)[:, : weight.shape[1]]

    place = {"flat": flat, "strided": strided}.get(where, lambda weight: weight)
    every = [results(case, shard, place) for _ in range(3)]
    shard.raise_deferred()
    return every


ELSEWHERE = Batch(_elsewhere, [("plain",), ("deferred",), ("flat",), ("strided",)])


@pytest.mark.parametrize("where", ["plain", "deferred", "flat", "strided"])
def test_the_same_bits_wherever_the_weight_lies_and_however_often(where):
    calls = {tp: ELSEWHERE(tp, where) for tp in (1, 2, 4)}
    same_bits({tp: [call for every in ranks for call in every] for tp, ranks in calls.items()})
    if where != "strided":  # of which the GEMMs know
        same_bits({1: [ELSEWHERE(1, "plain")[0][0]], 2: calls[2][0]})


def _main_grad(rank: int, dtype: torch.dtype) -> Tensor:
    """dW twice added to what `main_grad` held."""
    case, padded = invariant("main_grad", 1008, vocab=1001, hidden=17, dtype=dtype)
    shard = shard_of(case, padded)
    weight = None
    tensors = whole(case)
    held = torch.linspace(-1, 1, tensors["weight"].numel()).view(tensors["weight"].shape)
    mine = local(case, tensors, shard)
    weight = mine["weight"].requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = shard.slice(held), False
    for _ in range(2):
        call(case, mine, shard).backward()
    return gather_vocab(shard, weight.main_grad)


MAIN_GRAD = Batch(_main_grad, [(torch.float32,), (torch.bfloat16,)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_same_bits_in_main_grad(dtype):
    require_equal("main_grad", [part for tp in (1, 2, 4) for part in MAIN_GRAD(tp, dtype)])


class Operands(TorchDispatchMode):
    """Notes the alignment in bytes, up to 64, of all that matrix products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.alignments: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_", "mv", "addmv"):
            for tensor in tree_leaves((args, kwargs, result)):
                if isinstance(tensor, Tensor) and tensor.dim() == 2:
                    self.alignments.add(min(tensor.data_ptr() & -tensor.data_ptr() or 64, 64))
        return result


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_every_matrix_product_has_operands_that_are_aligned_alike(reduction, dtype):
    """Where a leaf begins depends on the TP size, and the path that a GEMM takes on where its operands begin.

    Here, with AVX2, it happens not to; with MKL_ENABLE_INSTRUCTIONS=SSE4_2 the bits above would differ.
    """
    case, padded = invariant("aligned", 1008, vocab=1001, hidden=17, dtype=dtype, options={"reduction": reduction})
    shard = VocabShard(VocabLayout.from_padded(case.vocab, padded, 1))
    with Operands() as operands:
        results(case, shard)
    assert operands.alignments == {64}
    if dtype == torch.float32:
        with Operands() as operands:
            results(replace(case, execution={}), shard, lambda weight: torch.cat([weight, weight], 1)[:, 17:])
        assert operands.alignments != {64}, "this test sees no difference"


def _traffic(rank: int, rows: int) -> tuple[Any, ...]:
    case, padded = invariant("traffic", leading=(rows,))
    shard = shard_of(case, padded)
    mine = local(case, whole(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    with collectives() as (calls, sent):
        value = call(case, mine, shard)
    forward = dict(calls), dict(sent), dict(shard.traffic.calls), dict(shard.traffic.bytes)
    with collectives() as (calls, _):
        value.backward()
    return *forward, dict(calls)


TRAFFIC = Batch(_traffic, [(16,)])


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_it_sends_the_bytes_of_a_ring_all_reduce_and_the_statistics_of_8_leaves(tp):
    for calls, sent, counted, counted_bytes, backward in TRAFFIC(tp, 16):
        assert backward == {}
        if tp == 1:
            assert calls == counted == {}
            continue
        assert calls == {"all_gather": 4, "other": 2}, "two chunks: statistics, partial sums, their blocks"
        assert counted == {"all_gather": 4, "all_to_all": 2}
        assert sent["all_gather"] == counted_bytes["all_gather"]
        ring = 2 * (16 * 24 * 4) * (tp - 1) // tp  # of dH in float32
        assert counted_bytes["all_to_all"] == ring // 2
        # What is left of the gathers are the exchanges: a header and the room that they have while nothing is known.
        assert (counted_bytes["all_gather"] - ring // 2) % (2 * (tp - 1)) == 0


def _refused(rank: int, fault: str) -> Any:
    """The refused call, and then a right one without the flag: the group goes on."""
    settings: dict[str, Any] = {"vocab": 9, "hidden": 5, "leading": (6,)}
    case, _ = invariant(fault, **settings)
    tp = dist.get_world_size()
    padded = {"padded": 4 * tp + 4 * tp % 8 + tp, "TP 3": 24}.get(fault, 16 * tp)
    shard = shard_of(case, padded)
    if fault == "sequence_parallel":
        case = replace(case, spread="even")
    mine = local(case, whole(case), shard)
    met = attempt(lambda: call(case, mine, shard))
    return met, call(replace(case, execution={}), mine, shard)


REFUSED = Batch(_refused, [("padded",), ("sequence_parallel",)])
REFUSED_AT_3 = Batch(_refused, [("TP 3",)])
WORDS = {
    "padded": ["tp_invariant", "8 equal leaves", "padded to {padded} over {tp} ranks", "VocabLayout.from_padded"],
    "TP 3": ["tp_invariant", "TP size of 1, 2, 4 or 8", "padded to 24 over 3 ranks"],
    "sequence_parallel": ["tp_invariant", "sequence_parallel", "replicated rows"],
}


@pytest.mark.parametrize(
    ("fault", "tp"),
    [("padded", 1), ("padded", 2), ("padded", 4), ("TP 3", 3), *(("sequence_parallel", n) for n in (1, 2))],
)
def test_it_is_refused_where_it_cannot_hold(fault, tp):
    ranks = (REFUSED_AT_3 if fault == "TP 3" else REFUSED)(tp, fault)
    kinds = ["ValueError"] if fault == "sequence_parallel" else ["LayoutError"]
    words = [word.format(tp=tp, padded=4 * tp + 4 * tp % 8 + tp) for word in WORDS[fault]]
    assert_all_raise(fault, [met for met, _ in ranks], kinds, words)
    case, _ = invariant(fault, vocab=9, hidden=5, leading=(6,))
    for _, after in ranks:
        require_close("the call afterwards", after, oracle(case)["loss"], case.dtype)


def _one_rank_differs(rank: int) -> Any:
    """One rank asks for it and the other does not: other collectives, so it must be found first."""
    case, padded = invariant("differs")
    shard = shard_of(case, padded)
    mine = local(case, whole(case), shard)
    return attempt(lambda: call(replace(case, execution={"tp_invariant": rank == 0}), mine, shard))


DIFFERS = Batch(_one_rank_differs, [()])


def test_ranks_that_ask_for_it_and_others_that_do_not_find_out():
    assert_all_raise("one rank", DIFFERS(2), ["LayoutMismatchError"], ["tp_invariant=True", "tp_invariant=False"])
