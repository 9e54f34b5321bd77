"""Distillation over shards on 1 to 4 ranks, from a teacher's head and from its top-k, against unsharded float64."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn import functional

from tests.batch import assert_all_raise, attempt
from tests.multirank.counting import Allocations
from tests.multirank.sharded import Case, compare, shard_of, whole
from tests.multirank.sharded import local as student_part
from tests.multirank.shared_world import Batch, two_sizes
from tests.multirank.test_deferred_errors import no_host_reads
from tests.multirank.test_traffic import Meter
from tests.ranks import run_ranks
from tests.tolerances import WORSE_THAN_PYTORCH, bits, floor, require_close, require_equal
from vocab_parallel import VocabLayout, VocabShard, linear_distillation, linear_topk_distillation, reference
from vocab_parallel.agreement import raise_deferred
from vocab_parallel.collectives import gather_vocab

DIVERGENCES = ("forward_kl", "reverse_kl", "jensen_shannon")
TAILS = ("ignore", "renormalize", "bucket")
TEACHER = ("teacher_input", "teacher_weight", "teacher_bias")
BY_TARGET = ("teacher_input", "teacher_ids", "teacher_logprobs")
NAN = math.nan


@dataclass(frozen=True, repr=False)
class Distill(Case):
    """A student as in `Case`, and its teacher: a head of another width, or with `given` so many ids a row."""

    given: int = 0
    teacher_hidden: int = 4
    teacher_dtype: torch.dtype | None = None  # where it is not the student's
    teacher_masked: tuple[int, ...] = ()  # ids with a logit of -inf, from the teacher's bias
    teacher_offset: float = 0.0
    with_target: bool = True  # else no row is ignored
    loss: dict[str, Any] = field(default_factory=dict)  # arguments of the distillation besides those of `options`

    @property
    def every_option(self) -> dict[str, Any]:
        return self.options | self.loss


def tensors_of(case: Distill) -> dict[str, torch.Tensor]:
    """The whole tensors, the same on every rank. What an ignored row holds is NaN."""
    tensors = whole(replace(case, ignored=case.ignored if case.with_target else "none"))
    draw = torch.Generator().manual_seed(case.seed + 1000)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    dtype = case.teacher_dtype or case.dtype
    head = {
        "teacher_input": normal(*case.leading, case.teacher_hidden),
        "teacher_weight": normal(case.vocab, case.teacher_hidden) * case.scale / case.teacher_hidden**0.5,
        "teacher_bias": normal(case.vocab),
    }
    head["teacher_bias"][list(case.teacher_masked)] = -torch.inf
    if case.teacher_offset:
        head["teacher_input"][..., 0], head["teacher_weight"][:, 0] = 1.0, case.teacher_offset
    if case.given:
        tensors |= _given(case, reference.logits(*head.values()), draw)
    else:
        tensors |= {name: tensor.to(dtype) for name, tensor in head.items()}
    ignored = tensors["target"] == case.options.get("ignore_index", -100)
    for name in ("input", *BY_TARGET):
        if case.with_target and name in tensors and tensors[name].is_floating_point():
            tensors[name][ignored] = NAN
    if not case.with_target:
        del tensors["target"]
    return tensors


def _given(case, logits, draw):
    """The K most likely ids of each row; row 1 has none, row 2 one, in a later slot; one has probability 0."""
    scores = logits / case.options.get("temperature", 1.0)
    log_p, ids = scores.log_softmax(-1).topk(case.given, dim=-1)
    order = torch.rand(ids.shape, generator=draw).argsort(-1)
    log_p, ids = log_p.gather(-1, order), ids.gather(-1, order)
    if case.loss.get("tail") == "renormalize":
        log_p = log_p + 3.0
    empty = torch.zeros_like(ids, dtype=torch.bool).view(-1, case.given)
    empty[1:2] = True
    empty[2:3, : case.given - 1] = True
    empty = empty.view(ids.shape)
    log_p.view(-1, case.given)[3:4, :1] = -torch.inf
    ignore = case.options.get("ignore_index", -100)
    return {
        "teacher_ids": ids.masked_fill(empty, ignore),
        "teacher_logprobs": log_p.masked_fill(empty, NAN).to(case.teacher_dtype or case.dtype),
    }


def local(case, tensors, shard):
    """This rank's part, padding NaN."""
    mine = student_part(case, {"target": torch.zeros(case.leading, dtype=torch.int64)} | tensors, shard)
    if not case.with_target:
        del mine["target"]
    for name in TEACHER[1:]:
        if name in tensors:
            mine[name] = shard.slice(tensors[name], 0, fill=NAN)
    rows = case.rows(shard.tp_size)
    if rows:
        start = sum(rows[: shard.rank])
        for name in BY_TARGET if case.target_local else BY_TARGET[:1]:
            if name in tensors:
                mine[name] = tensors[name][start : start + rows[shard.rank]].contiguous()
    return mine


def call(case, mine, shard, **more):
    head = {
        "linear_bias": mine.get("bias"),
        "sequence_parallel": case.spread is not None,
        "chunk_size": case.chunk_size,
    }
    settings = head | case.every_option | case.execution | {"target": mine.get("target")} | more
    if case.weighted:
        settings["row_weight"] = mine["row_weight"]
    if case.given:
        function, names = linear_topk_distillation, BY_TARGET[1:]
    else:
        function, names = linear_distillation, TEACHER[:2]
        settings["teacher_bias"] = mine["teacher_bias"]
    return function(mine["input"], mine["weight"], *(mine[name] for name in names), shard=shard, **settings)


def run_case(rank, case, group=None):
    """As `sharded.run_case`: values, gradients twice, and whether the arguments are as they were."""
    shard = shard_of(case.vocab, case.multiple_of, group)
    mine = local(case, tensors_of(case), shard)
    before = {name: bits(tensor).clone() for name, tensor in mine.items()}
    names = [name for name in case.names if name not in case.frozen]
    for name in names:
        mine[name].requires_grad_()
    with torch.no_grad():
        silent = call(case, mine, shard)
    value = call(case, mine, shard)
    result = {"loss": value.detach().clone(), "no_grad": silent, "valid": shard.num_valid, "outputs": []}
    if names:
        upstream, trained = mine["upstream"].to(value.dtype), [mine[name] for name in names]
        first = torch.autograd.grad(value, trained, upstream, retain_graph=True)
        result |= {f"d_{name}": gradient.clone() for name, gradient in zip(names, first, strict=True)}
        for gradient in first:
            gradient.zero_()  # what is saved for the next backward must not be this
        second = torch.autograd.grad(value, trained, upstream)
        result |= {f"again_{name}": gradient for name, gradient in zip(names, second, strict=True)}
    result["modified"] = [name for name, saved in before.items() if not torch.equal(bits(mine[name]), saved)]
    result["loss_after"] = value.detach().clone()
    return result


def topk_divergence(z, ids, logprobs, tail, ignore_index):
    """The oracle of the top-k form, row by row, of scores `[T, V]`."""
    rows = []
    for log_p, row_ids, row_logs in zip(z.log_softmax(-1), ids, logprobs, strict=True):
        given = row_ids != ignore_index
        i, log_q = row_ids[given], row_logs[given].to(z.dtype)
        if tail == "renormalize" and bool((log_q > -torch.inf).any()):
            log_q = log_q - log_q.logsumexp(0)
        q, others = log_q.exp(), torch.ones_like(log_p, dtype=torch.bool).index_fill(0, i, False)
        value = torch.where(q == 0, 0.0, q * (torch.where(q == 0, 0.0, log_q) - log_p[i])).sum()
        rest = (1 - q.sum()).clamp(min=0)
        if tail == "bucket" and bool(others.any()) and rest > 0:
            value = value + rest * (rest.log() - log_p[others].logsumexp(0))
        rows.append(value)
    return torch.stack(rows) if rows else z.sum(-1)


def unsharded(case, tensors):
    """The oracle's loss of whole tensors; what an ignored row holds is not read."""
    options, leading = case.every_option, case.leading
    ignore = options.get("ignore_index", -100)
    valid = tensors["target"] != ignore if "target" in tensors else torch.ones(leading, dtype=torch.bool)

    def logits(prefix, weight, bias):
        hidden = torch.where(valid[..., None], tensors[f"{prefix}input"], 0.0)
        return torch.where(valid[..., None], reference.logits(hidden, tensors[weight], tensors.get(bias)), 0.0)

    heat = options.get("temperature", 1.0)
    z = reference.scores(logits("", "weight", "bias"), options.get("softcap"))
    if case.given:
        ids = torch.where(valid[..., None], tensors["teacher_ids"], ignore).view(-1, case.given)
        logs, flat = tensors["teacher_logprobs"].view(-1, case.given), (z / heat).reshape(-1, case.vocab)
        rows = topk_divergence(flat, ids, logs, options.get("tail", "ignore"), ignore).view(leading)
    else:
        y = reference.scores(logits(*TEACHER_NAMES), options.get("teacher_softcap"))
        named = {name: options[name] for name in ("divergence", "beta", "temperature") if name in options}
        rows = reference.distillation(z, y, **named)
    return reference.reduce(rows, options.get("reduction", "mean"), valid, tensors.get("row_weight"))


TEACHER_NAMES = ("teacher_", "teacher_weight", "teacher_bias")


def oracle(case):
    whole_tensors = tensors_of(case)
    tensors = {name: one.double() if one.is_floating_point() else one for name, one in whole_tensors.items()}
    names = [name for name in case.names if name not in case.frozen]
    for name in names:
        tensors[name].requires_grad_()
    value = unsharded(case, tensors)
    result = {"loss": value.detach()}
    if names:
        gradients = torch.autograd.grad(value, [tensors[name] for name in names], tensors["upstream"])
        result |= {f"d_{name}": gradient for name, gradient in zip(names, gradients, strict=True)}
    return result


class Cases(Batch):
    """Cases that are run on ranks together and compared with the oracle one by one."""

    def __init__(self, cases, on_two=False):
        super().__init__(run_case, [(case,) for case in cases], two_sizes if on_two else None)
        self.each = pytest.mark.parametrize("case", cases, ids=lambda case: case.name.replace(" ", "_"))
        self.each_on_two = pytest.mark.parametrize(
            ("case", "tp"),
            self.pairs() if on_two else [],
            ids=lambda one: getattr(one, "name", str(one)).replace(" ", "_"),
        )

    def check(self, case, tp):
        try:
            compare(case, self(tp, case), oracle(case))
        except AssertionError as error:
            raise AssertionError(f"{error}\non {tp} ranks: {case!r}") from None


def each(name, **settings):
    """The case for each divergence, and for each treatment of a top-k teacher's tail."""
    loss = settings.pop("loss", {})
    heads = [
        Distill(f"{kind}: {name}", loss={"divergence": kind, "beta": 0.3} | loss, **settings) for kind in DIVERGENCES
    ]
    return heads + [Distill(f"top-k {tail}: {name}", given=4, loss={"tail": tail}, **settings) for tail in TAILS]


def heads(name, **settings):
    return [case for case in each(name, **settings) if not case.given]


def top_k(name, given, **settings):
    return [replace(case, given=given) for case in each(name, **settings) if case.given]


SCORES = {"softcap": 1.5, "temperature": 0.7}
PLAIN = Cases(
    [
        case
        for reduction in ("none", "sum", "mean")
        for case in each(f"{reduction}", bias=True, chunk_size=3, options={"reduction": reduction})
    ]
    + each("one chunk", chunk_size=7, vocab=11, weighted=True)
    + each("default chunk, 13 ids of 16", vocab=13, multiple_of=4)
    + each("memory for 4 rows", execution={"memory_budget": 4 * 8 * 2 * 9})
    + each("scores", chunk_size=3, bias=True, options=SCORES)
    + each("scores, none", chunk_size=3, options=SCORES | {"reduction": "none"})
    + heads("the teacher's softcap", loss={"teacher_softcap": 2.0})
    + heads("both softcaps, none", loss={"teacher_softcap": 2.0}, options=SCORES | {"reduction": "none"})
    + each("weighted", chunk_size=3, weighted=True, options={"reduction": "none"})
    + each("leading [s, b]", leading=(3, 2), chunk_size=4, options={"reduction": "none"})
    + each("no target, none", with_target=False, weighted=True, options={"reduction": "none"})
    + each("ignore_index is an id", leading=(20,), options={"ignore_index": 3})
    + each("no target, ignore_index is an id", with_target=False, options={"ignore_index": 0})
    + each("every row ignored", ignored="all")
    + each("no rows, none", leading=(0,), options={"reduction": "none"})
    + each("only input trains", frozen=("weight",))
    + each("only weight trains, none", frozen=("input",), options={"reduction": "none"})
    + heads("one id", vocab=1, hidden=3)
    + heads("equal temperatures of 3", vocab=11, options={"temperature": 3})
    + heads("other dtypes of the teacher", dtype=torch.float32, teacher_dtype=torch.float64, bias=True)
    + top_k("one id a row", 1)
    + top_k("every id", 9)
    + top_k("every id, one chunk, none", 9, options={"reduction": "none"}, bias=True)
    + top_k("float32 log-probabilities", 4, teacher_dtype=torch.float32),
    on_two=True,
)


@PLAIN.each_on_two
def test_values_and_gradients_equal_the_unsharded_ones(case, tp):
    PLAIN.check(case, tp)


SPREAD = Cases(
    [
        case
        for spread, target_local, reduction in [
            ("even", True, "none"),
            ("uneven", True, "mean"),
            ("last has none", False, "none"),
            ("only last has any", True, "sum"),
        ]
        for case in each(
            f"{spread}, {'local' if target_local else 'all'} targets, {reduction}",
            spread=spread,
            target_local=target_local,
            chunk_size=3,
            bias=True,
            weighted=True,
            options={"reduction": reduction},
        )
    ]
    + each("uneven, no target", spread="uneven", with_target=False, options={"reduction": "none"})
)


@pytest.mark.parametrize("tp", [2, 3])
@SPREAD.each
def test_sequence_parallel_rows(case, tp):
    SPREAD.check(case, tp)


EDGES = Cases(
    [
        case
        for offset in (1e4, -1e4)
        for case in each(f"offset {offset}", offset=offset, teacher_offset=-offset, scale=1.0)
    ]
    + heads("nearly one-hot", scale=60.0, bias=True, options={"reduction": "none"})
    + top_k("nearly one-hot", 3, scale=60.0, bias=True, options={"reduction": "none"})
    + heads("teacher and student masked alike", bias=True, masked=(0, 4, 5), teacher_masked=(0, 4, 5))
    + heads("shards masked alike", bias=True, masked=(3, 4, 5), teacher_masked=(3, 4, 5), options={"reduction": "none"})
    + [
        case
        for case in heads("teacher masked", bias=True, teacher_masked=(0, 3, 4, 5), options={"reduction": "none"})
        + heads("teacher of one id", bias=True, teacher_masked=(0, 1, 2, 3, 4, 5, 7, 8))
        if "reverse" not in case.name
    ]
    + [
        case
        for case in heads("student masked", bias=True, masked=(0, 3, 4, 5), options={"reduction": "none"})
        if "forward" not in case.name
    ]
    + heads("teacher masked, every row ignored", bias=True, teacher_masked=(0, 3, 4, 5), ignored="all")
    + heads("infinite", bias=True, masked=(2, 3, 4, 5), options={"reduction": "none"})[:1]
    + heads("infinite", bias=True, teacher_masked=(2, 3, 4, 5), frozen=("input", "weight", "bias"))[1:2]
    + top_k("masked student, not given", 2, bias=True, masked=(0, 7), teacher_masked=(0, 7))
    + each("float32", dtype=torch.float32, bias=True, chunk_size=3)
    + each("float32, none", dtype=torch.float32, options={"reduction": "none"} | SCORES)
    + each("bfloat16, none", dtype=torch.bfloat16, bias=True, chunk_size=3, scale=1.0, options={"reduction": "none"})
    + heads("bfloat16 under a float32 teacher", dtype=torch.bfloat16, teacher_dtype=torch.float32, scale=1.0)
    + each("float16", dtype=torch.float16, bias=True, chunk_size=3, scale=1.0),
    on_two=True,
)


@EDGES.each_on_two
def test_offsets_infinities_confident_rows_and_narrow_dtypes(case, tp):
    EDGES.check(case, tp)


def test_the_infinite_cases_are_infinite():
    for case in EDGES.cases:
        if "infinite" in case[0].name:
            assert bool((oracle(case[0])["loss"] == torch.inf).any())


# --- accuracy at a realistic size -------------------------------------------------------------------------------------

ROWS, HIDDEN, VOCAB, SEEDS, GIVEN = 160, 48, 1001, 3, 16
NAMES = ["loss", "d_input", "d_weight", "d_bias"]


def realistic(seed, dtype):
    """Student and teacher that agree about the likely ids, as late in training."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    weight, input, bias = 2 * normal(VOCAB, HIDDEN) / HIDDEN**0.5, normal(ROWS, HIDDEN), normal(VOCAB) / 2
    teacher = [input + 0.3 * normal(ROWS, HIDDEN), weight + 0.1 * normal(VOCAB, HIDDEN) / HIDDEN**0.5]
    return [one.to(dtype) for one in (input, weight, bias)], [one.to(dtype) for one in teacher]


def given_by(teacher):
    return reference.logits(*(one.double() for one in teacher)).log_softmax(-1).topk(GIVEN, dim=-1)


def pytorch_rows(logits, teacher_logits, kind):
    """What a training script writes: logits in its dtype, softmaxes in float32."""
    log_s, log_t = logits.float().log_softmax(-1), teacher_logits.float().log_softmax(-1)
    if kind == "forward_kl":
        return functional.kl_div(log_s, log_t, reduction="none", log_target=True).sum(-1)
    if kind == "reverse_kl":
        return functional.kl_div(log_t, log_s, reduction="none", log_target=True).sum(-1)
    log_m = torch.logaddexp(log_s, log_t) - math.log(2)
    return 0.5 * sum(functional.kl_div(log_m, one, reduction="none", log_target=True).sum(-1) for one in (log_s, log_t))


def pytorch_top_k_rows(logits, log_q, ids, tail):
    log_q, log_s = log_q.float(), logits.float().log_softmax(-1).gather(-1, ids)
    if tail == "renormalize":
        log_q = log_q.log_softmax(-1)
    rows = (log_q.exp() * (log_q - log_s)).sum(-1)
    if tail == "bucket":
        q, p = 1 - log_q.exp().sum(-1), 1 - log_s.exp().sum(-1)
        rows = rows + q * (q / p).log()
    return rows


def in_pytorch(seed, dtype, kind, exact):
    student, teacher = realistic(seed, dtype)
    student = [one.to(torch.float64 if exact else dtype).requires_grad_() for one in student]
    logits = functional.linear(*student)
    if kind in TAILS:
        log_q, ids = given_by(teacher)
        rows = (
            topk_divergence(logits, ids, log_q, kind, -100) if exact else pytorch_top_k_rows(logits, log_q, ids, kind)
        )
    elif exact:
        rows = reference.distillation(logits, reference.logits(*(one.double() for one in teacher)), divergence=kind)
    else:
        rows = pytorch_rows(logits, functional.linear(*teacher), kind)
    loss = rows.mean()
    return [loss.detach(), *torch.autograd.grad(loss, student)]


def _realistic(rank, kind, dtype):
    shard, every = shard_of(VOCAB, 16), []
    for seed in range(SEEDS):
        (input, weight, bias), teacher = realistic(seed, dtype)
        tensors = [input, shard.slice(weight), shard.slice(bias)]
        for tensor in tensors:
            tensor.requires_grad_()
        settings = {"shard": shard, "linear_bias": tensors[2], "chunk_size": 64}
        if kind in TAILS:
            log_q, ids = given_by(teacher)
            loss = linear_topk_distillation(*tensors[:2], ids, log_q, tail=kind, **settings)
        else:
            loss = linear_distillation(*tensors[:2], teacher[0], shard.slice(teacher[1]), divergence=kind, **settings)
        d_input, *of_vocab = torch.autograd.grad(loss, tensors)
        every.append([loss.detach(), d_input, *(gather_vocab(shard, table) for table in of_vocab)])
    return every


REALISTIC = Batch(_realistic, list(product(DIVERGENCES + TAILS, (torch.float32, torch.bfloat16))))


@pytest.mark.parametrize(("kind", "dtype"), REALISTIC.cases, ids=str)
def test_errors_are_at_most_twice_those_of_pytorch_unsharded(kind, dtype):
    ranks = REALISTIC(2, kind, dtype)
    exact = [in_pytorch(seed, dtype, kind, True) for seed in range(SEEDS)]
    theirs = [in_pytorch(seed, dtype, kind, False) for seed in range(SEEDS)]
    for index, name in enumerate(NAMES):
        for seed in range(SEEDS):
            require_equal(f"{name} on every rank", [ranks[0][seed][index], ranks[1][seed][index]])
        got, by_pytorch, expected = (
            torch.stack([one[index].double() for one in runs]) for runs in (ranks[0], theirs, exact)
        )
        slack = floor(expected, torch.float32 if name == "loss" else dtype)
        for measure, of in (("largest", torch.max), ("mean square", lambda error: error.square().mean().sqrt())):
            mine, limit = of((got - expected).abs()), WORSE_THAN_PYTORCH * of((by_pytorch - expected).abs()) + slack
            assert mine <= limit, f"{name}: {measure} error {mine:.3g}, limit {limit:.3g}"


# --- collectives and memory -------------------------------------------------------------------------------------------


def _traffic(rank, case, settings):
    shard = shard_of(case.vocab)
    meter, mine = Meter(shard), local(case, tensors_of(case), shard)
    for name in case.names:
        mine[name].requires_grad_(name not in case.frozen)
    with torch.set_grad_enabled(settings.get("grad", True)):
        value = meter("forward", lambda: call(case, mine, shard))
    forward = meter.calls
    if value.requires_grad:
        meter("backward", lambda: value.backward(mine["upstream"].to(value.dtype)))
        return forward, meter.calls
    return forward, {}


# 7 rows in chunks of 3 are 3 chunks.
TRAFFIC = [
    (case, settings, {"all_gather": 3 * (2 if "jensen" in case.name else 1)} | forward, backward)
    for name, more, settings, forward, backward in [
        ("mean", {}, {}, {"all_reduce": 3}, {}),
        ("none", {"options": {"reduction": "none"}}, {}, {}, {"all_reduce": 3}),
        ("no grad", {}, {"grad": False}, {}, {}),
        ("frozen input", {"frozen": ("input",)}, {}, {}, {}),
        ("frozen input, none", {"frozen": ("input",), "options": {"reduction": "none"}}, {}, {}, {}),
    ]
    for case in each(name, chunk_size=3, **more)
]
TRAFFIC_BATCH = Batch(_traffic, [entry[:2] for entry in TRAFFIC])


@pytest.mark.parametrize("entry", TRAFFIC, ids=lambda entry: entry[0].name.replace(" ", "_"))
@pytest.mark.parametrize("tp", [2, 3])
def test_a_chunk_takes_one_exchange_and_jensen_shannon_two(entry, tp):
    case, settings, forward, backward = entry
    assert TRAFFIC_BATCH(tp, case, settings) == [(forward, backward)] * tp


def _exchanges(rank):
    counts = []
    for case in each("budget"):
        shard = shard_of(case.vocab)
        mine = local(case, tensors_of(case), shard)
        call(case, mine, shard, memory_budget=3 * 8 * shard.shard_size * (1 if case.given else 2))
        counts.append(shard.traffic.calls["all_gather"])
    return counts


def test_the_memory_budget_is_for_the_logits_of_both_heads():
    assert run_ranks(_exchanges, 2) == [[3, 3, 2 * 3, 3, 3, 3]] * 2  # 7 rows in chunks of 3


def _bytes(rank, case):
    shard = shard_of(case.vocab)
    meter, mine = Meter(shard), local(case, tensors_of(case), shard)
    for _ in range(2):
        meter("forward", lambda: call(case, mine, shard))
    return meter.bytes


BYTES = [
    (case, 8 + 4 * case.given if case.given else 16 + 8 if "jensen" in case.name else 20)
    for case in each("bytes", leading=(5000,), chunk_size=5000, dtype=torch.float32, ignored="none")
]
BYTES_BATCH = Batch(_bytes, [(case,) for case, _ in BYTES])


@pytest.mark.parametrize(("case", "a_row"), BYTES, ids=lambda value: getattr(value, "name", None))
@pytest.mark.parametrize("tp", [2, 4])
def test_bytes_of_a_row(case, a_row, tp):
    assert BYTES_BATCH(tp, case) == [{"all_gather": (64 + a_row * 5000) * (tp - 1)}] * tp


def _alone(rank):
    shard = VocabShard(VocabLayout(9, 1, multiple_of=4))
    for case in each("alone", multiple_of=4, bias=True, chunk_size=3):
        mine = local(case, tensors_of(case), shard)
        Meter(shard)("alone", lambda case=case, mine=mine: call(case, mine, shard))
    return shard.traffic.total_calls


def test_one_rank_sends_nothing():
    assert run_ranks(_alone, 1) == [0]


MEMORY_VOCAB, MEMORY_HIDDEN = 2048, 8


def _memory(rank, kind, reduction):
    """Peak bytes and the largest tensor's elements, for pairs of rows and chunk size; the first pair warms up."""
    shard, results = shard_of(MEMORY_VOCAB), []
    for rows, chunk_size in [(512, 64), (128, 64), (512, 64)]:
        weight, teacher_weight = (torch.randn(shard.shard_size, MEMORY_HIDDEN) for _ in range(2))
        input, teacher_input = (torch.randn(rows, MEMORY_HIDDEN) for _ in range(2))
        log_q, ids = torch.randn(rows, MEMORY_VOCAB).log_softmax(-1).topk(4)
        tensors = [input, weight, teacher_input, teacher_weight, log_q, ids]
        input.requires_grad_(), weight.requires_grad_()
        settings = {"shard": shard, "chunk_size": chunk_size, "reduction": reduction}
        with Allocations(*tensors) as meter:
            if kind in TAILS:
                value = linear_topk_distillation(input, weight, ids, log_q, tail=kind, **settings)
            else:
                value = linear_distillation(input, weight, teacher_input, teacher_weight, divergence=kind, **settings)
            value.sum().backward()
        results.append((meter.peak, meter.largest))
        del value
    return results[1:]


MEMORY = Batch(_memory, list(product(("forward_kl", "jensen_shannon", "bucket"), ("mean", "none"))))


@pytest.mark.parametrize(("kind", "reduction"), MEMORY.cases, ids=str)
def test_no_tensor_has_the_logits_of_all_rows(kind, reduction):
    (few, _), (many, largest) = MEMORY(2, kind, reduction)[0]
    assert largest <= 64 * MEMORY_VOCAB // 2, f"a tensor of {largest} elements"
    per_row = (many - few) / (512 - 128)
    assert per_row <= 6 * 4 * MEMORY_HIDDEN + 300, f"{per_row:.0f} bytes a row"


# --- bad input --------------------------------------------------------------------------------------------------------


def _set(name, at, value):
    def change(tensors):
        tensors[name] = tensors[name].clone()
        tensors[name][at] = value

    return change


def _map(name, function):
    def change(tensors):
        tensors[name] = function(tensors[name])

    return change


# name -> what is wrong with this rank's tensors, the error, words of its message
HEAD_FAULTS = {
    "teacher's rows": (_map("teacher_input", lambda x: x[:-1]), "LayoutMismatchError", ["teacher_input"]),
    "teacher's width": (_map("teacher_input", lambda x: x[:, :-1]), "LayoutMismatchError", ["teacher"]),
    "teacher's dtype": (_map("teacher_weight", lambda x: x.double()), "LayoutMismatchError", ["teacher"]),
    "teacher's whole head": (_map("teacher_weight", lambda x: torch.cat([x, x])), "LayoutMismatchError", ["teacher"]),
    "no teacher": (_map("teacher_input", lambda x: None), "LayoutMismatchError", ["teacher", "NoneType"]),
    "an empty teacher": (_map("teacher_weight", lambda x: x[:0]), "UngatheredWeightError", ["teacher"]),
    "teacher trains": (_map("teacher_weight", lambda x: x.clone().requires_grad_()), "ValueError", ["teacher_weight"]),
    "hidden states train": (_map("teacher_input", lambda x: x.clone().requires_grad_()), "ValueError", ["detach"]),
    "NaN in the student": (_set("weight", 0, NAN), "NonFiniteError", ["student", "row 0", "NaN"]),
    "NaN in the teacher": (_set("teacher_weight", 0, NAN), "NonFiniteError", ["teacher", "row 0", "NaN"]),
    "inf in the teacher": (_set("teacher_bias", 0, torch.inf), "NonFiniteError", ["teacher", "+inf"]),
    "no finite teacher": (_set("teacher_bias", slice(None), -torch.inf), "NonFiniteError", ["teacher", "finite"]),
    "target out of range": (_set("target", 2, 9), "TargetRangeError", ["9", "row 2"]),
    "input's width": (_map("input", lambda x: x[:, :-1]), "LayoutMismatchError", ["input"]),
}
TOP_K_FAULTS = {
    "an id too large": (_set("teacher_ids", (3, 1), 9), "TargetRangeError", ["9", "row 3"]),
    "an id below 0": (_set("teacher_ids", (3, 1), -1), "TargetRangeError", ["-1", "row 3"]),
    "an id twice": (_map("teacher_ids", lambda x: x[:, [0, 1, 2, 0]]), "ValueError", ["row 0", "more than once"]),
    "NaN": (_set("teacher_logprobs", (3, 2), NAN), "NonFiniteError", ["row 3", "slot 2"]),
    "logits": (_map("teacher_logprobs", lambda x: x + 4.0), "ValueError", ["row 0", "sum"]),
    "rows": (_map("teacher_ids", lambda x: x[:-1]), "LayoutMismatchError", ["teacher_logprobs"]),
    "both rows": (
        lambda x: [_map(name, lambda y: y[:-1])(x) for name in BY_TARGET[1:]],
        "LayoutMismatchError",
        ["teacher_ids", "rows"],
    ),
    "no slots": (
        lambda x: [_map(name, lambda y: y[:, :0])(x) for name in BY_TARGET[1:]],
        "LayoutMismatchError",
        ["teacher_ids"],
    ),
    "floating ids": (_map("teacher_ids", lambda x: x.float()), "LayoutMismatchError", ["teacher_ids"]),
    "integer log-probabilities": (_map("teacher_logprobs", lambda x: x.long()), "LayoutMismatchError", ["floating"]),
    "log-probabilities train": (
        _map("teacher_logprobs", lambda x: x.clone().requires_grad_()),
        "ValueError",
        ["teacher_logprobs"],
    ),
    "NaN in the student": (_set("weight", 0, NAN), "NonFiniteError", ["row 0", "NaN"]),
    "inf in the student": (_set("bias", 0, torch.inf), "NonFiniteError", ["row 0", "+inf"]),
    "target out of range": (_set("target", 2, 9), "TargetRangeError", ["9", "row 2"]),
}
BAD_HEAD = Distill("bad", dtype=torch.float32, bias=True, ignored="none", chunk_size=3)
BAD_TOP_K = replace(BAD_HEAD, given=4, loss={"tail": "bucket"})
FAULTY = [
    (case, name, everywhere, deferred)
    for case, faults in ((BAD_HEAD, HEAD_FAULTS), (BAD_TOP_K, TOP_K_FAULTS))
    for name, everywhere, deferred in product(faults, (True, False), (False, True))
] + [
    (replace(case, spread="even"), name, False, deferred)  # the rows of one rank
    for case, name in product((BAD_HEAD, BAD_TOP_K), ("target out of range", "NaN in the student"))
    for deferred in (False, True)
]
FAULTY += [
    (replace(BAD_TOP_K, spread="even"), name, False, deferred)
    for name, deferred in product(("an id too large", "an id twice", "NaN", "logits"), (False, True))
]
FAULTY += [(replace(BAD_TOP_K, given=9), "NaN in the student", everywhere, False) for everywhere in (True, False)]


def _faulty(rank, case, name, everywhere, deferred):
    """A wrong call, if it is deferred what comes of it; and then the right one."""
    tp = dist.get_world_size()
    shard = VocabShard(VocabLayout(case.vocab, tp, multiple_of=1), dist.group.WORLD, deferred_errors=deferred)
    mine, wrong = local(case, tensors_of(case), shard), local(case, tensors_of(case), shard)
    if everywhere or rank == tp - 1:
        (TOP_K_FAULTS if case.given else HEAD_FAULTS)[name][0](wrong)

    def bad():
        call(case, wrong, shard)
        raise_deferred(shard)

    return attempt(bad), call(case, mine, shard)


FAULTY_BATCH = Batch(_faulty, FAULTY)


@pytest.mark.parametrize("entry", FAULTY, ids=lambda e: f"{e[0].given}-{e[0].spread}-{e[1]}-{e[2]}-{e[3]}")
def test_a_fault_is_the_same_error_on_every_rank(entry):
    case, name, everywhere, deferred = entry
    ranks = FAULTY_BATCH(2, *entry)
    _, error, words = (TOP_K_FAULTS if case.given else HEAD_FAULTS)[name]
    if name == "no finite teacher" and not everywhere:
        assert [met.kind for met, _ in ranks] == [None, None], "the other shard has finite logits"
    elif not deferred:
        whose = [f"rank {0 if everywhere else 1}"] if name.startswith(("NaN in", "inf in")) else []
        assert_all_raise(name, [met for met, _ in ranks], [error], words + whose)
    else:  # what only one rank holds shows as a difference between ranks; words may be on one rank only
        kinds = {met.kind for met, _ in ranks}
        assert len(kinds) == 1 and kinds <= {error, "LayoutMismatchError"}, ranks
        assert not (everywhere or case.spread) or kinds == {error}
    for _, after in ranks:
        require_close("the right call afterwards", after, oracle(case)["loss"], torch.float32)


REFUSED = [
    *((BAD_HEAD, {"divergence": value}) for value in ("kl", None)),
    *((BAD_HEAD, {"divergence": "jensen_shannon", "beta": value}) for value in (0.0, 1.0, -0.1, NAN, "half")),
    *((BAD_HEAD, {"teacher_softcap": value}) for value in (0.0, NAN)),
    *((BAD_TOP_K, {"tail": value}) for value in ("drop", None)),
    *(
        (case, {name: value})
        for case in (BAD_HEAD, BAD_TOP_K)
        for name, value in [
            ("temperature", 0.0),
            ("softcap", -1.0),
            ("reduction", "batchmean"),
            ("ignore_index", 0.5),
            ("chunk_size", 0),
            ("memory_budget", "1G"),
        ]
    ),
]


def _refused(rank, case, options):
    shard = shard_of(case.vocab)
    mine = local(case, tensors_of(case), shard)
    return attempt(lambda: call(case, mine, shard, **options)), call(case, mine, shard)


REFUSED_BATCH = Batch(_refused, REFUSED)


@pytest.mark.parametrize(("case", "options"), REFUSED, ids=str)
def test_an_option_outside_its_range_is_the_same_value_error_on_every_rank(case, options):
    ranks = REFUSED_BATCH(2, case, options)
    name, value = list(options.items())[-1]
    assert_all_raise(str(options), [met for met, _ in ranks], ["ValueError"], [name, repr(value)])


def _disagree(rank, case, other):
    shard = shard_of(case.vocab)
    mine = local(case, tensors_of(case), shard)
    more = dict(other)
    if "teacher_logprobs" in more:
        mine["teacher_logprobs"] = mine["teacher_logprobs"] + rank * more.pop("teacher_logprobs")
    return attempt(lambda: call(case, mine, shard, **(more if rank == 1 else {})))


DISAGREE = [
    (BAD_HEAD, {"divergence": "reverse_kl"}),
    (BAD_HEAD, {"temperature": 2.0}),
    (BAD_HEAD, {"teacher_softcap": 30.0}),
    (BAD_HEAD, {"chunk_size": 2}),
    (BAD_HEAD, {"target": None}),
    (BAD_TOP_K, {"tail": "ignore"}),
    (BAD_TOP_K, {"target": None}),
    (BAD_TOP_K, {"teacher_logprobs": -0.5}),
]
DISAGREE_BATCH = Batch(_disagree, DISAGREE)


@pytest.mark.parametrize(("case", "other"), DISAGREE, ids=str)
def test_ranks_that_are_asked_for_different_losses_find_out(case, other):
    assert_all_raise(str(other), DISAGREE_BATCH(2, case, other), ["LayoutMismatchError"], [])


def _reads_nothing(rank, case):
    tp = dist.get_world_size()
    group = dist.group.WORLD
    shard = VocabShard(VocabLayout(case.vocab, tp, multiple_of=1), group, deferred_errors=True)
    mine = local(case, tensors_of(case), shard)
    for name in case.names:
        mine[name].requires_grad_()
    values = []
    for guard in [contextlib.nullcontext] * 3 + [no_host_reads] * 2:
        with guard():
            value = call(case, mine, shard)
            value.sum().backward()
        values.append(value.detach())
    raise_deferred(shard)
    require_equal("values", values)


READS = [case for r in ("mean", "none") for case in each(r, chunk_size=3, bias=True, options={"reduction": r})]
READS_BATCH = Batch(_reads_nothing, [(case,) for case in READS])


@pytest.mark.parametrize("case", READS, ids=lambda case: case.name.replace(" ", "_"))
@pytest.mark.parametrize("tp", [1, 2])
def test_where_errors_are_deferred_the_host_reads_no_tensor(case, tp):
    READS_BATCH(tp, case)


# --- what hosts do ----------------------------------------------------------------------------------------------------


def _two_replicas(rank, kind):
    """Two data-parallel replicas of two ranks, with 5 and 9 rows: value and averaged gradient of the weight."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    replica, part = divmod(rank, 2)
    cases = [replace(kind, leading=(5 + 4 * at,), seed=at) for at in range(2)]
    shard = shard_of(kind.vocab, group=groups[replica])
    every = [tensors_of(case) for case in cases]
    shared = {name: every[0][name] for name in ("weight", "bias", "teacher_weight", "teacher_bias") if name in every[0]}
    mine = local(cases[replica], every[replica] | shared, shard)
    for name in kind.names:
        mine[name].requires_grad_()
    loss = call(cases[replica], mine, shard, mean_group=groups[2 + part])
    loss.backward()
    dist.all_reduce(mine["weight"].grad, group=groups[2 + part])
    sums, counts, weight = 0.0, 0, shared["weight"].clone().requires_grad_()
    for case, tensors in zip(cases, every, strict=True):
        sums = sums + unsharded(replace(case, options={"reduction": "sum"}), tensors | shared | {"weight": weight})
        counts += int((tensors["target"] != -100).sum())
    (expected,) = torch.autograd.grad(sums / counts, weight)
    require_close("loss", loss.detach(), (sums / counts).detach(), torch.float64)
    require_close("d_weight", mine["weight"].grad / 2, shard.slice(expected), torch.float64)


REPLICAS = each("replicas", bias=True, chunk_size=3)
REPLICAS_BATCH = Batch(_two_replicas, [(case,) for case in REPLICAS])


@pytest.mark.parametrize("case", REPLICAS, ids=lambda case: case.name.replace(" ", "_"))
def test_the_mean_over_data_parallel_ranks_is_the_token_mean(case):
    REPLICAS_BATCH(4, case)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_weights_gradient_goes_to_main_grad_where_the_host_has_one(reduction):
    for case in each("main_grad", dtype=torch.float32, options={"reduction": reduction}):
        shard, results = VocabShard(VocabLayout(case.vocab, 1)), []
        for has_main_grad in (False, True):
            mine = local(case, tensors_of(case), shard)
            weight = mine["weight"].requires_grad_()
            if has_main_grad:
                weight.main_grad, weight.grad_added_to_main_grad = torch.ones_like(weight), False
            call(case, mine, shard).backward(mine["upstream"].float())
            results.append(weight.main_grad - 1.0 if has_main_grad else weight.grad)
        require_close(case.name, results[1], results[0], torch.float32)


def test_autocast_projects_in_its_dtype_and_keeps_the_loss_in_float32():
    for case in each("autocast", dtype=torch.float32, bias=True):
        shard = VocabShard(VocabLayout(case.vocab, 1))
        mine = local(case, tensors_of(case), shard)
        with torch.autocast("cpu", torch.bfloat16):
            value = call(case, mine, shard)
        low = {k: v.bfloat16() if v.dtype == torch.float32 and "logprobs" not in k else v for k, v in mine.items()}
        assert value.dtype == torch.float32
        require_equal(case.name, [value, call(case, low, shard)])
