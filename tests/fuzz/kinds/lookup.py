"""The embedding in its three forms, and the head's logits with row selection: values and gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tests.fuzz.case import Draw, FuzzCase, gathered
from tests.fuzz.kinds.losses import spreads
from tests.multirank.loss_case import SPREADS
from tests.tolerances import bits, require_close, require_equal
from vocab_parallel import VocabParallelLMHead, reference, vocab_parallel_embedding
from vocab_parallel.embedding import sequence_rows

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FORMS = ("plain", "sequence_parallel", "own_rows")


def normal(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def require_near(
    name: str, got: Tensor, expected: Tensor, own: Tensor, dtype: torch.dtype, magnitude: float = 0.0
) -> None:
    """Within the tolerance, or twice as far off as PyTorch's own unsharded result: sums in half precision.

    Args:
        magnitude: Of the partial sums that each rank rounds to the dtype: they may be larger than what they add up to.
    """
    slack = 2 * (own.double() - expected).abs().max().item() if own.numel() else 0.0
    slack = max(slack, torch.finfo(dtype).eps * magnitude)
    off = (got.double() - expected).abs().max().item() if got.shape == expected.shape and got.numel() else 0.0
    if off > slack:
        require_close(name, got, expected, dtype)


@dataclass(frozen=True, repr=False)
class Lookup(FuzzCase):
    kind: ClassVar[str] = "embedding"
    vocab: int = 9
    multiple_of: int = 1
    leading: tuple[int, ...] = (7,)
    width: int = 4
    dtype: torch.dtype = torch.float64
    form: str = "plain"
    padding_idx: int | None = None
    trained: bool = True
    strided: bool = False
    id_dtype: torch.dtype = torch.int64

    @classmethod
    def draw(cls, one: Draw) -> Lookup:
        layout = one.layout()
        form = one(*FORMS)
        leadings = [(7,), (12,), (3, 4), (1,), (0,), (2, 0), (5, 2, 2)] + ([()] if form != "sequence_parallel" else [])
        return cls(
            ranks=one.ranks(), seed=one.seed(), **layout, leading=one(*leadings), width=one(1, 4, 7),
            dtype=one(*DTYPES), form=form, padding_idx=one(None, None, 0, layout["vocab"] - 1),
            trained=one(True, True, False), strided=one(False, True),
            id_dtype=one(torch.int64, torch.int64, torch.int32),
        )  # fmt: skip

    def ids(self, rank: int) -> Tensor:
        """All ids; with rows of its own those of this rank, another number of them on each."""
        draw = torch.Generator().manual_seed(self.seed + 1 + (rank if self.form == "own_rows" else 0))
        shape = self.leading
        if self.form == "own_rows" and shape:
            shape = (int(torch.randint(0, shape[0] + 1, (), generator=draw)), *shape[1:])
        ids = torch.randint(0, self.vocab, shape, generator=draw).to(self.id_dtype)
        return torch.stack([ids, ids], -1)[..., 0] if self.strided else ids

    def table(self) -> Tensor:
        return normal(torch.Generator().manual_seed(self.seed), self.vocab, self.width, dtype=self.dtype)

    def upstream(self, rank: int) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed - 1 - (rank if self.form == "own_rows" else 0))
        return normal(generator, *self.ids(rank).shape, self.width, dtype=self.dtype)

    def run(self, place: Any) -> Any:
        shard = place.shard(self.vocab, self.multiple_of)
        weight, ids = shard.slice(self.table(), fill=torch.nan), self.ids(place.rank)
        if self.strided:
            weight = torch.stack([weight, weight], -1)[..., 0]
        before = bits(weight).clone()
        weight.requires_grad_(self.trained)
        form = {self.form: True} if self.form != "plain" else {}
        rows = vocab_parallel_embedding(ids, weight, shard=shard, padding_idx=self.padding_idx, **form)
        upstream = self.upstream(place.rank)
        if self.form == "sequence_parallel":
            upstream = upstream.split(sequence_rows(self.leading[0], shard.tp_size))[place.rank]
        gradient = torch.autograd.grad(rows, weight, upstream)[0] if self.trained else None
        assert torch.equal(bits(weight), before), "the weight was modified"
        return rows.detach(), gradient, shard.num_valid

    def check(self, results: list[Any]) -> None:
        table = self.table()
        rows, gradients, valid = map(list, zip(*results, strict=True))
        each = [self.ids(rank).long() for rank in range(self.tp)]
        expected = [table[ids] for ids in each]
        if self.form == "sequence_parallel":
            assert [len(part) for part in rows] == sequence_rows(self.leading[0], self.tp)
            rows, expected = [torch.cat(rows)], expected[:1]
        for rank, (got, want) in enumerate(zip(rows, expected, strict=True)):
            assert got.dtype == self.dtype and torch.equal(got, want), f"rows of rank {rank}\n{got}\n{want}"
        if not self.trained:
            return
        for gradient, count in zip(gradients, valid, strict=True):
            assert not gradient[count:].any(), "padding has a gradient"
        exact, own = (self.gradient(each, dtype) for dtype in (torch.float64, self.dtype))
        require_near("d_weight", gathered(gradients, valid, 0), exact, own, self.dtype)

    def gradient(self, each: list[Tensor], dtype: torch.dtype) -> Tensor:
        """PyTorch's own, of the whole table."""
        leaf = self.table().to(dtype).requires_grad_()
        terms = enumerate(each) if self.form == "own_rows" else [(0, each[0])]
        total = sum((reference.embedding(ids, leaf, self.padding_idx) * self.upstream(rank).to(dtype)).sum()
                    for rank, ids in terms)  # fmt: skip
        return torch.autograd.grad(total, leaf)[0]

    def allowed(self) -> bool:
        plain = min(self.vocab, self.multiple_of, self.width) >= 1
        return (
            plain and (self.padding_idx or 0) < self.vocab and (bool(self.leading) or self.form != "sequence_parallel")
        )


@dataclass(frozen=True, repr=False)
class Head(FuzzCase):
    kind: ClassVar[str] = "head"
    vocab: int = 9
    multiple_of: int = 1
    leading: tuple[int, ...] = (5,)
    hidden: int = 4
    dtype: torch.dtype = torch.float64
    bias: bool = False
    width: int | None = None  # of hidden states before a projection
    rows: int | tuple[int, ...] | None = None  # a tuple is an index tensor
    sliced: tuple[int | None, int | None, int | None] | None = None
    spread: str | None = None

    @classmethod
    def draw(cls, one: Draw) -> Head:
        leading = one((5,), (2, 3), (6,), (1,), (0,), (3, 1, 2), (6, 2))
        spread = one(None, None, *spreads(leading[0]))
        count = leading[-1]  # of the positions that rows are selected from
        case = cls(
            ranks=one.ranks(), seed=one.seed(), **one.layout(), leading=leading, hidden=one(1, 4, 7),
            dtype=one(*DTYPES), bias=one(False, True), width=one(None, None, 3), spread=spread,
        )  # fmt: skip
        selects = dict(case.__dict__)
        form = one("all", "int", "index", "slice")
        if form == "int" and count:
            selects["rows"] = one(-1, 0, one.below(count))
        if form == "index":
            selects["rows"] = tuple(one.below(count) for _ in range(one.below(4))) if count else ()
        if form == "slice":
            selects["sliced"] = one((1, None, None), (None, -1, None), (None, None, 2), (0, 0, None))
        return cls(**selects)

    @property
    def selection(self) -> Any:
        if self.sliced is not None:
            return slice(*self.sliced)
        return torch.tensor(self.rows, dtype=torch.int64) if isinstance(self.rows, tuple) else self.rows

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        made = {"input": normal(generator, *self.leading, self.width or self.hidden, dtype=self.dtype)}
        made["weight"] = normal(generator, self.vocab, self.hidden, dtype=self.dtype)
        if self.bias:
            made["bias"] = normal(generator, self.vocab, dtype=self.dtype)
        if self.width:
            made["projection"] = normal(generator, self.hidden, self.width, dtype=self.dtype)
        return made

    def logits(self, dtype: torch.dtype, sign: Any = lambda tensor: tensor) -> list[Tensor]:
        """PyTorch's own logits and gradients in a dtype, of whole tensors, or of their magnitudes."""
        leaves = {name: sign(tensor.to(dtype)).requires_grad_() for name, tensor in self.tensors().items()}
        hidden = leaves["input"] @ leaves["projection"].T if self.width else leaves["input"]
        whole = reference.logits(hidden, leaves["weight"], leaves.get("bias"))
        chosen = whole if self.selection is None else whole[..., self.selection, :]
        upstream = sign(self.upstream(chosen).to(dtype))
        return [chosen.detach(), *torch.autograd.grad(chosen, list(leaves.values()), upstream)]

    def upstream(self, like: Tensor) -> Tensor:
        return normal(torch.Generator().manual_seed(self.seed + 1), *like.shape[:-1], self.vocab, dtype=self.dtype)

    def run(self, place: Any) -> Any:
        shard, whole = place.shard(self.vocab, self.multiple_of), self.tensors()
        projection = nn.Linear(self.width, self.hidden, bias=False, dtype=self.dtype) if self.width else None
        head = VocabParallelLMHead(self.hidden, shard=shard, bias=self.bias, projection=projection, dtype=self.dtype)
        with torch.no_grad():
            head.weight.copy_(shard.slice(whole["weight"]))
            if self.bias:
                head.bias.copy_(shard.slice(whole["bias"]))
            if projection is not None:
                projection.weight.copy_(whole["projection"])
        mine = whole["input"]
        if self.spread:
            mine = mine.split(SPREADS[self.spread](self.leading[0], shard.tp_size))[place.rank]
        mine = mine.clone().requires_grad_()
        logits = head.logits(mine, self.selection, sequence_parallel=self.spread is not None)
        upstream = self.upstream(logits)[..., shard.start : shard.stop]
        logits[..., : shard.num_valid].backward(upstream)
        found = {
            "logits": logits.detach()[..., : shard.num_valid],
            "input": mine.grad,
            "weight": head.weight.grad,
            "valid": shard.num_valid,
        }
        found |= {"bias": head.bias.grad} if self.bias else {}
        return found | ({"projection": projection.weight.grad} if projection is not None else {})

    def check(self, results: list[Any]) -> None:
        names = ["logits", *self.tensors()]
        valid = [result["valid"] for result in results]
        each = self.logits(torch.float64), self.logits(self.dtype), self.logits(torch.float64, torch.abs)
        for name, exact, own, size in zip(names, *each, strict=True):
            parts = [result[name] for result in results]
            assert parts[0].dtype == self.dtype, f"{name} is {parts[0].dtype}"
            if name in ("weight", "bias"):
                padding = [part[count:] for part, count in zip(parts, valid, strict=True)]
                assert not any(part.any() for part in padding), f"{name}: padding has a gradient"
            if name in ("logits", "weight", "bias"):
                got = gathered(parts, valid, -1 if name == "logits" else 0)
            elif name == "input" and self.spread:
                got = torch.cat(parts)
            else:
                require_equal(f"d_{name} on every rank", parts)
                got = parts[0]
            require_near(name, got, exact, own, self.dtype, size.max().item() if size.numel() else 0.0)

    def allowed(self) -> bool:
        count = self.leading[-1] if self.leading else 0
        rows = self.rows if isinstance(self.rows, tuple) else () if self.rows is None else (self.rows,)
        return (
            min(self.vocab, self.multiple_of, self.hidden) >= 1
            and all(-count <= row < count for row in rows)
            and (self.width is None or self.width >= 1)
            and (not self.spread or (bool(self.leading) and self.spread in spreads(self.leading[0])))
        )
