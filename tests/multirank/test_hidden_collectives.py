"""Collectives of the fused losses travel while GEMMs compute: how long a step waits for them.

By a clock that only GEMMs and collectives move: a GEMM of a whole chunk takes 1, a collective takes as long as the test
says and starts when the one before it has ended. And once by the real clock, with collectives that are made slow.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from vocab_parallel import RowOutputs, VocabShard, collectives, linear_cross_entropy
from vocab_parallel.loss import linear_row_loss, linear_token_logprobs

TP, VOCAB, HIDDEN, CHUNK = 2, 64, 8, 4
GEMM = 2 * CHUNK * (VOCAB // TP) * HIDDEN  # its FLOP
PRODUCTS = {"mm": 0, "addmm": 1, "addmm_": 1, "bmm": 0}  # where in their arguments the factors begin


class Clock(TorchDispatchMode):
    """Follows a step by its GEMMs, its collectives and its waits for them.

    Args:
        delay: How long a collective takes.
        at_once: Wait for each collective as soon as it is issued.

    Attributes:
        now: Time.
        begun: When the first GEMM began, or None.
        exposed: How long the step has waited, by collective: since its first GEMM, and before.
        issued: Number of collectives.
    """

    def __init__(self, delay, at_once=False):
        super().__init__()
        self.delay, self.at_once = delay, at_once
        self.now, self.free, self.begun = 0.0, 0.0, None
        self.exposed, self.before, self.issued = Counter(), Counter(), Counter()

    @classmethod
    def _should_skip_dynamo(cls):
        return False  # or torch imports its compiler to keep it out of here: seconds on every rank

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in PRODUCTS:
            left, right = args[PRODUCTS[name] :][:2]
            if len(left) > 1:  # a matrix
                self.begun = self.now if self.begun is None else self.begun
                self.now += 2 * left.numel() * right.shape[-1] / GEMM
        return func(*args, **(kwargs or {}))

    def issue(self, name, pending):
        self.issued[name] += 1
        self.free = max(self.now, self.free) + self.delay
        pending.done, pending.name = self.free, name
        if self.at_once:
            self.arrive(pending)

    def arrive(self, pending):
        late = max(0.0, pending.done - self.now)
        if late:
            (self.before if self.begun is None else self.exposed)[pending.name] += late
        self.now += late

    @contextmanager
    def watching(self):
        """All that this process issues."""
        start, wait = collectives._start, collectives.Pending.wait

        def started(name, *args):
            pending = start(name, *args)
            self.issue(name, pending)
            return pending

        def waited(pending):
            if hasattr(pending, "done"):
                self.arrive(pending)
            return wait(pending)

        waits = mock.patch.object(collectives.Pending, "wait", waited)
        with mock.patch.multiple(collectives, _start=started), waits, self:
            yield self


def surprise(rows):
    return -rows.logprob


OUTPUTS = RowOutputs("logprob", "lse", "argmax", "correct", "margin", "entropy")
# Losses whose gradient GEMMs begin before the statistics are there, and those that need them first.
HIDING = {
    "plain": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16},
    "options": {"z_loss": 0.1, "label_smoothing": 0.1, "temperature": 0.7, "reduction": "sum"},
    "outputs": {"outputs": OUTPUTS},
    "bias": {"bias": True},
    "weights": {"row_weight": True},
    "row loss": {"function": "row loss"},
    "deferred errors": {"deferred": True},
}
LATE = {
    "distribution": {"soft": True},
    "softcap": {"softcap": 3.0},
    "row loss with entropy": {"function": "row loss with entropy"},
}


def _step(shard, chunks, settings):
    """A call on `chunks` chunks: what gives its value."""
    settings = dict(settings)
    dtype, function = settings.pop("dtype", torch.float32), settings.pop("function", "loss")
    rows = chunks * CHUNK
    mine = rows // TP if "sequence_parallel" in settings else rows
    input = torch.randn(mine, HIDDEN, dtype=dtype).requires_grad_()
    weight = torch.randn(shard.shard_size, HIDDEN, dtype=dtype).requires_grad_()
    target = torch.arange(mine) % VOCAB
    settings |= {"shard": shard, "chunk_size": CHUNK}
    if settings.pop("bias", False):
        settings["linear_bias"] = torch.randn(shard.shard_size, dtype=dtype).requires_grad_()
    if settings.pop("soft", False):
        target = torch.rand(rows, shard.shard_size)
    if settings.get("row_weight"):
        settings["row_weight"] = torch.ones(rows)
    if function == "log-probabilities":
        return lambda: torch.stack(linear_token_logprobs(input, weight, target, **settings)).sum()
    if function != "loss":
        entropy = function == "row loss with entropy"
        return lambda: linear_row_loss(input, weight, target, surprise, entropy=entropy, **settings)
    return lambda: linear_cross_entropy(input, weight, target, **settings).sum()


def _watched(rank, settings, chunks, delay, at_once=False):
    """What forward and backward wait for, by collective; and how many there were."""
    settings = dict(settings)
    shard = shard_of(VOCAB)
    if settings.pop("deferred", False):
        shard = VocabShard(shard.layout, shard.group, deferred_errors=True)
        for _ in range(3):  # a call that is not known yet waits for its headers
            _step(shard, chunks, settings)().backward()
    call, found = _step(shard, chunks, settings), []
    clock = Clock(delay, at_once)
    with clock.watching():
        value = call()
        found.append((clock.now, dict(clock.exposed), dict(clock.before), dict(clock.issued)))
        clock.exposed.clear()
        clock.issued.clear()
        clock.begun, start = None, clock.now
        value.backward()
        found.append((clock.now - start, dict(clock.exposed), dict(clock.before), dict(clock.issued)))
    return found


SPREAD = {"sequence_parallel": True}
CASES = [
    *[(settings, chunks, delay) for settings in HIDING.values() for chunks, delay in [(3, 0.25), (3, 1.0)]],
    *[({}, chunks, delay) for chunks in (1, 3) for delay in (1.5, 2.0)],
    *[(settings, 3, 1.0) for settings in LATE.values()],
    *[(settings, chunks, 1.0) for settings in [{}, *LATE.values(), SPREAD] for chunks in (1, 6)],
    *[({"reduction": "none"} | settings, 3, 1.0) for settings in ({}, SPREAD)],
    ({"function": "log-probabilities"}, 3, 1.0),
    *[({"tp_invariant": True}, chunks, 1.0) for chunks in (2, 3, 6)],
    *[(settings, 3, 0.5, True) for settings in ({}, SPREAD)],
]
# Equal cases run once.
CASES = [case for index, case in enumerate(CASES) if case not in CASES[:index]]


def _run(rank, *case):
    return _real(rank, *case[1:]) if case[0] == "real" else _watched(rank, *case)


# -- the real clock --

REAL = {"chunks": 2, "rows": 256, "vocab": 8192, "hidden": 256}
TRIES = 4


def _real(rank, at_once):
    """How long a step slept in waits, of the time that its collectives were delayed by; several tries."""
    shard = shard_of(REAL["vocab"])
    draw = torch.Generator().manual_seed(rank)
    input = torch.randn(REAL["chunks"] * REAL["rows"], REAL["hidden"]).requires_grad_()
    weight = torch.randn(shard.shard_size, REAL["hidden"], generator=draw).requires_grad_()
    target = torch.arange(len(input)) % REAL["vocab"]

    def step():
        linear_cross_entropy(input, weight, target, shard=shard, chunk_size=REAL["rows"]).backward()

    def product():
        start = time.monotonic()
        input[: REAL["rows"]].detach() @ weight.detach().T
        return time.monotonic() - start

    step()
    delay = 0.5 * min(product() for _ in range(10))
    start, wait, slept, issued = collectives._start, collectives.Pending.wait, [0.0], [0]

    def sleep(pending):
        left = pending.issued + delay - time.monotonic()
        if left > 0:
            time.sleep(left)
            slept[0] += left

    def started(name, *args):
        pending = start(name, *args)
        pending.issued = time.monotonic()
        issued[0] += 1
        if at_once:
            sleep(pending)
        return pending

    def waited(pending):
        if hasattr(pending, "issued"):
            sleep(pending)
        return wait(pending)

    shares = []
    with mock.patch.multiple(collectives, _start=started), mock.patch.object(collectives.Pending, "wait", waited):
        for _ in range(TRIES):
            slept[0], issued[0] = 0.0, 0
            step()
            shares.append(slept[0] / (issued[0] * delay))
    return shares


WATCHED = Batch(_run, [*CASES, ("real", False), ("real", True)])


def watched(*case):
    """Forward and backward of every rank."""
    return WATCHED(TP, *case)


@pytest.mark.parametrize("delay", [0.25, 1.0])
@pytest.mark.parametrize("name", HIDING)
def test_a_collective_no_longer_than_a_gemm_costs_no_time(name, delay):
    """The statistics travel during A = e W, dH during the dW GEMM: the last chunk's too."""
    for (seconds, exposed, before, issued), backward in watched(HIDING[name], 3, delay):
        assert issued["all_gather"] == 3 + (name == "row loss") and issued["all_reduce"] == 3
        after = delay if name == "row loss" else 0.0  # the last exchange, of a header: nothing is left to compute
        assert (sum(exposed.values()), sum(before.values())) == (after, 0.0), f"the step waits: {exposed}"
        assert seconds == pytest.approx(9 + after), "three GEMMs a chunk"
        assert backward[0] == 0.0


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("delay", [1.5, 2.0])
def test_beyond_a_gemm_each_exchange_and_the_last_reduction_show_by_the_difference(delay, chunks):
    """So the clock sees what it should. Reductions but the last one have the next chunk's first GEMM to hide behind."""
    for (seconds, exposed, _, _), _ in watched({}, chunks, delay):
        assert exposed == {"all_gather": chunks * (delay - 1), "all_reduce": delay - 1}
        assert seconds == 3 * chunks + (chunks + 1) * (delay - 1)


@pytest.mark.parametrize("settings", [{}, SPREAD], ids=["replicated", "sequence parallel"])
def test_waiting_at_once_would_show_every_collective(settings):
    for (_, exposed, before, issued), _ in watched(settings, 3, 0.5, True):
        assert sum(exposed.values()) + sum(before.values()) == 0.5 * sum(issued.values()) >= 3.0


@pytest.mark.parametrize("chunks", [1, 6])
def test_under_sequence_parallelism_only_what_comes_before_the_first_gemm_is_waited_for(chunks):
    """The opening exchange, the targets and the first chunk's rows. All later rows travel a chunk ahead."""
    for (seconds, exposed, before, issued), backward in watched(SPREAD, chunks, 1.0):
        assert issued == {"all_gather": 2 + 2 * chunks, "reduce_scatter": chunks}
        assert exposed == {}, f"the step waits: {exposed}"
        assert before == {"all_gather": 3.0}
        assert seconds == 3 + 3 * chunks
        assert backward[0] == 0.0


@pytest.mark.parametrize("name", LATE)
def test_a_gradient_that_needs_the_statistics_first_waits_for_them_and_hides_its_reductions(name):
    for (_, exposed, _, issued), _ in watched(LATE[name], 3, 1.0):
        assert exposed == {"all_gather": float(issued["all_gather"])}
        assert issued["all_reduce"] == 3


@pytest.mark.parametrize(
    "settings", [{"reduction": "none"}, {"function": "log-probabilities"}], ids=["none", "log-probabilities"]
)
def test_the_reductions_of_a_recomputing_backward_are_hidden(settings):
    for (_, forward, _, _), (seconds, exposed, _, issued) in watched(settings, 3, 1.0):
        assert forward == {"all_gather": 3.0}, "without gradients there is no GEMM to hide behind"
        assert exposed == {} and issued == {"all_reduce": 3}
        assert seconds == 9


def test_the_reductions_of_a_recomputing_backward_are_hidden_under_sequence_parallelism():
    for _, (_, exposed, _, issued) in watched({"reduction": "none"} | SPREAD, 3, 1.0):
        assert exposed == {} and issued == {"all_gather": 1 + 3, "reduce_scatter": 3}


def test_with_tp_invariant_only_the_last_chunks_reduction_shows():
    """It is an exchange and then a gather, of which the dW GEMM hides one."""
    totals = [[sum(forward[1].values()) for forward, _ in watched({"tp_invariant": True}, n, 1.0)] for n in (2, 3, 6)]
    assert totals[0] == totals[1] == totals[2], "what is waited for grows with the number of chunks"
    assert max(totals[0]) <= 2.0


def test_by_the_real_clock_a_delay_of_half_a_gemm_is_hidden():
    for rank, shares in enumerate(watched("real", False)):
        assert min(shares) < 0.2, f"rank {rank} slept for these parts of the delays: {shares}"
    for rank, shares in enumerate(watched("real", True)):
        assert min(shares) > 0.9, f"rank {rank}, waiting at once, slept for these parts of the delays: {shares}"
