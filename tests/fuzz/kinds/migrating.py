"""Rows that move to another vocabulary: random maps, beginnings and layouts; states and whole models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from tests.fuzz.case import Draw, FuzzCase
from tests.fuzz.kinds.models import Model, Sharded, Whole
from tests.multirank.migration_cases import edited, joined, oracle, whole
from tests.tolerances import bits, require_close, require_equal
from vocab_parallel import VocabLayout, VocabMap, migrate, migrate_model_, verify_tied
from vocab_parallel.vocabulary.migration.initialization import CopyOf, MeanOfRows, MeanOfSources, Normal, RowInit, Zeros

INITS = ("zeros", "mean", "sources", "copy", "normal")
ZERO = ("exp_avg", "mask")


@dataclass(frozen=True, repr=False)
class Migration(FuzzCase):
    """The state of tables of many dtypes."""

    kind: ClassVar[str] = "migration"
    old: int = 9
    appended: int = 0
    dropped: int = 0
    permuted: int = 0
    multiple_of: int = 1
    new_multiple_of: int = 1
    init: str = "zeros"
    width: int = 3
    dtype: torch.dtype = torch.float32
    strided: bool = False

    @classmethod
    def draw(cls, one: Draw) -> Migration:
        old = one(9, 9, 1, 2, 13, 64, 301)
        return cls(
            ranks=one.ranks(), seed=one.seed(), old=old, appended=one(0, 1, 2, 17), dropped=one.below(min(old, 6)),
            permuted=one.below(old), multiple_of=one(1, 1, 2, 7, 64), new_multiple_of=one(1, 1, 3, 8, 128),
            init=one(*INITS), width=one(1, 3, 5), strided=one(False, True),
            dtype=one(torch.float32, torch.bfloat16, torch.float64, torch.float16),
        )  # fmt: skip

    def map(self) -> VocabMap:
        kept = self.old - self.dropped
        return edited(self.old, self.appended, min(self.permuted, kept), self.dropped, self.seed)

    def beginning(self) -> RowInit:
        rows = {int(new): (self.seed + at) % self.old for at, new in enumerate(self.map().new_ids)}
        made: dict[str, RowInit] = {
            "zeros": Zeros(), "mean": MeanOfRows(), "sources": MeanOfSources(), "copy": CopyOf(rows),
            "normal": Normal(self.seed % 1000),
        }  # fmt: skip
        return made[self.init]

    def tables(self) -> dict[str, Tensor]:
        """Some bits that arithmetic would not keep."""
        moments = whole(self.old, self.width, seed=self.seed + 1)
        moments.view(torch.int32)[0, 0] = 0x7FC12345  # a NaN with a message
        return {
            "weight": whole(self.old, self.width, dtype=self.dtype, seed=self.seed),
            "bias": whole(self.old, dtype=self.dtype, seed=self.seed + 2),
            "exp_avg": moments,
            "mask": whole(self.old, seed=self.seed + 3) > 0,
        }

    def run(self, place: Any) -> Any:
        vocab_map = self.map()
        src = place.shard(self.old, self.multiple_of)
        dst = place.shard(vocab_map.new_size, self.new_multiple_of)
        state = {name: src.slice(table) for name, table in self.tables().items()}
        for name in ("weight", "bias"):
            state[name][src.num_valid :] = torch.nan
        if self.strided:
            state = {name: torch.stack([value, value], -1)[..., 0] for name, value in state.items()}
        before = {name: bits(value).clone() for name, value in state.items()}
        moved = migrate(state, vocab_map, src=src, dst=dst, init=self.beginning(), zero=ZERO)
        assert all(torch.equal(bits(state[name]), value) for name, value in before.items()), "a state was modified"
        return moved

    def check(self, results: list[Any]) -> None:
        vocab_map = self.map()
        layout = VocabLayout(vocab_map.new_size, self.tp, multiple_of=self.new_multiple_of)
        for name, table in self.tables().items():
            got = joined([result[name] for result in results], layout)
            assert got.dtype == table.dtype
            if self.init == "normal" and name not in ZERO:
                fresh = vocab_map.new_to_old < 0
                assert bool(got[fresh].isfinite().all())
                got = torch.where(fresh.view(-1, *[1] * (got.dim() - 1)), torch.zeros_like(got), got)
                expected = oracle(table, vocab_map, Zeros())
            else:
                expected = oracle(table, vocab_map, None if name in ZERO else self.beginning())
            wrong = (bits(got) != bits(expected)).nonzero()
            assert not len(wrong), f"{name}\n{got}\n{expected}"

    def allowed(self) -> bool:
        return (
            min(self.old, self.multiple_of, self.new_multiple_of, self.width) >= 1
            and 0 <= self.dropped < self.old
            and self.permuted >= 0
            and self.appended >= 0
        )


@dataclass(frozen=True, repr=False)
class ModelMigration(Model):
    """A model in the middle of a run: it goes on as the whole one whose tables were moved by hand."""

    kind: ClassVar[str] = "model_migration"
    appended: int = 0
    dropped: int = 0
    permuted: int = 0
    new_multiple_of: int = 1
    optimizer: str = "adamw"
    init: str = "sources"

    @classmethod
    def draw(cls, one: Draw) -> ModelMigration:
        drawn = cls.drawn(one)
        vocab = drawn["vocab"]
        more = {"appended": one(0, 1, 5), "dropped": one.below(min(vocab, 4)), "permuted": one.below(vocab)}
        # an id that is dropped cannot be the padding
        drawn |= {"padding_idx": None, "spread": None}
        return cls(**drawn, **more, new_multiple_of=one(1, 2, 8), optimizer=one("adamw", "momentum"),
                   init=one("sources", "mean", "zeros"))  # fmt: skip

    def map(self) -> VocabMap:
        kept = self.vocab - self.dropped
        return edited(self.vocab, self.appended, min(self.permuted, kept), self.dropped, self.seed)

    def optimizer_of(self, model: Any) -> torch.optim.Optimizer:
        if self.optimizer == "momentum":
            return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)

    def step(self, model: Any, optimizer: Any, number: int, vocab: int) -> Tensor:
        ids, target = self.batch(number)
        optimizer.zero_grad()
        loss = model(ids % vocab, torch.where(target < 0, target, target % vocab))
        loss.backward()
        optimizer.step()
        return loss.detach()

    def beginning(self) -> RowInit:
        return {"sources": MeanOfSources(), "mean": MeanOfRows(), "zeros": Zeros()}[self.init]

    def run(self, place: Any) -> Any:
        vocab_map = self.map()
        model = Sharded(self, place.shard(self.vocab, self.multiple_of))
        optimizer = self.optimizer_of(model)
        losses = [self.step(model, optimizer, number, self.vocab) for number in range(2)]
        layout = VocabLayout(vocab_map.new_size, self.tp, multiple_of=self.new_multiple_of)
        report = migrate_model_(model, optimizer, vocab_map, init=self.beginning(), layout=layout)
        verify_tied(model, optimizer, required=self.tied)
        losses += [self.step(model, optimizer, number, vocab_map.new_size) for number in (2, 3)]
        found = {name: parameter.detach() for name, parameter in model.named_parameters()}
        return found | {"losses": torch.stack(losses), "valid": report.shard.num_valid}

    def check(self, results: list[Any]) -> None:
        vocab_map, model = self.map(), Whole(self)
        optimizer = self.optimizer_of(model)
        losses = [self.step(model, optimizer, number, self.vocab) for number in range(2)]
        for name, parameter in model.named_parameters():
            if name == "trunk.weight":
                continue
            state = optimizer.state[parameter]
            for key, value in state.items():
                if isinstance(value, Tensor) and value.dim():
                    state[key] = oracle(value, vocab_map, None)
            parameter.data = oracle(parameter.detach(), vocab_map, self.beginning())
            parameter.grad = None
        losses += [self.step(model, optimizer, number, vocab_map.new_size) for number in (2, 3)]
        require_equal("losses on every rank", [result["losses"] for result in results])
        torch.testing.assert_close(results[0]["losses"], torch.stack(losses), rtol=1e-10, atol=1e-10)
        for name, parameter in model.named_parameters():
            parts = [result[name] for result in results]
            if name != "trunk.weight":
                padding = [part[result["valid"] :] for part, result in zip(parts, results, strict=True)]
                assert not any(part.any() for part in padding), f"{name}: padding is not zero"
                parts = [torch.cat([part[: result["valid"]] for part, result in zip(parts, results, strict=True)])]
            require_equal(f"{name} on every rank", parts)
            require_close(name, parts[0], parameter.detach(), torch.float64)

    def allowed(self) -> bool:
        return (
            super().allowed()
            and self.new_multiple_of >= 1
            and 0 <= self.dropped < self.vocab
            and self.padding_idx is None
        )
