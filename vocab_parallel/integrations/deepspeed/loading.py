"""A checkpoint of ours into a DeepSpeed engine, at any ZeRO stage, TP size, padding and number of replicas."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.agreement import capture
from vocab_parallel.checkpoint.files import StoredCheckpoint, open_checkpoint
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed.checks import agree, parameter_groups, verify_tied
from vocab_parallel.integrations.deepspeed.universal import layout_of
from vocab_parallel.shard import VocabShard
from vocab_parallel.tying import vocab_parameters
from vocab_parallel.vocabulary.row_states import is_master_weight

# The flat masters of stage 3, of 1 and 2, and of the bfloat16 optimizer of stage 1.
_FLATS = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")


@torch.no_grad()
def load_ours(engine: Any, folder: str | os.PathLike[str], *, verify: bool = True) -> int:
    """Loads weights, masters, the optimizer's elementwise state and its count of steps into an engine, in place.

    Args:
        engine: Of `initialize`, stage 1, 2 or 3, with the optimizer that the checkpoint has the state of.
        folder: A checkpoint, of `save_checkpoint`, `from_deepspeed` or another conversion. Its learning rate and other
            settings are the engine's.
        verify: Whether the first rank compares the files with their hashes before anything changes.

    Returns:
        The checkpoint's step, which the engine's `global_steps` becomes.

    Collectives:
        Four all-gathers of 64 bytes over the world.

    Memory:
        Two whole local parameters in float32 at a time. Every value is read twice, the first time to see that it can.

    Raises:
        CheckpointLayoutError: On every rank, before anything changes: a damaged checkpoint, other names, shapes or
            ties, a state that one of both does not have; an engine of stage 0.
        TyingError: A tie does not hold afterwards.
    """
    plan: list[_Plan] = []

    def prepare() -> None:
        plan.append(_Plan(engine, open_checkpoint(folder), verify))
        plan[0].rehearse()

    agree("deepspeed.load_ours", capture(prepare))
    agree("deepspeed.load_ours", capture(plan[0].load))
    verify_tied(engine)
    return plan[0].stored.step


class _Plan:
    """What goes where; made and checked before anything changes."""

    def __init__(self, engine: Any, stored: StoredCheckpoint, verify: bool) -> None:
        self.engine, self.stored, self.model = engine, stored, engine.module
        self.parameters = dict(self.model.named_parameters())
        self.tables = {name: shard for name, (_, shard) in vocab_parameters(self.model).items()}
        if not self.tables:
            raise CheckpointLayoutError("the engine's model has no vocabulary-parallel table: build it with initialize")
        self.tp_size = self._shard.tp_size
        self.base: Any = getattr(engine.optimizer, "optimizer", None)
        if engine.zero_optimization_stage() == 0 or self.base is None:
            raise CheckpointLayoutError(
                "the engine has no ZeRO stage: load into its module and its optimizer with "
                "vocab_parallel.checkpoint.load_checkpoint before initialize"
            )
        if verify and dist.get_rank() == 0:
            stored.verify()
        self._check_ties()
        trained = [name for name, parameter in self.parameters.items() if parameter.requires_grad]
        self.names, self.steps = _kept_states(stored, trained)
        for name, parameter in self.parameters.items():
            self._check(f"model.{name}", name, parameter)
            for state in self.names if parameter.requires_grad else ():
                self._check(f"optimizer.{name}.{state}", name, parameter)
        for name, buffer in self._buffers():
            self._check(f"model.{name}", name, buffer)
        self._check_left_over(trained)

    def rehearse(self) -> None:
        """Reads every value of this rank and keeps none: a file that fails does so before anything changes."""
        for name, parameter in self.parameters.items():
            keys = [f"model.{name}"]
            if parameter.requires_grad:
                keys += [f"optimizer.{name}.{state}" for state in ("master_weight", *self.names)]
            for key in keys:
                if key in self.stored.tensors:
                    self.local(key, name)
        for name, _ in self._buffers():
            self.stored.read(f"model.{name}")

    def load(self) -> None:
        """Reads and sets every value of this rank."""
        import deepspeed

        self._make_states()
        for name, parameter in self.parameters.items():
            key = f"optimizer.{name}.master_weight"
            master = self.local(key if key in self.stored.tensors else f"model.{name}", name)
            is_own = self.stored.tensors[f"model.{name}"][0] == parameter.dtype
            _set_weight(parameter, self.local(f"model.{name}", name) if is_own else master)
            if not parameter.requires_grad:
                continue
            if hasattr(parameter, "ds_id"):
                deepspeed.utils.safe_set_local_fp32_param(parameter, _partition(parameter, master.float()))
            else:
                deepspeed.utils.safe_set_full_fp32_param(parameter, master.float())
            for state in self.names:
                value = self.local(f"optimizer.{name}.{state}", name).float()
                if hasattr(parameter, "ds_id"):
                    part = _partition(parameter, value)
                    deepspeed.utils.safe_set_local_optimizer_state(parameter, part, state)
                else:
                    self._set_fragment(parameter, state, value.reshape(-1))
        for name, buffer in self._buffers():
            buffer.copy_(self.stored.read(f"model.{name}"))
        self.engine.global_steps = self.stored.step

    @property
    def flats(self) -> list[Tensor]:
        """The flat master weights of this rank, which the base optimizer updates."""
        found = (getattr(self.engine.optimizer, name, None) for name in _FLATS)
        return list(next(flats for flats in found if flats is not None))

    def _make_states(self) -> None:
        """The base optimizer makes its state at its first step, so that a fresh one has none to fill."""
        group = self.base.param_groups[0]
        for flat in self.flats:
            state = self.base.state[flat]
            for name in self.names:
                state.setdefault(name, torch.zeros_like(flat))
            if self.steps is None:
                continue
            if type(self.base).__module__.startswith("torch."):
                on = flat.device if group.get("fused") or group.get("capturable") else torch.device("cpu")
                state["step"] = torch.tensor(self.steps, device=on)
            elif "step" not in group:
                state["step"] = int(self.steps)
        for group in self.base.param_groups:
            if "step" in group and self.steps is not None:
                group["step"] = int(self.steps)

    def _set_fragment(self, parameter: nn.Parameter, state: str, value: Tensor) -> None:
        """The part of a parameter's state that lies in this rank's partition, stages 1 and 2."""
        mapping = vars(parameter)["_hp_mapping"]
        if mapping is None:
            return
        (index,) = (at for at, group in enumerate(parameter_groups(self.engine.optimizer)) if _holds(group, parameter))
        there, here = mapping.hp_fragment_address, mapping.lp_fragment_address
        flat = self.base.state[self.flats[index]][state]
        flat[there.start : there.start + there.numel] = value[here.start : here.start + here.numel]

    def local(self, key: str, name: str) -> Tensor:
        """This tensor-parallel rank's part of a stored tensor, padding rows zero."""
        shard, parameter = self.tables.get(name), self.parameters[name]
        if shard is not None:
            rows = self.stored.read(key, min(shard.start, shard.vocab_size), min(shard.stop, shard.vocab_size))
            return torch.cat([rows, rows.new_zeros(shard.shard_size - len(rows), *rows.shape[1:])])
        whole, dim = self.stored.read(key), self._dim(parameter)
        return whole if dim is None else whole.chunk(self.tp_size, dim)[self._shard.rank].contiguous()

    @property
    def _shard(self) -> VocabShard:
        return next(iter(self.tables.values()))

    def _dim(self, parameter: Tensor) -> int | None:
        """The dimension that another parameter than the vocabulary's is cut over."""
        marked = self.tp_size > 1 and getattr(parameter, "tensor_model_parallel", False)
        return int(getattr(parameter, "partition_dim", 0)) if marked else None

    def _check(self, key: str, name: str, parameter: Tensor) -> None:
        shape = list(getattr(parameter, "ds_shape", parameter.shape))
        if name in self.tables:
            shape[0] = self.tables[name].vocab_size
        elif (dim := self._dim(parameter)) is not None:
            shape[dim] *= self.tp_size
        there = list(self.stored.tensors[key][1]) if key in self.stored.tensors else None
        if there != shape:
            raise CheckpointLayoutError(
                f"{self.stored.path} has {key} "
                + (f"of shape {there}" if there is not None else "not at all")
                + f", the engine needs {shape}"
                + ("" if key.startswith("model.") else ": it was saved without this optimizer's state")
            )

    def _check_left_over(self, trained: list[str]) -> None:
        """Whether the engine takes all that the checkpoint has."""
        takes = {"model": set(self.model.state_dict()), "optimizer": set(trained)}
        for key in self.stored.tensors:
            kind, _, name = key.partition(".")
            name = name if kind == "model" else name.rpartition(".")[0]
            if name not in takes.get(kind, ()) and not (kind == "optimizer" and is_master_weight(key)):
                what = "parameter or buffer" if kind == "model" else "trained parameter"
                raise CheckpointLayoutError(
                    f"{self.stored.path} has {key}, the engine's model no {what} of that name: it was saved of another "
                    "model. Build the engine with the model that it was saved of"
                )

    def _check_ties(self) -> None:
        mine, theirs = layout_of(self.model)["aliases"], self.stored.state["ties"]
        if mine != theirs:
            raise CheckpointLayoutError(
                f"{self.stored.path} was saved with the ties {theirs or 'none'}, the engine's model has "
                f'{mine or "none"}. Load it with load_checkpoint(..., tie="untie") before initialize, or tie alike'
            )

    def _buffers(self) -> list[tuple[str, Tensor]]:
        names = set(self.model.state_dict())
        return [(name, buffer) for name, buffer in self.model.named_buffers() if name in names]


def _kept_states(stored: StoredCheckpoint, names: list[str]) -> tuple[list[str], float | None]:
    """The elementwise states that the checkpoint has of every trained parameter, and the steps."""
    of_each: dict[str, set[str]] = {name: set() for name in names}
    for key in stored.tensors:
        owner, _, state = key.removeprefix("optimizer.").rpartition(".")
        if key.startswith("optimizer.") and owner in of_each:
            of_each[owner].add(state)
    kept = set().union(*of_each.values()) - {"step", "master_weight"}
    if not kept:
        raise CheckpointLayoutError(
            f"{stored.path} has no optimizer state: load its weights with load_checkpoint before initialize"
        )
    numbers = stored.state["scalars"]
    steps = {float(stored.read(key)) for n in names if (key := f"optimizer.{n}.step") in stored.tensors}
    steps |= {float(numbers[key]) for n in names if (key := f"optimizer.{n}.step") in numbers}
    if len(steps) > 1:
        raise CheckpointLayoutError(
            f"{stored.path} counts different steps of its parameters ({sorted(steps)}); DeepSpeed has one for all"
        )
    if not steps and "exp_avg_sq" in kept:
        raise CheckpointLayoutError(
            f"{stored.path} has exp_avg_sq without a count of steps: Adam would take its moments for those of a first "
            "step. Load its weights alone, with load_checkpoint before initialize"
        )
    return sorted(kept), steps.pop() if steps else None


def _holds(group: list[nn.Parameter], parameter: nn.Parameter) -> bool:
    return any(one is parameter for one in group)


def _partition(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This data-parallel rank's part of a parameter of stage 3, padding zero."""
    tensor = vars(parameter)["ds_tensor"]
    share, rank = tensor.ds_numel, dist.get_rank(vars(parameter)["ds_process_group"])
    flat = value.reshape(-1)[rank * share : (rank + 1) * share]
    return torch.cat([flat, flat.new_zeros(share - len(flat))])


def _set_weight(parameter: nn.Parameter, value: Tensor) -> None:
    if not hasattr(parameter, "ds_id"):
        parameter.copy_(value)
        return
    vars(parameter)["ds_tensor"].copy_(_partition(parameter, value))
    if parameter.numel() == value.numel():  # gathered, as small ones always are
        parameter.copy_(value)
