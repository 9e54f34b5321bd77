"""A small language model: the gradient norm and clipping, and training steps, beside the same model without shards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.fuzz.case import Draw, FuzzCase, gathered
from tests.fuzz.kinds.losses import spreads
from tests.multirank.loss_case import SPREADS
from tests.tolerances import require_close, require_equal
from vocab_parallel import (
    VocabParallelEmbedding,
    VocabParallelLMHead,
    VocabShard,
    clip_gradients_,
    reference,
    tie_weights,
    verify_tied,
)
from vocab_parallel.gradient_norm import gradient_norm

OPTIMIZERS = ("sgd", "momentum", "adamw", "adagrad")
VOCABULARY = ("embedding.weight", "head.weight", "head.bias")


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class Whole(nn.Module):
    """The oracle: whole tables, PyTorch alone."""

    def __init__(self, case: Model) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(case.seed)
        tables = [normal(generator, case.vocab, case.width) for _ in range(2)]
        bias, trunk = normal(generator, case.vocab), normal(generator, case.width, case.width)
        self.case = case
        self.embedding, self.head, self.trunk = nn.Module(), nn.Module(), nn.Module()
        self.embedding.weight = nn.Parameter(tables[0].to(case.dtype))
        self.trunk.weight = nn.Parameter(trunk.to(case.dtype))
        self.head.weight = self.embedding.weight if case.tied else nn.Parameter(tables[1].to(case.dtype))
        self.head.bias = nn.Parameter(bias.to(case.dtype)) if case.bias else None

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        rows = reference.embedding(ids, self.embedding.weight, self.case.padding_idx)
        hidden = functional.linear(rows, self.trunk.weight).tanh()
        return reference.linear_cross_entropy(
            hidden, self.head.weight, target, bias=self.head.bias, **self.case.options
        )  # fmt: skip


class Sharded(nn.Module):
    """The same with this rank's rows."""

    def __init__(self, case: Model, shard: VocabShard) -> None:
        super().__init__()
        whole = Whole(case)
        self.case, made = case, {"shard": shard, "dtype": case.dtype}
        self.embedding = VocabParallelEmbedding(case.width, padding_idx=case.padding_idx, **made)
        self.trunk = nn.Linear(case.width, case.width, bias=False, dtype=case.dtype)
        self.head = VocabParallelLMHead(case.width, bias=case.bias, **made)
        with torch.no_grad():
            self.embedding.weight.copy_(shard.slice(whole.embedding.weight))
            self.trunk.weight.copy_(whole.trunk.weight)
            self.head.weight.copy_(shard.slice(whole.head.weight))
            if case.bias:
                self.head.bias.copy_(shard.slice(whole.head.bias))
        if case.tied:
            tie_weights(self.embedding, self.head)

    def forward(self, ids: Tensor, target: Tensor) -> Tensor:
        shard, spread = self.head.shard, self.case.spread
        hidden = self.trunk(self.embedding(ids)).tanh()
        if spread is None:
            return self.head.loss(hidden, target, **self.case.options, **self.case.execution)
        rows = SPREADS[spread](len(ids), shard.tp_size)
        # each rank's part of the rows, whose gradient the others do not have
        mine = _Own.apply(hidden, rows, shard)[shard.rank]
        return self.head.loss(mine, target, sequence_parallel=True, **self.case.options, **self.case.execution)


class _Own(torch.autograd.Function):
    """Splits replicated rows; backward puts the ranks' gradients together again."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: list[int], shard: VocabShard) -> tuple[Tensor, ...]:
        ctx.shard = shard
        return tuple(part.clone() for part in hidden.split(rows))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        whole = torch.cat(gradients)  # zero where another rank's rows are
        if ctx.shard.group is not None:
            torch.distributed.all_reduce(whole, group=ctx.shard.group)
        return whole, None, None


@dataclass(frozen=True, repr=False)
class Model(FuzzCase):
    """What both kinds have."""

    vocab: int = 9
    multiple_of: int = 1
    width: int = 4
    tokens: int = 6
    dtype: torch.dtype = torch.float64
    tied: bool = False
    bias: bool = False
    padding_idx: int | None = None
    spread: str | None = None
    options: dict[str, Any] = field(default_factory=dict)  # of the loss
    execution: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def drawn(one: Draw) -> dict[str, Any]:
        layout, tokens = one.layout(), one(1, 6, 11)
        options = {"label_smoothing": one(0.0, 0.1), "z_loss": one(0.0, 0.1), "softcap": one(None, 2.0)}
        return {
            "ranks": one.ranks(), "seed": one.seed(), **layout, "width": one(1, 4, 6), "tokens": tokens,
            "tied": one(False, True), "bias": one(False, True), "padding_idx": one(None, None, layout["vocab"] - 1),
            "spread": one(None, None, *spreads(tokens)),
            "options": {name: value for name, value in options.items() if one.chance(0.3)},
            "execution": one({}, {"chunk_size": 2}, {"memory_budget": 300}),
        }  # fmt: skip

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed + 100 + step)
        both = torch.randint(self.vocab, (2, self.tokens), generator=generator)
        target = torch.where(torch.rand(self.tokens, generator=generator) < 0.2, -100, both[1])
        return both[0], target

    def allowed(self) -> bool:
        spread = self.spread is None or self.spread in spreads(self.tokens)
        least = min(self.vocab, self.multiple_of, self.width, self.tokens)
        return spread and least >= 1 and (self.padding_idx or 0) < self.vocab

    def compare(self, name: str, results: list[dict[str, Any]], expected: Tensor) -> None:
        """A parameter or gradient of all ranks with the oracle's."""
        parts = [result[name] for result in results]
        if name in VOCABULARY:
            for part, result in zip(parts, results, strict=True):
                assert not part[result["valid"] :].any(), f"{name}: padding"
            got = gathered(parts, [result["valid"] for result in results], 0)
        else:
            require_equal(f"{name} on every rank", parts)
            got = parts[0]
        require_close(name, got, expected, self.dtype)


@dataclass(frozen=True, repr=False)
class Clipping(Model):
    kind: ClassVar[str] = "clipping"
    factor: float = 2.0  # the limit over the norm

    @classmethod
    def draw(cls, one: Draw) -> Clipping:
        return cls(**cls.drawn(one), dtype=one(torch.float64, torch.float32), factor=one(0.25, 0.9, 2.0))

    def whole(self) -> tuple[Whole, Tensor]:
        model = Whole(self).double()
        model(*self.batch(0)).backward()
        return model, sum(p.grad.square().sum() for p in model.parameters()).sqrt()

    def run(self, place: Any) -> Any:
        model = Sharded(self, place.shard(self.vocab, self.multiple_of))
        limit = self.factor * float(self.whole()[1])
        model(*self.batch(0)).backward()
        found = {"norm": clip_gradients_(model, limit), "after": gradient_norm(model)}
        found |= {"valid": model.head.shard.num_valid}
        return found | {name: parameter.grad for name, parameter in model.named_parameters()}

    def check(self, results: list[Any]) -> None:
        model, norm = self.whole()
        for name in ("norm", "after"):
            require_equal(f"{name} on every rank", [result[name] for result in results])
        assert results[0]["norm"].dtype == torch.float64
        require_close("norm", results[0]["norm"], norm, self.dtype)
        scale = min(1.0, self.factor)
        require_close("norm after", results[0]["after"], norm * scale, self.dtype)
        for name, parameter in model.named_parameters():
            self.compare(name, results, parameter.grad * scale)


@dataclass(frozen=True, repr=False)
class Training(Model):
    kind: ClassVar[str] = "training"
    optimizer: str = "sgd"
    steps: int = 1
    max_norm: float | None = None

    @classmethod
    def draw(cls, one: Draw) -> Training:
        more = {"optimizer": one(*OPTIMIZERS), "steps": one(1, 2, 4), "max_norm": one(None, 0.1, 10.0)}
        return cls(**cls.drawn(one), **more)

    def optimizer_of(self, model: nn.Module) -> torch.optim.Optimizer:
        parameters = list(model.parameters())
        if self.optimizer in ("sgd", "momentum"):
            return torch.optim.SGD(parameters, lr=0.1, momentum=0.9 if self.optimizer == "momentum" else 0.0)
        # a large eps: where a gradient is 0 up to rounding, a step must not be its sign
        made = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.Adagrad
        return made(parameters, lr=0.02, eps=1e-2, weight_decay=0.1)

    def train(self, model: nn.Module, clip: Any) -> list[Tensor]:
        optimizer, losses = self.optimizer_of(model), []
        for step in range(self.steps):
            optimizer.zero_grad()
            loss = model(*self.batch(step))
            loss.backward()
            if self.max_norm is not None:
                clip(model)
            optimizer.step()
            losses.append(loss.detach())
        if self.tied and isinstance(model, Sharded):
            verify_tied(model, optimizer)
        return losses

    def run(self, place: Any) -> Any:
        model = Sharded(self, place.shard(self.vocab, self.multiple_of))
        losses = self.train(model, lambda model: clip_gradients_(model, self.max_norm))
        found = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return found | {"losses": torch.stack(losses), "valid": model.head.shard.num_valid}

    def check(self, results: list[Any]) -> None:
        model = Whole(self)

        def clip(model: nn.Module) -> None:
            norm = torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt()
            for parameter in model.parameters():
                parameter.grad *= min(1.0, self.max_norm / max(float(norm), 1e-300))  # PyTorch's adds 1e-6 to the norm

        losses = torch.stack(self.train(model, clip))
        require_equal("losses on every rank", [result["losses"] for result in results])
        got = results[0]["losses"]
        torch.testing.assert_close(got, losses, rtol=1e-10, atol=1e-10)
        for name, parameter in model.named_parameters():
            parts = [result[name] for result in results]
            if name in VOCABULARY:
                for part, result in zip(parts, results, strict=True):
                    assert not part[result["valid"] :].any(), f"{name}: padding has moved"
                parts = [gathered(parts, [result["valid"] for result in results], 0)]
            require_equal(f"{name} on every rank", parts)
            torch.testing.assert_close(parts[0], parameter.detach(), rtol=1e-10, atol=1e-10)

    def allowed(self) -> bool:
        return super().allowed() and self.steps >= 1
