"""Tied weights: one Parameter with two uses, kept one and proved one.

One object means one gradient buffer with both contributions, one set of optimizer moments, one term in the gradient
norm and one key in a checkpoint. Two Parameters on one storage look tied and are not: optimizers and loaders treat
them apart.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.errors import TyingError
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.shard import VocabShard


def tie_weights(
    embedding: VocabParallelEmbedding, lm_head: VocabParallelLMHead, *, optimizer: torch.optim.Optimizer | None = None
) -> None:
    """Makes `embedding.weight` the head's weight too. Before the optimizer is built.

    Sets `zero_out_wgrad` on the Parameter. Where Megatron's data-parallel wrapper gives it a float32 `main_grad`, the
    head's loss adds to that by itself; the lookup's gradient comes in `.grad`, which the wrapper adds only where it
    finds this mark.

    A later `load_state_dict` (also with `assign=True`, also with one of the two keys) keeps the two tied, and refuses a
    checkpoint whose two tensors differ.

    Args:
        optimizer: An optimizer that exists already, to be checked: it must not hold the head's own weight.

    Raises:
        TyingError: The two are over different layouts or groups, or differ in shape, dtype or device; or the optimizer
            holds a Parameter that the tie would orphan.
    """
    source, own = embedding.weight, lm_head.weight
    if embedding.shard.layout != lm_head.shard.layout or embedding.shard.group != lm_head.shard.group:
        raise TyingError(
            f"cannot tie embedding.weight over {embedding.shard} and lm_head.weight over {lm_head.shard}: a tie "
            "needs the same ids on the same ranks. Build both from one VocabShard."
        )
    if source.shape != own.shape or source.dtype != own.dtype or source.device != own.device:
        raise TyingError(
            f"cannot tie embedding.weight {_words(source)} and lm_head.weight {_words(own)}: they must agree in "
            "shape, dtype and device."
        )
    if optimizer is not None and own is not source and _count(optimizer, own):
        raise TyingError(
            "the optimizer holds lm_head.weight as a Parameter of its own, apart from embedding.weight: it was "
            "built before the tie and would go on updating an orphan. Call tie_weights first, then build the optimizer."
        )
    lm_head.weight = source
    _mark(source)
    _join(_tie_of(embedding) or _Tie(embedding), lm_head)


def verify_tied(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[tuple[str, str]]:
    """Proves that every tie in `model` still holds. Call it after construction, after the optimizer, after each load.

    Args:
        optimizer: If given, it must hold each tied Parameter exactly once, and none that the model no longer has.

    Returns:
        The tied pairs by their qualified names (embedding weight, head weight).

    Raises:
        TyingError: Naming both parameters; or no tie was ever made.
    """
    names = {id(module): f"{name}.weight" if name else "weight" for name, module in model.named_modules()}
    heads = [module for module in model.modules() if isinstance(module, VocabParallelLMHead)]
    tied = [(tie.embedding, head) for head in heads if (tie := _tie_of(head)) is not None]
    if not tied:
        raise TyingError(f"no tied head in {type(model).__name__}: call tie_weights(embedding, lm_head) first.")
    pairs = []
    for embedding, head in tied:
        pair = (names.get(id(embedding), "embedding.weight"), names[id(head)])
        if embedding.weight is not head.weight:
            one_storage = _storage(embedding.weight) == _storage(head.weight) != 0
            raise TyingError(
                f"{pair[0]} and {pair[1]} are no longer one Parameter"
                + (" though they share storage: optimizers see two" if one_storage else "")
                + ". Something replaced one of them (to_empty, assignment of new Parameters, a copy). Call "
                "tie_weights again before the optimizer is built."
            )
        if optimizer is not None:
            _verify_optimizer(model, optimizer, embedding.weight, pair)
        pairs.append(pair)
    return pairs


def vocab_parameters(model: nn.Module) -> dict[str, tuple[nn.Parameter, VocabShard]]:
    """The parameters sharded over the vocabulary, with their shard, each once (a tied one under its first name)."""
    shards: dict[int, VocabShard] = {}
    for module in model.modules():
        if isinstance(module, VocabParallelEmbedding | VocabParallelLMHead):
            shards.update((id(parameter), module.shard) for parameter in module.parameters(recurse=False))
    return {name: (p, shards[id(p)]) for name, p in model.named_parameters() if id(p) in shards}


def _verify_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, weight: nn.Parameter, pair: tuple[str, str]
) -> None:
    count = _count(optimizer, weight)
    if count != 1:
        raise TyingError(
            f"the optimizer holds the tied Parameter {pair[0]} = {pair[1]} {count} times, expected once. "
            + (
                "Build the optimizer after tie_weights."
                if count == 0
                else "Give it model.parameters(), which lists a tied one once."
            )
        )
    known = {id(parameter) for parameter in model.parameters()}
    orphans = [_words(p) for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if orphans:
        raise TyingError(
            f"the optimizer holds Parameters that the model no longer has ({', '.join(orphans)}), likely {pair[0]} "
            f"or {pair[1]} from before the tie. Build the optimizer after tie_weights."
        )


class _Tie:
    """The modules that share one Parameter. It hangs on each of them, so a deep copy of the model copies it too."""

    def __init__(self, embedding: VocabParallelEmbedding) -> None:
        self.embedding = embedding
        self.modules: list[nn.Module] = []
        self.visited: set[int] = set()  # by the load in progress
        self.loaded: dict[str, Tensor] = {}  # what it has brought, by key
        _join(self, embedding)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Tie:
        twin = object.__new__(_Tie)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        weight = memo.get(id(self.embedding.weight))  # modules come back without attributes while they are copied
        if isinstance(weight, nn.Parameter):
            _mark(weight)  # a copied Parameter loses its attributes
        return twin


def _join(tie: _Tie, module: nn.Module) -> None:
    """Makes `module` one of the tie's; hooks keep what one of them is loaded with the weight of all."""
    former = _tie_of(module)
    if former is tie:
        return
    if former is None:
        module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
        module.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]
    else:
        former.modules.remove(module)
    module.__dict__["_tie"] = tie  # past nn.Module, which would make children of the tie's modules
    tie.modules.append(module)


def _mark(weight: nn.Parameter) -> None:
    """For Megatron: what `.grad` holds belongs to `main_grad` too."""
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]


def _tie_of(module: nn.Module) -> _Tie | None:
    tie: _Tie | None = module.__dict__.get("_tie")
    return tie


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuses a checkpoint with two different tensors for one Parameter; the last one would win silently."""
    tie = _tie_of(module)
    assert tie is not None
    if id(module) in tie.visited or len(tie.visited) >= len(tie.modules):  # another load has begun
        tie.visited.clear()
        tie.loaded.clear()
    tie.visited.add(id(module))
    key = f"{prefix}weight"
    if key not in state:
        return
    for other, tensor in tie.loaded.items():
        if state[key] is not tensor and not torch.equal(state[key].to(tensor), tensor):
            raise TyingError(
                f"{other} and {key} are tied in the model, but the checkpoint holds two different tensors. Untie the "
                "model, or drop one of the two keys and load with strict=False."
            )
    tie.loaded[key] = state[key]
    if len(tie.visited) == len(tie.modules):
        tie.loaded.clear()  # or it would keep the checkpoint's tensors alive


def _after_load(module: nn.Module, *_: Any) -> None:
    """With `assign=True` the load has made a new Parameter: the others follow."""
    tie = _tie_of(module)
    assert tie is not None
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    _mark(weight)
    for other in tie.modules:
        if other.weight is not weight:
            other.weight = weight


def _count(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    return sum(p is parameter for group in optimizer.param_groups for p in group["params"])


def _storage(tensor: Tensor) -> int:
    return 0 if tensor.is_meta else tensor.untyped_storage().data_ptr()


def _words(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype} on {tensor.device}"
