"""A checkpoint saved at some ranks and layout, and loaded at others: the same tables, moments and next steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from tests.fuzz.case import GROUPS, Draw, gathered
from tests.fuzz.kinds.models import OPTIMIZERS, VOCABULARY, Model, Sharded, Training
from tests.tolerances import require_equal
from vocab_parallel import verify_tied
from vocab_parallel.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint


@dataclass(frozen=True, repr=False)
class Checkpoints(Training):
    """`ranks` are all that take part: the first `saving` of them save, then all of them load."""

    kind: ClassVar[str] = "checkpoints"
    loading: tuple[int, ...] = (0,)  # the ranks that load, one of `GROUPS` whose ranks are among `ranks`
    saving: tuple[int, ...] = (0,)  # likewise
    new_multiple_of: int = 1
    weights_only: bool = False

    @classmethod
    def draw(cls, one: Draw) -> Checkpoints:
        sizes = [one(1, 2, 3, 4) for _ in range(2)]
        saving, loading = (one(*(ranks for ranks in GROUPS if len(ranks) == size)) for size in sizes)
        drawn = cls.drawn(one) | {"ranks": (0, 1, 2, 3), "spread": None}
        return cls(
            **drawn, saving=saving, loading=loading, new_multiple_of=one(1, 3, 8, 64), optimizer=one(*OPTIMIZERS),
            weights_only=one.chance(0.2), dtype=one(torch.float64, torch.float32, torch.bfloat16),
        )  # fmt: skip

    def run(self, place: Any) -> Any:
        me = place.ranks[place.rank]
        found: dict[str, Any] = {}
        if me in self.saving:
            saving = replace(place, ranks=self.saving, rank=self.saving.index(me))
            model = Sharded(self, saving.shard(self.vocab, self.multiple_of))
            optimizer = self.optimizer_of(model)
            self.step(model, optimizer, 0)
            save_checkpoint(place.folder, model, None if self.weights_only else optimizer, 1, {"seed": self.seed})
            found["saved"] = self.state(model, optimizer)
        place.barrier()
        if me in self.loading:
            loading = replace(place, ranks=self.loading, rank=self.loading.index(me))
            model = Sharded(self, loading.shard(self.vocab, self.new_multiple_of))
            optimizer = self.optimizer_of(model)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(torch.nan)
            latest = latest_checkpoint(place.folder)
            assert latest is not None
            step, extra = load_checkpoint(latest, model, None if self.weights_only else optimizer)
            assert (step, extra) == (1, {"seed": self.seed}), (step, extra)
            if self.tied:
                verify_tied(model, optimizer)
            found["loaded"] = self.state(model, optimizer)
            self.step(model, optimizer, 1)
        place.barrier()
        return found

    def step(self, model: Sharded, optimizer: Any, number: int) -> None:
        optimizer.zero_grad()
        model(*self.batch(number)).backward()
        optimizer.step()

    def state(self, model: Sharded, optimizer: Any) -> dict[str, Any]:
        """All that a checkpoint must keep, by name."""
        found: dict[str, Any] = {"valid": model.head.shard.num_valid}
        for name, parameter in model.named_parameters():
            found[name] = parameter.detach().clone()
            if not self.weights_only:
                for key, value in optimizer.state.get(parameter, {}).items():
                    found[f"{name}/{key}"] = torch.as_tensor(value).clone()
        return found

    def check(self, results: list[Any]) -> None:
        whole = []
        for when, ranks in (("saved", self.saving), ("loaded", self.loading)):
            mine = [results[self.ranks.index(rank)][when] for rank in ranks]
            together = {}
            for name in mine[0]:
                if name == "valid":
                    continue
                parts = [one[name] for one in mine]
                if name.split("/")[0] in VOCABULARY and parts[0].dim():
                    padding = [part[one["valid"] :] for part, one in zip(parts, mine, strict=True)]
                    assert not any(part.any() for part in padding), f"{name}: padding is not zero"
                    parts = [gathered(parts, [one["valid"] for one in mine], 0)]
                require_equal(f"{name} as {when} on every rank", parts)
                together[name] = parts[0]
            whole.append(together)
        assert whole[0].keys() == whole[1].keys(), (list(whole[0]), list(whole[1]))
        for name, tensor in whole[0].items():
            require_equal(f"{name} loaded", [tensor, whole[1][name]])

    def allowed(self) -> bool:
        return Model.allowed(self) and self.new_multiple_of >= 1 and set(self.saving + self.loading) <= set(self.ranks)
