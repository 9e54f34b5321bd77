"""The proof of a conversion: on a small batch the converted model gives what the model gave before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vocab_parallel.errors import ConfigError
from vocab_parallel.integrations.transformers.checks import Parts
from vocab_parallel.integrations.transformers.conversion import Conversion
from vocab_parallel.shard import VocabShard

# Largest difference, over the largest value. Losses of different summation order, not of different models.
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
_ROWS = 8  # of the gradient


@dataclass
class Evidence:
    """What the model gave before: its loss, this rank's logits, and some rows of its tables' gradients, by id."""

    batch: tuple[Tensor, Tensor]
    loss: Tensor
    logits: Tensor
    ids: list[int]
    gradients: dict[str, Tensor]
    tolerance: float


def observe(model: Any, parts: Parts, shard: VocabShard, data_parallel: bool) -> Evidence:
    """Runs the model as it is on the proof's batches: of all ranks, or the one that all ranks share.

    Raises:
        ConfigError: What the model does to its head's output is not what its config says.
    """
    weight = parts.embedding.weight
    ranks = shard.tp_size if data_parallel else 1
    batches = [_batch(rank, shard.vocab_size, weight.device) for rank in range(ranks)]
    ids = [0, shard.vocab_size - 1, *batches[0][0].flatten().tolist()][:_ROWS]
    tables = _tables(parts)
    mine = shard.rank if data_parallel else 0
    with _still(model):
        loss, count, logits = torch.zeros((), dtype=torch.float64, device=weight.device), 0, None
        gradients: dict[str, Any] = dict.fromkeys(tables, 0.0)
        for rank, (input, labels) in enumerate(batches):
            output = model(input, labels=labels)
            valid = int((labels[:, 1:] != -100).sum())
            if tables:
                found = torch.autograd.grad(output.loss * valid, list(tables.values()), allow_unused=True)
                for name, gradient in zip(tables, found, strict=True):
                    gradients[name] = gradients[name] + _rows(gradient, ids)
            loss, count = loss + output.loss.detach().double() * valid, count + valid
            logits = output.logits.detach() if rank == mine else logits
        _check_scores(model, parts, batches[0][0])
    assert logits is not None
    return Evidence(
        batches[mine], loss / count, logits, ids,
        {name: torch.as_tensor(rows / count) for name, rows in gradients.items()},
        _TOLERANCE.get(weight.dtype, 5e-2),
    )  # fmt: skip


def compare(model: Any, before: Evidence, conversion: Conversion) -> None:
    """Runs the converted model on the same batches.

    Raises:
        ConfigError: Its loss, logits or gradients differ.
    """
    input, labels = before.batch
    shard = conversion.shard
    tables = _tables(conversion)
    with _still(model):
        output = model(input, labels=labels)
        found: Any = [None] * len(tables)
        if tables:
            found = torch.autograd.grad(output.loss, list(tables.values()), allow_unused=True)
        logits = model(input).logits.detach()
    difference = {
        "loss": _difference(output.loss.detach(), before.loss.to(output.loss.device)),
        "logits": _difference(logits, before.logits),
    }
    for name, gradient in zip(tables, found, strict=True):
        mine = [at for at, id in enumerate(before.ids) if shard.start <= id < shard.stop]
        local = _rows(gradient, [before.ids[at] - shard.start for at in mine])
        largest = before.gradients[name].abs().max().clamp(min=1e-30)
        difference[f"gradient of {name}"] = _difference(local, before.gradients[name][mine], largest)
    wrong = {name: value for name, value in difference.items() if not value <= before.tolerance}
    if wrong:
        table = ", ".join(f"{name} by {value:.2g}" for name, value in wrong.items())
        raise ConfigError(
            f"the converted {type(model).__name__} differs from what it gave before: {table} of the largest value, "
            f"more than {before.tolerance:g}. Likely the model does something with its head's output, its loss or its "
            "embedding that its config does not tell. It is left as it was."
        )


def _check_scores(model: Any, parts: Parts, input: Tensor) -> None:
    """Sends known values of a wide range out of the head: a small batch's own logits would hide a softcap."""
    raw = torch.linspace(-60.0, 60.0, len(parts.head.weight), device=input.device).to(parts.head.weight.dtype)
    handle = parts.head.register_forward_hook(lambda module, args, output: raw.expand_as(output).clone())
    try:
        with torch.no_grad():
            got = model(input).logits
    finally:
        handle.remove()
    expected = parts.scores.apply_(raw.float().clone()).expand_as(got)
    difference = _difference(got, expected)
    if not difference <= _TOLERANCE.get(raw.dtype, 5e-2):
        raise ConfigError(
            f"{type(model).__name__} does something to its head's output that its config does not tell: logits of "
            f"-60 to 60 come out with {float(got.min()):.4g} to {float(got.max()):.4g}, expected "
            f"{float(expected.min()):.4g} to {float(expected.max()):.4g} (of final_logit_softcapping, logit_scale, "
            "logits_scaling). An unknown architecture."
        )


def _batch(rank: int, vocab_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and labels of a rank, of a shape of its own; without touching the global random state."""
    draw = torch.Generator().manual_seed(1729 + rank)
    shape = (2 - rank % 2, 5 + rank % 3)
    input = torch.randint(0, vocab_size, shape, generator=draw)
    labels = input.clone()
    labels[:, 1] = -100
    return input.to(device), labels.to(device)


def _tables(parts: Parts | Conversion) -> dict[str, Tensor]:
    """The trained tables by name; a tied one once."""
    tables = {f"{parts.embedding_name}.weight": parts.embedding.weight}
    if not parts.tied:
        tables[f"{parts.head_name}.weight"] = parts.head.weight
    if parts.head.bias is not None:
        tables[f"{parts.head_name}.bias"] = parts.head.bias
    return {name: table for name, table in tables.items() if table.requires_grad}


def _rows(gradient: Tensor | None, ids: list[int]) -> Tensor:
    return torch.zeros(len(ids), 1) if gradient is None else gradient[ids].detach().float()


def _difference(got: Tensor, expected: Tensor, largest: Tensor | None = None) -> float:
    """Over the largest expected value; NaN if anything is."""
    if got.shape != expected.shape:
        return float("inf")
    if got.numel() == 0:
        return 0.0
    scale = expected.double().abs().max().clamp(min=1e-30) if largest is None else largest.double()
    return float((got.double() - expected.double()).abs().max() / scale)


@contextmanager
def _still(model: Any) -> Iterator[None]:
    """Without dropout, with gradients, whatever was set; and as it was afterwards."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.enable_grad():
            yield
    finally:
        for module in training:
            module.training = True
