"""What any code does, seen without its help: at PyTorch's dispatcher, where every operator and collective passes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By operator of `c10d` (what torch.distributed calls) and `_c10d_functional` (what DTensor calls): the kind, and which
# argument is sent.
_OPERATORS = {
    "c10d": {
        "allreduce_": ("all_reduce", 0),
        "allreduce_coalesced_": ("all_reduce", 0),
        "_allgather_base_": ("all_gather", 1),
        "allgather_": ("all_gather", 1),
        "allgather_coalesced_": ("all_gather", 1),
        "allgather_into_tensor_coalesced_": ("all_gather", 1),
        "_reduce_scatter_base_": ("reduce_scatter", 1),
        "reduce_scatter_": ("reduce_scatter", 1),
        "reduce_scatter_tensor_coalesced_": ("reduce_scatter", 1),
        "alltoall_base_": ("all_to_all", 1),
    },
    "_c10d_functional": {
        "all_reduce": ("all_reduce", 0),
        "all_reduce_": ("all_reduce", 0),
        "all_reduce_coalesced": ("all_reduce", 0),
        "all_reduce_coalesced_": ("all_reduce", 0),
        "all_gather_into_tensor": ("all_gather", 0),
        "all_gather_into_tensor_out": ("all_gather", 0),
        "all_gather_into_tensor_coalesced": ("all_gather", 0),
        "reduce_scatter_tensor": ("reduce_scatter", 0),
        "reduce_scatter_tensor_out": ("reduce_scatter", 0),
        "reduce_scatter_tensor_coalesced": ("reduce_scatter", 0),
        "all_to_all_single": ("all_to_all", 0),
    },
}
_NO_COLLECTIVES = {"wait_tensor", "_wrap_tensor_autograd", "check_for_nan"}


class CollectiveCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on: how many collectives this process issued, and how many bytes it sent.

    Args:
        ranks: Of every group that is used.

    Attributes:
        calls: By kind: all_reduce, all_gather, reduce_scatter, all_to_all, other.
        bytes: By kind, as a ring algorithm sends them: for `b` bytes a rank, `2 b (n - 1) / n`, `b (n - 1)`,
            `b (n - 1) / n`, the same for all_to_all; what is sent once, for "other".
    """

    def __init__(self, ranks: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ranks = ranks
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _takes_apart(types):
            return NotImplemented
        namespace, _, name = func._schema.name.partition("::")
        if namespace in _OPERATORS and name not in _NO_COLLECTIVES:
            kind, argument = _OPERATORS[namespace].get(name, ("other", 0))
            self._add(kind, args[argument])
        return func(*args, **(kwargs or {}))

    def _add(self, kind: str, payload: Any) -> None:
        sent = sum(tensor.nbytes for tensor in tree_leaves(payload) if isinstance(tensor, Tensor))
        others = self._ranks - 1
        self.calls[kind] += 1
        if kind == "all_reduce":
            sent = 2 * sent * others // self._ranks
        elif kind == "all_gather":
            sent *= others
        elif kind in ("reduce_scatter", "all_to_all"):
            sent = sent * others // self._ranks
        self.bytes[kind] += sent


class ProjectionRows(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on: into how many rows the hidden states are cut.

    Args:
        depth: Width of the hidden states.
        columns: Rows of this rank's head.

    Attributes:
        rows: Of the first matrix product of hidden states with the whole of this rank's head; None if there was none.
    """

    def __init__(self, depth: int, columns: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._head = (depth, columns)
        self.rows: int | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _takes_apart(types):
            return NotImplemented
        if self.rows is None and func._schema.name in ("aten::mm", "aten::addmm"):
            left, right = args[-2:]
            if tuple(right.shape) == self._head:
                self.rows = len(left)
        return func(*args, **(kwargs or {}))


def _takes_apart(types: Any) -> bool:
    """Whether a tensor subclass first has to take the operator apart, into operators that come here again."""
    return any(kind.__torch_dispatch__ is not Tensor.__torch_dispatch__ for kind in types)
