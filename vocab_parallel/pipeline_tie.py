"""A tied weight under pipeline parallelism: one copy on the first stage, one on the last, kept the same bits.

No Parameter can be one object in two processes. So the copies start equal, add up their gradients once a step, follow
the same optimizer rule, count once in the norm, and are checked.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vocab_parallel.agreement import Exchange, checksum
from vocab_parallel.collectives import all_reduce_
from vocab_parallel.errors import TyingError
from vocab_parallel.headers import signature
from vocab_parallel.shard import RankGroup

_WORDS = 256  # bytes in which a rank describes its copy
_BLOCK = 1 << 20  # elements whose checksum is formed at once


class PipelineTie:
    """The copies of one tied weight on the pipeline stages that use it.

    Under data parallelism the exchange is a sum over stages and the data-parallel reduction a sum (or mean) over other
    ranks: they commute. So `reduce_gradients` may come before or after it, on all data-parallel ranks alike. With a
    distributed optimizer, whose reduction leaves each rank a part of the gradient, it must come before.

    Args:
        weight: This rank's copy, `[shard_size, D]`; None on the stages between.
        group: The ranks that hold copies of these rows, in the order of their stages; None on the stages between.
            `verify`, `start` and `reduce_gradients` then do nothing.
        names: What to call the copies of the first and the last stage in an error.
        stages: Number of stages, for errors.

    Attributes:
        is_first: Whether this rank holds the first copy, the one that counts in the gradient norm.
        traffic: Counts of what the ties' collectives have sent.

    Raises:
        TyingError: A weight without a group, or the reverse.
    """

    def __init__(
        self,
        weight: nn.Parameter | None,
        group: dist.ProcessGroup | None,
        *,
        names: tuple[str, str] = ("embedding.weight", "lm_head.weight"),
        stages: int | None = None,
    ) -> None:
        last = "the last stage" if stages is None else f"stage {stages - 1}"
        self.names = f"{names[0]} on stage 0", f"{names[1]} on {last}"
        if (weight is None) != (group is None):
            raise TyingError(
                f"{self.names[0]} and {self.names[1]} are copies: a rank that holds one gives its weight and the group "
                f"of the ranks with copies, any other rank neither. This one gave only the "
                f"{'group' if weight is None else 'weight'}."
            )
        self.weight = weight
        self._group = RankGroup(group, deferred_errors=False)
        self.is_first = weight is not None and self._group.rank == 0
        self.traffic = self._group.traffic

    @torch.no_grad()
    def start(self) -> None:
        """Gives every copy the bits of the first, and marks the others `shared`, which the gradient norm leaves out.

        Before the optimizer is built.

        Collectives:
            An all-gather of 320 bytes, one all-reduce of the weight.

        Raises:
            TyingError: The copies differ in shape or dtype; on every rank of the group.
        """
        if self.weight is None or self._group.size == 1:
            return
        described = f"{list(self.weight.shape)} {self.weight.dtype}"
        encoded = described.encode()[:_WORDS].ljust(_WORDS, b"\0")
        sent = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(self.weight.device)
        gathered = Exchange(self._group, "select", "PipelineTie.start", payload=sent).wait()
        words = [bytes(row.tolist()).rstrip(b"\0").decode() for row in gathered.cpu()]
        if any(other != words[0] for other in words):
            raise TyingError(
                f"{self.names[0]} and {self.names[1]} cannot be copies of one weight: {' and '.join(words)}. Build "
                "both stages from one layout, width and dtype."
            )
        rows = self.weight.detach().contiguous()
        bits = rows.view(-1).view(torch.uint8)
        bits = bits if self.is_first else torch.zeros_like(bits)
        all_reduce_(self._group, bits).wait()  # of bytes, to which the others add nothing: exact for -0.0 and NaN too
        if not self.is_first:
            self.weight.copy_(bits.view(rows.dtype).view(rows.shape))
            self.weight.shared = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def reduce_gradients(self) -> None:
        """Adds up the copies' gradients: `main_grad` where the weight has one, else `grad`, made if it is None.

        Once a step, after the last backward, on every rank with a copy.

        Collectives:
            One all-reduce of the gradient.
        """
        if self.weight is None or self._group.size == 1:
            return
        gradient = getattr(self.weight, "main_grad", None)
        if not isinstance(gradient, Tensor):
            if self.weight.grad is None:
                self.weight.grad = torch.zeros_like(self.weight)
            gradient = self.weight.grad
        whole = gradient.contiguous()
        all_reduce_(self._group, whole).wait()
        if whole is not gradient:
            gradient.copy_(whole)

    @torch.no_grad()
    def verify(self, optimizer: Any = None) -> None:
        """Proves that the copies are the same bits.

        Args:
            optimizer: If given (anything with `param_groups`), it must hold the copy exactly once, with the same
                settings on every stage.

        Collectives:
            An all-gather of some 600 bytes.

        Raises:
            TyingError: Naming both copies; on every rank of the group, though only one may have seen it.
        """
        if self.weight is None or self._group.size == 1:
            return
        fault = self._fault(optimizer)
        rule = signature(self._rule(optimizer)) if fault is None else 0
        sent = torch.stack([bits_checksum(self.weight), torch.tensor(rule, device=self.weight.device)])
        seen = Exchange(self._group, "select", "PipelineTie.verify", payload=sent, fault=fault).wait().tolist()
        both = f"{self.names[0]} and {self.names[1]}"
        if any(bits != seen[0][0] for bits, _ in seen):
            raise TyingError(
                f"{both} are copies of one weight but hold different bits. Likely one was loaded or changed by itself, "
                "start was not called, or a step came without reduce_gradients. Load both and call start again."
            )
        if any(settings != seen[0][1] for _, settings in seen):
            raise TyingError(
                f"{both} are copies of one weight, but their optimizers have other settings, so they will drift apart. "
                "Give both the same learning rate, weight decay and other options."
            )

    def _fault(self, optimizer: Any) -> Exception | None:
        """What is wrong on this rank alone."""
        mine = self.names[0 if self.is_first else 1]
        if not self.is_first and not getattr(self.weight, "shared", False):
            return TyingError(
                f"{mine} is a copy of {self.names[0]} but is not marked `shared`, so it would count twice in the "
                "gradient norm. Call start; a weight that was replaced later needs it again."
            )
        if optimizer is None:
            return None
        count = sum(p is self.weight for group in optimizer.param_groups for p in group["params"])
        if count == 1:
            return None
        return TyingError(
            f"the optimizer holds {mine}, a copy of {self.names[1 if self.is_first else 0]}, {count} times, expected "
            "once. Build it from the model's parameters, after start."
        )

    def _rule(self, optimizer: Any) -> str:
        """The settings under which the optimizer holds the copy."""
        if optimizer is None:
            return ""
        own = next(g for g in optimizer.param_groups if any(p is self.weight for p in g["params"]))
        settings = sorted((str(key), value) for key, value in own.items() if isinstance(value, float | int | tuple))
        return f"{type(optimizer).__name__} {settings}"


def bits_checksum(tensor: Tensor) -> Tensor:
    """Order-sensitive sum of a tensor's bits: an int64 scalar on its device (no synchronisation)."""
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    flat = tensor.detach().contiguous().view(-1).view(integer)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for block in torch.split(flat, _BLOCK):  # as int64 a block takes many times its size
        total = total * 1_000_003 + checksum(block)
    return total
