"""Errors with each option at a realistic size against float64: at most twice those of PyTorch's unsharded float32 loss.

PyTorch's computation is the oracle's own code in float32, on logits that are projected in the arguments' dtype.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.multirank.sharded import shard_of
from tests.multirank.shared_world import Batch
from tests.multirank.test_accuracy import ROWS, VOCAB, batch
from tests.tolerances import WORSE_THAN_PYTORCH, floor, require_equal
from vocab_parallel import loss, reference
from vocab_parallel.collectives import gather_vocab


@dataclass(frozen=True)
class Kind:
    """A function and its options; the target is ids, or a distribution near the model's own ("near") or not ("far")."""

    function: str = "cross_entropy"
    options: dict[str, Any] = field(default_factory=dict)
    target: str = "ids"


KINDS = {
    "z_loss": Kind(options={"z_loss": 0.1}),
    "softcap": Kind(options={"softcap": 5.0}),
    "temperature": Kind(options={"temperature": 0.7}),
    "softcap, smoothing": Kind(options={"softcap": 5.0, "label_smoothing": 0.1}),
    "soft": Kind(target="far"),
    "kl, nearly there": Kind("kl_div", target="near"),
    "kl of logs, nearly there": Kind("kl_div", {"log_target": True}, target="near"),
    "logprobs": Kind("token_logprobs"),
}


SEEDS = 2  # their errors are pooled


def targets(kind, seed, tensors, ids):
    """Ids, or float32 (log-)probabilities, the same for every computation."""
    if kind.target == "ids":
        return ids
    noise = torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    logits = linear(*(tensor.double() for tensor in tensors))
    q = (logits + {"far": 1.0, "near": 0.02}[kind.target] * noise).softmax(-1).float()
    return q.log() if kind.options.get("log_target") else q


def differentiate(rows, leaves):
    """The rows' values as one tensor, and the gradients under upstream gradients of both signs."""
    values = rows if isinstance(rows, tuple) else (rows,)
    upstream = [torch.linspace(-1, 2, ROWS, dtype=one.dtype) * (-1.3) ** at for at, one in enumerate(values)]
    return [torch.stack(values).detach(), *torch.autograd.grad(values, leaves, upstream)]


def options_of(kind):
    return kind.options | ({"reduction": "none"} if kind.function != "token_logprobs" else {})


def _sharded(rank, name, dtype, confident, fused):
    kind, shard, every = KINDS[name], shard_of(VOCAB, 16), []
    for seed in range(SEEDS):
        tensors, ids = batch(seed, dtype, confident)
        target = targets(kind, seed, tensors, ids)
        target = target if kind.target == "ids" else shard.slice(target, -1)
        if fused:
            leaves = [tensors[0], shard.slice(tensors[1]), shard.slice(tensors[2])]
        else:
            leaves = [shard.slice(linear(*tensors), -1)]
        for leaf in leaves:
            leaf.requires_grad_()
        function = getattr(loss, ("linear_" if fused else "") + kind.function)
        how = {"linear_bias": leaves[2], "chunk_size": 70} if fused else {}
        rows = function(*leaves[:2], target, shard=shard, **how, **options_of(kind))
        value, d_input, *rest = differentiate(tuple(rows) if kind.function == "token_logprobs" else rows, leaves)
        d_input = d_input if fused else gather_vocab(shard, d_input, dim=-1)
        every.append([value, d_input, *(gather_vocab(shard, one) for one in rest)])
    return every


@functools.cache
def unsharded(name, dtype, confident, fused):
    """PyTorch's results and the oracle's, for all seeds."""
    kind, results = KINDS[name], []
    for seed in range(SEEDS):
        for exact in (False, True):
            tensors, ids = batch(seed, dtype, confident)
            target = targets(kind, seed, tensors, ids)
            leaves = tensors if fused else [linear(*tensors)]
            leaves = [leaf.to(torch.float64 if exact else dtype).requires_grad_() for leaf in leaves]
            logits = linear(*leaves) if fused else leaves[0]
            target = target.double() if exact and kind.target != "ids" else target
            rows = getattr(reference, kind.function)(logits if exact else logits.float(), target, **options_of(kind))
            results.append(differentiate(rows, leaves))
    return results[::2], results[1::2]


WAYS = [
    (dtype, confident, fused)
    for dtype, fused in [(torch.float32, False), (torch.float32, True), (torch.bfloat16, True)]
    for confident in (False, True)
]
SHARDED = {name: Batch(_sharded, [(name, *way) for way in WAYS]) for name in KINDS}


@pytest.mark.parametrize(("dtype", "confident", "fused"), WAYS, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_options_are_no_worse_than_twice_pytorch(name, dtype, confident, fused):
    ranks = SHARDED[name](2, name, dtype, confident, fused)
    theirs, exact = unsharded(name, dtype, confident, fused)
    failures = []
    for index, part in enumerate(["loss", "d_input", "d_weight", "d_bias"][: 4 if fused else 2]):
        for seed in range(SEEDS):
            require_equal(f"{part} on every rank", [result[seed][index] for result in ranks])
        expected = torch.stack([one[index] for one in exact])
        ours, other = (
            (torch.stack([one[index].double() for one in got]) - expected).abs() for got in (ranks[0], theirs)
        )
        slack = floor(expected, torch.float32 if part == "loss" else dtype)
        for measure, of in (("largest", torch.max), ("mean square", lambda error: error.square().mean().sqrt())):
            mine, limit = of(ours).item(), WORSE_THAN_PYTORCH * of(other).item() + slack
            if not mine <= limit:
                failures.append(
                    f"{part}: {measure} error {mine:.3g}, PyTorch's {of(other).item():.3g}, slack {slack:.3g}"
                )
    assert not failures, "\n".join(failures)
