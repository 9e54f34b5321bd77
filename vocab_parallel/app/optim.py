"""What the hosts have in common in a training step: the optimizer, the rate, the mean over replicas."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vocab_parallel.app.config import TrainConfig
from vocab_parallel.collectives import all_reduce_
from vocab_parallel.shard import RankGroup
from vocab_parallel.tying import vocab_parameters


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW over the vocabulary's parameters and, at their own rate, the trunk's; a tied weight is in it once."""
    owners = {id(parameter) for parameter, _ in vocab_parameters(model).values()}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in owners], "ratio": 1.0},
        {"params": [p for p in model.parameters() if id(p) not in owners], "ratio": config.trunk_lr_ratio},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, weight_decay=config.weight_decay, fused=True)


def learning_rate(config: TrainConfig, step: int) -> float:
    """Linear warmup, then a cosine down to ``lr * min_lr_ratio`` at the last step; `step` counts from 1."""
    if step <= config.warmup:
        return config.lr * step / config.warmup
    progress = (step - config.warmup) / max(1, config.steps - config.warmup)
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Gives each group its share of `rate`; takes any object with `param_groups` that `make_optimizer` made."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group["ratio"]


@torch.no_grad()
def average_gradients_(model: nn.Module, replicas: RankGroup) -> None:
    """Means every gradient over the ranks that hold the same parameters and other rows.

    Collectives:
        One all-reduce a parameter over `replicas`, all in flight together; none of a group of one.
    """
    if replicas.size == 1:
        return
    pending = []
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.contiguous()  # dW may be kept transposed
            pending.append(all_reduce_(replicas, parameter.grad))
    for sums in pending:
        sums.wait().div_(replicas.size)


def mean_over_replicas(loss: Tensor, replicas: RankGroup) -> Tensor:
    """The mean of the replicas' losses, with the gradient of this one's alone, for a mean of gradients to follow.

    Collectives:
        One all-reduce of 4 bytes over `replicas`; none of a group of one.
    """
    if replicas.size == 1:
        return loss
    mean = all_reduce_(replicas, loss.detach().clone()[None]).wait()[0] / replicas.size
    return loss + (mean - loss.detach())
