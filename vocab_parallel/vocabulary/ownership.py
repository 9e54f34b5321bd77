"""Which vocabulary an optimizer's state is of: a mark that rides in its groups, and the proof that it fits the model.

After a migration a state from before it may have the right shapes and the wrong rows (a permutation). So the groups
that hold the vocabulary's parameters carry the hash of its ordered table, which `state_dict` keeps, and the model
remembers it. Models and optimizers that were never migrated carry nothing and are asked for nothing.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vocab_parallel.errors import CheckpointLayoutError, TyingError
from vocab_parallel.vocabulary.row_states import is_known_other, is_row_state

GROUP_KEY = "vocabulary_sha256"  # of a param_group
_MODULE_KEY = "_vocabulary_mark"
_REPLACED = "_replaced_by_migration"  # of a Parameter
_FIX = (
    "Go on with the optimizer that was migrated with the model, or load a state saved after the migration; a saved "
    "checkpoint from before it moves by python -m vocab_parallel migrate CHECKPOINT TARGET --map FILE."
)


@dataclass(frozen=True)
class Mark:
    """What a migrated model remembers.

    Attributes:
        sha256: Of the ordered table, or if that is not known of the maps that led to it.
        had_state: An optimizer was migrated with it, and had state.
    """

    sha256: str
    had_state: bool


def verify_ownership(model: nn.Module, optimizer: Any, *, names: dict[int, str] | None = None) -> None:
    """Proves that an optimizer's state is of the vocabulary that the model has now.

    Of a model that was migrated: each vocabulary Parameter is in the optimizer's groups once at most, neither groups
    nor states are of Parameters that are gone, states have as many rows as their Parameter. If it was migrated
    together with an optimizer's state, the optimizer is that one, or has loaded a state from after the migration: it
    is not a fresh one, and its state is not an older one.

    Args:
        optimizer: Anything with `param_groups`, and `state` if it has one.
        names: Names of parameters by identity, if not those of `model`.

    Raises:
        TyingError: Parameters or states that do not fit together, or a fresh optimizer.
        CheckpointLayoutError: A state of another vocabulary. On this rank: what it looks at is the same on all.
    """
    names = names or {id(parameter): name for name, parameter in model.named_parameters()}
    marks = {id(parameter): mark for module in model.modules() if (mark := mark_of(module)) is not None
             for parameter in module.parameters(recurse=False)}  # fmt: skip
    seen: set[int] = set()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _require_current(parameter)
            if id(parameter) in seen and id(parameter) in marks:
                raise TyingError(f"the optimizer holds {names.get(id(parameter), 'a Parameter')} twice")
            seen.add(id(parameter))
            mark = marks.get(id(parameter))
            if mark is not None and mark.had_state:
                _verify_mark(names.get(id(parameter), "a Parameter"), mark, group.get(GROUP_KEY))
    for parameter, values in (getattr(optimizer, "state", None) or {}).items():
        if not isinstance(parameter, Tensor) or not isinstance(values, dict):
            continue
        if id(parameter) not in seen and id(parameter) not in names and marks:
            raise TyingError(
                f"the optimizer keeps state of a Parameter {list(parameter.shape)} that is neither in its groups nor "
                "in the model, likely one from before a migration. " + _FIX
            )
        for key, value in values.items():
            if id(parameter) in marks and _other_rows(key, value, parameter):
                raise CheckpointLayoutError(
                    f"the optimizer's {key} of {names.get(id(parameter), 'a Parameter')} has shape "
                    f"{list(value.shape)}, the Parameter has {list(parameter.shape)}: the state is of another "
                    "vocabulary or layout. " + _FIX
                )


def mark_of(module: nn.Module) -> Mark | None:
    """What a migration left on a module with rows of the vocabulary."""
    mark: Mark | None = module.__dict__.get(_MODULE_KEY)
    return mark


def set_mark(module: nn.Module, mark: Mark) -> None:
    """Leaves a mark; it is copied with the module and is no part of its state."""
    module.__dict__[_MODULE_KEY] = mark


def mark_replaced(parameter: nn.Parameter) -> None:
    """Says of an old Parameter that the model has a new one in its place."""
    setattr(parameter, _REPLACED, True)


def mark_groups(optimizer: Any, parameters: set[int], sha256: str) -> None:
    """Marks the groups with one of these Parameters (by identity); from now on a load of other state is refused."""
    for group in optimizer.param_groups:
        if any(id(parameter) in parameters for parameter in group["params"]):
            group[GROUP_KEY] = sha256
    if all(hook is not _before_load for hook in optimizer._optimizer_load_state_dict_pre_hooks.values()):
        optimizer.register_load_state_dict_pre_hook(_before_load)


def guard_steps(parameters: Iterable[nn.Parameter], mark: Mark) -> None:
    """Refuses the step of any optimizer over these Parameters that does not carry the mark, as long as they live.

    An optimizer built after the migration can load a state from before it unseen, in the right shapes and with the
    wrong rows. It must come by here before it changes anything. So must one that was left out of the migration: its
    steps would change nothing that the model has. A migration without state asks a fresh optimizer for none.
    """
    watched = {id(parameter): weakref.ref(parameter) for parameter in parameters if mark.had_state}

    def before_step(optimizer: Any, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                _require_current(parameter)
            if group.get(GROUP_KEY) == mark.sha256:
                continue
            for parameter in group["params"]:
                alive = watched[id(parameter)]() if id(parameter) in watched else None
                if alive is not None and alive is parameter:
                    name = f"a Parameter {list(alive.shape)} of the vocabulary"
                    _verify_mark(name, mark, group.get(GROUP_KEY))

    register_optimizer_step_pre_hook(before_step)


def _before_load(optimizer: Any, state_dict: dict[str, Any]) -> None:
    """A hook before loads: refuses a state of another vocabulary or layout, before anything changes."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=False):
        if GROUP_KEY not in group:
            continue
        if saved.get(GROUP_KEY) != group[GROUP_KEY]:
            raise CheckpointLayoutError(
                f"this optimizer's state is of the vocabulary {_short(group[GROUP_KEY])}, the one to load is of "
                f"{_short(saved.get(GROUP_KEY))}: its rows are those of other tokens, whatever their number. " + _FIX
            )
        for number, parameter in zip(saved["params"], group["params"], strict=False):
            for key, value in state_dict["state"].get(number, {}).items():
                if _other_rows(key, value, parameter):
                    raise CheckpointLayoutError(
                        f"the state to load has {key} of shape {list(value.shape)} for a Parameter of shape "
                        f"{list(parameter.shape)}: it is of another vocabulary or layout. " + _FIX
                    )


def _require_current(parameter: Any) -> None:
    if getattr(parameter, _REPLACED, False):
        raise TyingError(
            f"the optimizer holds a Parameter {list(parameter.shape)} that a migration has replaced: it would "
            "go on updating an orphan. Pass every optimizer to migrate_model_, or build it after."
        )


def _verify_mark(name: str, mark: Mark, found: str | None) -> None:
    if found == mark.sha256:
        return
    if found is None:
        raise TyingError(
            f"{name} was migrated to the vocabulary {_short(mark.sha256)} together with its optimizer's state, but "
            "this optimizer does not carry that state: it is a fresh one, or has loaded a state from before the "
            "migration. " + _FIX + " Where a fresh optimizer is meant, migrate the model with optimizer None."
        )
    raise CheckpointLayoutError(
        f"{name} is of the vocabulary {_short(mark.sha256)}, this optimizer's state of {_short(found)}. " + _FIX
    )


def _other_rows(key: Any, value: Any, parameter: Tensor) -> bool:
    """Whether a state is neither of the rows of its Parameter nor one that no migration touches."""
    if not isinstance(value, Tensor):
        return False
    return not is_row_state(str(key), value.shape, parameter.shape) and not is_known_other(str(key), value.shape)


def _short(sha256: str | None) -> str:
    return "before any migration" if sha256 is None else f"sha256 {sha256[:16]}…"
