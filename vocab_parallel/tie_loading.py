"""What keeps a tie through `load_state_dict`, deep copies and assignments; and what keeps the untied apart."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from vocab_parallel.errors import TyingError


class Tie:
    """The modules that share one Parameter. It hangs on each of them, so a deep copy of the model copies it too.

    Attributes:
        modules: Those that use the Parameter, the embedding that it comes from first.
        names: What to call their weights where no model is at hand.
    """

    def __init__(self, embedding: nn.Module) -> None:
        self.modules: list[nn.Module] = []
        self.names: list[str] = []
        self.visited: set[int] = set()  # by the load in progress
        self.loaded: dict[str, Tensor] = {}  # what it has brought, by key
        self.join(embedding, "embedding.weight")

    @property
    def embedding(self) -> nn.Module:
        return self.modules[0]

    def join(self, module: nn.Module, name: str) -> None:
        """Makes `module` one of the tie's; hooks keep what one of them is loaded with the weight of all."""
        former = tie_of(module)
        if former is self:
            return
        if former is None:
            module.register_load_state_dict_pre_hook(_before_load)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_post_hook(_after_load)  # type: ignore[no-untyped-call]
        else:
            at = former.modules.index(module)
            del former.modules[at], former.names[at]
        module.__dict__["_tie"] = self  # past nn.Module, which would make children of the tie's modules
        self.modules.append(module)
        self.names.append(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tie:
        twin = object.__new__(Tie)
        memo[id(self)] = twin
        twin.__dict__.update(copy.deepcopy(self.__dict__, memo))
        weight = memo.get(id(self.embedding.weight))  # modules come back without attributes while they are copied
        if isinstance(weight, nn.Parameter):
            mark(weight)  # a copied Parameter loses its attributes
        return twin


def tie_of(module: nn.Module) -> Tie | None:
    """The tie that a module belongs to."""
    tie: Tie | None = module.__dict__.get("_tie")
    return tie


def mark(weight: nn.Parameter) -> None:
    """For Megatron: what `.grad` holds belongs to `main_grad` too."""
    weight.zero_out_wgrad = True  # type: ignore[attr-defined]


def own_storage(module: nn.Module, state: dict[str, Any], prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    """A hook before loads of a head: with `assign=True` one that is not tied takes a copy of its tensor.

    A checkpoint of a tied model may hold one tensor under both keys. Assigned to both modules it would tie their values
    without making them one Parameter.
    """
    given = state.get(f"{prefix}weight")
    if metadata.get("assign_to_params_buffers", False) and tie_of(module) is None and isinstance(given, Tensor):
        state[f"{prefix}weight"] = given.detach().clone()


def _before_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Refuses a checkpoint with two different tensors for one Parameter; the last one would win silently."""
    tie = tie_of(module)
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
    tie = tie_of(module)
    assert tie is not None
    weight = module.weight
    assert isinstance(weight, nn.Parameter)
    mark(weight)
    for other in tie.modules:
        if other.weight is not weight:
            other.weight = weight
