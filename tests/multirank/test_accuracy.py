"""Errors at a realistic size against the float64 oracle: at most twice those of PyTorch's own unsharded computation."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from tests.multirank.sharded import shard_of
from tests.ranks import run_ranks
from tests.tolerances import WORSE_THAN_PYTORCH, floor, require_equal
from vocab_parallel import cross_entropy, linear_cross_entropy, reference, vocab_parallel_embedding
from vocab_parallel.collectives import gather_vocab

ROWS, HIDDEN, VOCAB, SEEDS = 192, 64, 2001, 4


NAMES = ["loss", "d_input", "d_weight", "d_bias"]


def batch(seed, dtype, confident):
    """Hidden states, weight, bias and targets. Confident rows point at their target: `p - 1` nearly vanishes."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw, dtype=torch.float64) / HIDDEN**0.5
    target = torch.randint(0, VOCAB, (ROWS,), generator=draw)
    input = torch.randn(ROWS, HIDDEN, generator=draw, dtype=torch.float64)
    if confident:
        input += 18 * functional.normalize(weight[target]) / weight[target].norm(dim=1, keepdim=True)
    bias = 0.5 * torch.randn(VOCAB, generator=draw, dtype=torch.float64)
    target[torch.rand(ROWS, generator=draw) < 0.1] = -100
    return [input.to(dtype), weight.to(dtype), bias.to(dtype)], target


def gradients(loss, tensors):
    return [loss.detach(), *torch.autograd.grad(loss, tensors, _upstream(loss))]


def _upstream(loss):
    return torch.linspace(-1, 2, loss.numel(), dtype=loss.dtype).view(loss.shape) if loss.dim() else None


def _linear(rank, dtype, confident, options, chunk_size, spread):
    shard = shard_of(VOCAB, 16)
    every = []
    for seed in range(SEEDS):
        (input, weight, bias), target = batch(seed, dtype, confident)
        rows = slice(ROWS * rank // shard.tp_size, ROWS * (rank + 1) // shard.tp_size) if spread else slice(None)
        tensors = [input[rows].clone(), shard.slice(weight), shard.slice(bias)]
        for tensor in tensors:
            tensor.requires_grad_()
        loss = linear_cross_entropy(
            tensors[0], tensors[1], target, shard=shard, linear_bias=tensors[2],
            chunk_size=chunk_size, sequence_parallel=spread, **options,
        )  # fmt: skip
        loss, d_input, *vocab = gradients(loss, tensors)
        every.append([loss, d_input, *(gather_vocab(shard, table) for table in vocab)])
    return every


def _logits(rank, dtype, confident, options):
    shard = shard_of(VOCAB, 16)
    every = []
    for seed in range(SEEDS):
        tensors, target = batch(seed, dtype, confident)
        logits = shard.slice(reference.logits(*tensors), -1).requires_grad_()
        loss, d_logits = gradients(cross_entropy(logits, target, shard=shard, **options), [logits])
        every.append([loss, gather_vocab(shard, d_logits, dim=-1)])
    return every


def pytorch(seed, dtype, confident, options, linear):
    """PyTorch's own, unsharded, in `dtype`, the loss in float32 as training code does it; and the oracle."""
    results = []
    for oracle in (False, True):
        tensors, target = batch(seed, dtype, confident)
        logits = reference.logits(*tensors)
        tensors = tensors if linear else [logits]
        tensors = [tensor.to(torch.float64 if oracle else dtype).requires_grad_() for tensor in tensors]
        logits = functional.linear(*tensors) if linear else tensors[0]
        if oracle:
            loss = reference.cross_entropy(logits, target, **options)
        else:
            loss = functional.cross_entropy(logits.float(), target, **options)
        results.append(gradients(loss, tensors))
    return results


_THEIRS = {}  # what `pytorch` gave, for all seeds: the same at every number of ranks


def compare(names, got, dtype, confident, options, linear):
    """Pools the errors of all seeds, so that one lucky rounding of PyTorch's does not decide."""
    key = (dtype, confident, str(options), linear)
    if key not in _THEIRS:
        _THEIRS[key] = [pytorch(seed, dtype, confident, options, linear) for seed in range(SEEDS)]
    pairs = _THEIRS[key]
    failures = []
    for index, name in enumerate(names):
        ours = torch.stack([(got[seed][index].double() - pairs[seed][1][index]).abs() for seed in range(SEEDS)])
        theirs = torch.stack([(pairs[seed][0][index].double() - pairs[seed][1][index]).abs() for seed in range(SEEDS)])
        expected = torch.stack([pairs[seed][1][index] for seed in range(SEEDS)])
        slack = floor(expected, torch.float32 if name == "loss" else dtype)
        for measure, of in (("largest", torch.max), ("mean square", lambda error: error.square().mean().sqrt())):
            mine, limit = of(ours).item(), WORSE_THAN_PYTORCH * of(theirs).item() + slack
            if not mine <= limit:
                failures.append(
                    f"{name}: {measure} error {mine:.3g}, PyTorch's {of(theirs).item():.3g}, slack {slack:.3g}"
                )
    assert not failures, "\n".join(failures)


DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
CONFIDENT = pytest.mark.parametrize("confident", [False, True], ids=["early", "confident"])
OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1}, {"reduction": "none"}], ids=["mean", "smoothing", "none"]
)


@DTYPES
@CONFIDENT
@OPTIONS
@pytest.mark.parametrize(("tp", "chunk_size", "spread"), [(2, 50, False), (4, 96, True)])
def test_linear_cross_entropy_is_no_worse_than_twice_pytorch(tp, chunk_size, spread, dtype, confident, options):
    ranks = run_ranks(_linear, tp, dtype, confident, options, chunk_size, spread)
    got = ranks[0]
    for seed in range(SEEDS):
        for index, name in enumerate(NAMES):
            parts = [result[seed][index] for result in ranks]
            if spread and name == "d_input":
                got[seed][index] = torch.cat(parts)
            else:
                require_equal(f"{name} on every rank", parts)
    compare(NAMES, got, dtype, confident, options, linear=True)


@DTYPES
@CONFIDENT
@OPTIONS
def test_cross_entropy_is_no_worse_than_twice_pytorch(dtype, confident, options):
    got = run_ranks(_logits, 2, dtype, confident, options)[0]
    compare(["loss", "d_logits"], got, dtype, confident, options, linear=False)


def _embedding(rank, dtype):
    shard = shard_of(VOCAB, 16)
    _, weight, ids, upstream = _lookup(dtype)
    local = shard.slice(weight).requires_grad_()
    out = vocab_parallel_embedding(ids, local, shard=shard)
    out.backward(upstream)
    return out.detach(), gather_vocab(shard, local.grad)


def _lookup(dtype):
    draw = torch.Generator().manual_seed(5)
    weight = torch.randn(VOCAB, HIDDEN, generator=draw).to(dtype)
    ids = torch.randint(0, 50, (ROWS,), generator=draw)  # few ids: each row's gradient is a sum of several
    upstream = torch.randn(ROWS, HIDDEN, generator=draw).to(dtype)
    module = torch.nn.Embedding(VOCAB, HIDDEN, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(weight)
    return module, weight, ids, upstream


@DTYPES
def test_embedding_gradients_are_no_worse_than_twice_pytorch(dtype):
    out, d_weight = run_ranks(_embedding, 2, dtype)[0]
    module, weight, ids, upstream = _lookup(dtype)
    module(ids).backward(upstream)
    exact = torch.zeros(VOCAB, HIDDEN, dtype=torch.float64).index_add_(0, ids, upstream.double())
    assert torch.equal(out, weight[ids])
    theirs = (module.weight.grad.double() - exact).abs().max().item()
    assert (d_weight.double() - exact).abs().max().item() <= WORSE_THAN_PYTORCH * theirs + floor(exact, dtype)
