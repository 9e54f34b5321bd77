"""Two data-parallel replicas of a sharded loss: the mean over the tokens of both, and its gradients."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from tests.fuzz.case import REPLICAS, Draw, FuzzCase
from tests.multirank.sharded import Case, call, local, unsharded, whole
from tests.tolerances import require_close, require_equal
from vocab_parallel import reference


@dataclass(frozen=True, repr=False)
class Replicas(FuzzCase):
    """`ranks` are those of both replicas, one after the other."""

    kind: ClassVar[str] = "replicas"
    ranks: tuple[int, ...] = (2, 0)
    case: Case = field(default_factory=lambda: Case("replica"))
    more_rows: int = 0  # of the second replica
    ignored: str = "some"  # of the second replica

    @classmethod
    def draw(cls, one: Draw) -> Replicas:
        function = one("cross_entropy", "cross_entropy", "kl_div", "row_loss")
        linear = function == "row_loss" or one(True, False)
        soft = function == "kl_div" or (function == "cross_entropy" and one.chance(0.2))
        options = {"temperature": one(1.0, 0.7), "softcap": one(None, 1.5)}
        if function == "cross_entropy":
            options |= {"z_loss": one(0.0, 0.1), "label_smoothing": one(0.0, 0.1)}
        case = Case(
            "replica", function=function, linear=linear, **one.layout(), leading=(one(1, 5, 8),), hidden=one(1, 5),
            bias=linear and one(True, False), chunk_size=one(None, 1, 2, 3) if linear else None,
            ignored=one("some", "none", "all"), soft=soft, weighted=function != "row_loss" and one(False, True),
            options={name: value for name, value in options.items() if one.chance(0.5)}, seed=one.seed(),
        )  # fmt: skip
        replicas = one(*REPLICAS)
        return cls(
            ranks=tuple(rank for replica in replicas for rank in replica), case=case, more_rows=one(0, 1, 4),
            ignored=one("some", "none", "all"),
        )  # fmt: skip

    @property
    def replicas(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        half = len(self.ranks) // 2
        return self.ranks[:half], self.ranks[half:]

    def replica(self, at: int) -> tuple[Case, dict[str, Tensor]]:
        """The same parameters, other rows."""
        if not at:
            return self.case, whole(self.case)
        rows = self.case.leading[0] + self.more_rows
        case = replace(self.case, leading=(rows,), ignored=self.ignored, seed=self.case.seed + 1)
        first = whole(self.case)
        return case, whole(case) | {name: first[name] for name in case.names[1:]}

    def run(self, place: Any) -> Any:
        half = len(self.ranks) // 2
        at, of_replica = divmod(place.rank, half)
        case, tensors = self.replica(at)
        pair = place.groups[REPLICAS[self.replicas][of_replica]]
        case = replace(case, options=case.options | {"mean_group": pair})
        mine_place = replace(place, ranks=self.replicas[at], rank=of_replica)
        shard = mine_place.shard(case.vocab, case.multiple_of)
        mine = local(case, tensors, shard)
        for name in case.names:
            mine[name].requires_grad_()
        with torch.no_grad():
            silent = call(case, mine, shard)
        loss = call(case, mine, shard)
        loss.backward()
        require_equal("loss without grad", [loss.detach(), silent])
        result = {"loss": loss.detach(), "d_input": mine["input"].grad / 2}
        if not case.linear:
            result["d_input"] = result["d_input"][:, : shard.num_valid]
        for name in case.names[1:]:
            dist.all_reduce(mine[name].grad, group=pair)
            result[f"d_{name}"] = mine[name].grad[: shard.num_valid] / 2
        return result

    def check(self, results: list[Any]) -> None:
        total, count, leaves = torch.zeros((), dtype=torch.float64), 0, []
        for at in (0, 1):
            case, tensors = self.replica(at)
            leaves.append({name: tensors[name].clone().requires_grad_() for name in case.names})
            logits = reference.logits(*leaves[-1].values()) if case.linear else leaves[-1]["input"]
            total = total + unsharded(replace(case, options=case.options | {"reduction": "sum"}), logits, tensors)
            count += len(tensors["target"]) if case.soft else int((tensors["target"] != -100).sum())
        expected = total / max(count, 1)
        expected.backward()
        require_equal("loss on every rank", [result["loss"] for result in results])
        require_close("loss", results[0]["loss"], expected.detach(), torch.float64)
        half = len(self.ranks) // 2
        for at, leaf in enumerate(leaves):
            mine = results[at * half : (at + 1) * half]
            parts = [result["d_input"] for result in mine]
            if self.case.linear:
                require_equal("d_input on every rank of a replica", parts)
            d_input = parts[0] if self.case.linear else torch.cat(parts, -1)
            require_close("d_input", d_input, leaf["input"].grad, torch.float64)
            for name in self.case.names[1:]:
                d_table = torch.cat([result[f"d_{name}"] for result in mine])
                require_close(f"d_{name}", d_table, sum(other[name].grad for other in leaves), torch.float64)

    def allowed(self) -> bool:
        case = self.case
        return (
            self.replicas in REPLICAS
            and case.dtype == torch.float64
            and min(case.vocab, case.multiple_of, case.hidden, case.chunk_size or 1) >= 1
            and (case.linear or not (case.bias or case.chunk_size))
            and (case.linear or case.function != "row_loss")
            and case.soft == (case.function == "kl_div" or (case.soft and case.function == "cross_entropy"))
            and (case.function == "cross_entropy" or not {"z_loss", "label_smoothing"} & set(case.options))
            and not (case.weighted and case.function == "row_loss")
            and len(case.leading) == 1
            and self.more_rows >= 0
        )
