"""The embedding and the head of a Transformers model, turned into sharded ones in place, and their exchanges.

In place, so that what hangs on a module stays: its name, its hooks, a scale, a subclass's own forward.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vocab_parallel.adjoints import GatherRows
from vocab_parallel.agreement import Exchange, capture
from vocab_parallel.arguments import check_head
from vocab_parallel.collectives import all_gather, all_to_all, apply, pad_rows
from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.shard import VocabShard


class ShardedEmbedding(VocabParallelEmbedding, nn.Embedding):  # type: ignore[misc]  # weight is a Parameter
    """An `nn.Embedding` whose rows are spread over the ranks.

    With `own_rows` (ranks with different batches) the gradient it passes on is 1 / tp of what arrives: the trunk's
    gradients are made to be averaged over the ranks, the rows' are the sum over all of them.
    """

    def forward(self, input: Tensor) -> Tensor:
        rows = super().forward(input)
        return scale_gradient(rows, 1.0 / self.shard.tp_size) if self.own_rows else rows


class ShardedHead(VocabParallelLMHead):
    """A linear head whose rows are spread over the ranks; its output is the whole logits, gathered.

    Within `answering` it projects nothing: what it is asked for is computed from its input, here, because hosts that
    partition the weight (ZeRO-3) gather it for this forward only.
    """

    own_rows: bool
    _answer: Callable[[Tensor], Any] | None
    _answers: list[Any]

    def forward(self, input: Tensor, rows: Any = None) -> Tensor:
        if self._answer is not None:
            self._answers.append(self._answer(input))
            return input.new_zeros(*input.shape[:-1], 1)
        return self.whole_logits(input if rows is None else input[..., rows, :])

    @contextmanager
    def answering(self, answer: Callable[[Tensor], Any]) -> Iterator[list[Any]]:
        """Collects `answer(input)` of each call; the calls return zeros `[..., 1]`."""
        self._answer, self._answers = answer, []
        try:
            yield self._answers
        finally:
            self._answer, self._answers = None, []

    def whole_logits(self, input: Tensor) -> Tensor:
        """`[..., vocab_size]` of this rank's rows, as the unsharded layer gives; differentiable.

        Collectives:
            Forward: an all-gather of the logits; backward: an all-reduce of dH. With `own_rows` a 64-byte all-gather,
            one of the rows, and an all-to-all of the logits; in backward their adjoints.
        """
        shard = self.shard
        if not self.own_rows:
            local = self.logits(input)
            return local[..., : shard.vocab_size] if shard.tp_size == 1 else apply(GatherColumns, local, shard)
        fault = capture(check_head, input, self.weight, self.bias, shard)
        flat = input.flatten(0, -2)
        wanted = "wanted" if torch.is_grad_enabled() and input.requires_grad else "not wanted"
        call = f"logits(input [*, {flat.shape[-1]}] {flat.dtype} of its own, gradient {wanted})"
        exchange = Exchange(shard, "header", call, fault=fault, rows=len(flat), device=flat.device)
        exchange.wait()
        # What each rank makes of its rows is averaged over the ranks by whoever averages the trunk's gradients.
        share = 1.0 / shard.tp_size
        weight = scale_gradient(self.weight, share)
        bias = None if self.bias is None else scale_gradient(self.bias, share)
        local = F.linear(apply(GatherRows, flat, shard, exchange.rows), weight, bias)
        whole = apply(OwnRowsWhole, local, shard, exchange.rows)
        return whole.view(*input.shape[:-1], shard.vocab_size)


class GatherColumns(torch.autograd.Function):
    """Forward: every rank's columns `[..., v]`, as `[..., vocab_size]`. Adjoint: this rank's columns.

    For a gradient that is the same on every rank.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabShard) -> Tensor:
        ctx.shard = shard
        blocks = all_gather(shard, local).wait()
        return blocks.movedim(0, -2).flatten(-2)[..., : shard.vocab_size].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.shard.raise_deferred()
        return ctx.shard.slice(grads[0], dim=-1), None


class OwnRowsWhole(torch.autograd.Function):
    """Forward: all rows `[T, v]` of this rank's columns become this rank's rows `[t, vocab_size]` of all columns.

    Adjoint: the way back.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: VocabShard, rows: list[int]) -> Tensor:
        ctx.shard, ctx.rows = shard, rows
        most = max(rows)
        sent = torch.cat([pad_rows(block, most) for block in torch.split(local, rows)])
        blocks = all_to_all(shard, sent).wait().view(shard.tp_size, most, local.shape[1])
        mine = blocks[:, : rows[shard.rank]].movedim(0, 1).flatten(1)
        return mine[:, : shard.vocab_size].contiguous()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        shard, rows = ctx.shard, ctx.rows
        shard.raise_deferred()
        width = shard.layout.padded_size - shard.vocab_size
        padded = F.pad(grads[0], (0, width)).view(len(grads[0]), shard.tp_size, shard.shard_size)
        most = max(rows)
        sent = torch.cat([pad_rows(block, most) for block in padded.movedim(1, 0)])
        blocks = all_to_all(shard, sent).wait().view(shard.tp_size, most, shard.shard_size)
        return torch.cat([block[:count] for block, count in zip(blocks, rows, strict=True)]), None, None


class _ScaleGradient(torch.autograd.Function):
    """Forward: identity. Backward: the gradient times a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """`x`, whose gradient is multiplied by `factor`."""
    return x if factor == 1.0 else apply(_ScaleGradient, x, factor)


def shard_embedding_(module: nn.Embedding, shard: VocabShard, own_rows: bool) -> ShardedEmbedding:
    """Makes `module` a `ShardedEmbedding` of its own rows."""
    plain = type(module)
    # A subclass with a forward of its own (a scale, a norm) calls its parent's lookup, which becomes ours.
    kind = ShardedEmbedding if plain is nn.Embedding else type(plain.__name__, (plain, ShardedEmbedding), {})
    fresh = VocabParallelEmbedding(
        module.embedding_dim, shard=shard, padding_idx=module.padding_idx, own_rows=own_rows, device="meta"
    )
    weight = module.weight
    sharded: Any = _become(module, kind, fresh)
    sharded.weight = _sliced(weight, shard)
    return sharded  # type: ignore[no-any-return]


def shard_head_(module: nn.Linear, shard: VocabShard, own_rows: bool) -> ShardedHead:
    """Makes `module` a `ShardedHead` of its own rows."""
    fresh = ShardedHead(module.in_features, shard=shard, bias=module.bias is not None, device="meta")
    fresh.own_rows, fresh._answer, fresh._answers = own_rows, None, []
    weight, bias = module.weight, module.bias
    sharded: Any = _become(module, ShardedHead, fresh)
    sharded.weight = _sliced(weight, shard)
    if bias is not None:
        sharded.bias = _sliced(bias, shard)
    return sharded  # type: ignore[no-any-return]


def _become(module: Any, kind: type[nn.Module], fresh: nn.Module) -> Any:
    """Gives `module` another class, and the attributes that `fresh` has beside its own."""
    module.__class__ = kind
    for name, value in fresh.__dict__.items():
        module.__dict__.setdefault(name, value)
    return module


class Snapshot:
    """A module before its conversion, and the way back."""

    _HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")

    def __init__(self, module: nn.Module) -> None:
        self._kind, self._names = type(module), set(module.__dict__)
        self._hooks = {name: copy.copy(module.__dict__[name]) for name in self._HOOKS}
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters(recurse=False))

    def restore_(self, module: nn.Module) -> None:
        """Gives back the class, the attributes, the load hooks and `parameters`."""
        module.__class__ = self._kind
        for name in [name for name in module.__dict__ if name not in self._names]:
            del module.__dict__[name]
        module.__dict__.update(self._hooks)
        for name, parameter in self.parameters.items():
            setattr(module, name, parameter)


def _sliced(weight: Tensor, shard: VocabShard) -> nn.Parameter:
    local = shard.slice(weight.detach())
    return nn.Parameter(local, requires_grad=weight.requires_grad)


def take_whole_tables(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """A pre-hook of `load_state_dict`: of a whole table of `vocab_size` rows, this rank's part is loaded."""
    shard: VocabShard = module.shard  # type: ignore[assignment]
    for name, _parameter in module.named_parameters(recurse=False):
        value = state.get(prefix + name)
        if not isinstance(value, Tensor):
            continue
        if len(value) == shard.vocab_size:
            state[prefix + name] = shard.slice(value)
        elif len(value) != shard.shard_size:
            raise CheckpointLayoutError(
                f"{prefix}{name} has {len(value)} rows in the checkpoint, but the vocabulary has {shard.vocab_size} "
                f"and this rank {shard.shard_size} of them ({shard.layout}). Load whole tables of this vocabulary."
            )
