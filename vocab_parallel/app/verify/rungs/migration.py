"""Rung 4: rows keep their tokens through a migration, a tied weight stays one, and ids mean what the table says."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from vocab_parallel import tying
from vocab_parallel.app.comparing import backward, gradient, relative, unequal
from vocab_parallel.app.verify.ladder import Check, Rung
from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.app.vocabulary import TokenizerFile
from vocab_parallel.collectives import gather_vocab
from vocab_parallel.embedding import VocabParallelEmbedding
from vocab_parallel.head import VocabParallelLMHead
from vocab_parallel.shard import VocabShard
from vocab_parallel.vocabulary import (
    ModelRecord,
    VocabIdentity,
    VocabMap,
    conformance_report,
    migrate_model_,
    record_model,
)

_ROWS, _DROPPED, _APPENDED = 12, 2, 5
_LOOKED_AT = 2**14  # ids of the table that are compared with the tokenizer
_TYING, _TABLE = "vocab_parallel/tying.py", "vocab_parallel/vocabulary/identity.py"
_MAPPING, _SHARE = "vocab_parallel/vocabulary/mapping.py", "of the largest entry"


def checks(setting: Setting) -> Sequence[Check]:
    """On a tied model of a slice of the user's rows over the ranks, with the optimizer's state of a few steps.

    The steps follow a weighted sum of the logits: a fault of the loss is not this rung's.
    """
    moved, permuted = _Migration(setting), _Migration(setting, momentum=True)
    limit = setting.tolerance
    return [
        Check("the ordered table names the tokenizer's tokens", lambda: tokens_apart(setting), 0.0, "ids", _TABLE),
        Check("one table on every rank, whose hash sees two ids swapped", lambda: hashes(setting), 0.0, "faults",
              _TABLE),
        Check("permute, drop, append: each token keeps its row", moved.rows, 0.0, "rows", _MAPPING),
        Check("and both its moments; new ones are zero", moved.moments, 0.0, "rows", _MAPPING),
        Check("and its raw logits", moved.logits, limit, _SHARE),
        Check("its conformance report", moved.report, 0.0, "faults"),
        Check("one Parameter, one owner, one state, before and after", moved.ownership, 0.0, "faults", _TYING),
        Check("after a permutation the next step moves each token alike", permuted.next_step, limit,
              _SHARE),
        Check("a tied gradient is the lookup's plus the projection's", moved.tied_gradient, limit,
              _SHARE, _TYING),
    ]  # fmt: skip


RUNG = Rung(
    "vocabulary migration",
    "Rows, moments and raw logits follow their token to its new id; a tied weight is one Parameter with one owner.",
    "vocab_parallel/vocabulary/migration/models.py",
    checks,
)


def tokens_apart(setting: Setting) -> float:
    """Ids of which the ordered table and the tokenizer disagree; tokens that are no text of their own are left out."""
    vocabulary, identity = setting.vocabulary, setting.vocabulary.identity
    wrong = abs(identity.size - setting.shard.vocab_size)
    every = range(min(identity.size, setting.shard.vocab_size))
    for token_id in every[:: max(1, len(every) // _LOOKED_AT)]:
        if identity.kinds[token_id] in ("special", "unused"):
            continue
        spelled = vocabulary.decode_bytes([token_id])
        # A tokenizer's file spells its tokens by the table; its library decodes them by itself.
        wrong += not isinstance(vocabulary, TokenizerFile) and spelled != identity.tokens[token_id]
        text = spelled.decode("utf-8", "replace")
        wrong += "\ufffd" not in text and text.strip() != vocabulary.decode([token_id]).strip()
    return float(wrong)


def hashes(setting: Setting) -> float:
    """Ranks with another hash than the first; and one more if the hash does not see two ids swapped."""
    found = setting.job.gather(setting.vocabulary.sha256)
    tokens, kinds = _named(setting)
    swapped = VocabIdentity((tokens[1], tokens[0], *tokens[2:]), (kinds[1], kinds[0], *kinds[2:]))
    blind = swapped.sha256 == VocabIdentity(tokens, kinds).sha256
    return float(sum(other != found[0] for other in found) + blind)


class _Small(nn.Module):
    """An embedding and a head over the slice, tied or apart."""

    def __init__(self, setting: Setting, shard: VocabShard, *, tied: bool = True) -> None:
        super().__init__()
        about = {"shard": shard, "device": setting.device, "dtype": setting.dtype}
        self.embedding = VocabParallelEmbedding(setting.width, **about)  # type: ignore[arg-type]
        self.lm_head = VocabParallelLMHead(setting.width, **about)  # type: ignore[arg-type]
        rows = shard.slice(setting.slice.table)
        with torch.no_grad():
            self.embedding.weight.copy_(rows)
            self.lm_head.weight.copy_(rows)
        if tied:
            tying.tie_weights(self.embedding, self.lm_head)

    def weighted(self, ids: Tensor, slope: Tensor) -> Tensor:
        """This rank's part of the sum of logits ``[T, V']`` times `slope`."""
        shard = self.lm_head.shard
        own = slope[:, shard.start : shard.stop]
        logits: Tensor = self.lm_head(self.embedding(ids))
        return (logits[:, : shard.num_valid] * own.to(logits.dtype)).sum()


class _Migration:
    """A tied model before and after it moved to other ids.

    Args:
        momentum: with SGD's momentum and a permutation; else with AdamW, ids dropped and appended.
    """

    def __init__(self, setting: Setting, *, momentum: bool = False) -> None:
        self.setting, self.momentum = setting, momentum
        draws, size = setting.draws("migration"), setting.slice.shard.vocab_size
        self.order = torch.randperm(size, generator=draws).tolist()  # old id at each new id
        if not momentum and size > _DROPPED:
            self.order = self.order[_DROPPED:]
        self.ids = torch.tensor(self.order)[torch.randint(len(self.order), (_ROWS,), generator=draws)]
        self.slope = torch.randn(_ROWS, size, generator=draws).to(setting.device)

    @functools.cached_property
    def done(self) -> _Outcome:
        """Builds, trains, migrates."""
        setting = self.setting
        model = _Small(setting, setting.slice.shard)
        groups = model.parameters()
        optimizer: torch.optim.Optimizer
        optimizer = torch.optim.SGD(groups, 0.1, 0.9) if self.momentum else torch.optim.AdamW(groups, 1e-3, eps=1e-3)
        for _ in range(2):
            step(model, optimizer, self.ids.to(setting.device), self.slope)
        faults = [_wrongly_owned(model, optimizer)]
        before, old = record_model(model, optimizer), _tables(model, optimizer)
        vocab_map = VocabMap.from_vocabs(*self.identities, allow_drop=True)
        migrate_model_(model, optimizer, vocab_map)
        faults.append(_wrongly_owned(model, optimizer))
        return _Outcome(model, optimizer, vocab_map, before, old, _tables(model, optimizer), faults)

    @functools.cached_property
    def identities(self) -> tuple[VocabIdentity, VocabIdentity]:
        """The tokens of the old ids and of the new ones."""
        tokens, kinds = _named(self.setting)
        added = 0 if self.momentum else _APPENDED
        new = [tokens[old] for old in self.order] + [b"\xffappended %d" % number for number in range(added)]
        return VocabIdentity(tokens, kinds), VocabIdentity(tuple(new), ("normal",) * len(new))

    def rows(self) -> float:
        """Found by the tokens' bytes: the map that moved them is not asked."""
        return self._moved("weight")

    def moments(self) -> float:
        names = [name for name in self.done.old if name != "weight"]
        if not names:
            raise AssertionError("the optimizer keeps no state by row")
        fresh = sum(float(self.done.new[name][len(self.order) :].count_nonzero()) for name in names)
        return sum(self._moved(name) for name in names) + fresh

    def logits(self) -> float:
        hidden = self.setting.hidden[:_ROWS]
        old, new = (hidden.double() @ tables["weight"].double().T for tables in (self.done.old, self.done.new))
        shard = self.done.model.lm_head.shard
        with torch.no_grad():
            got = gather_vocab(shard, self.done.model.lm_head(hidden), dim=-1)
        kept = len(self.order)
        return max(relative(got[:, :kept], old[:, self.order]), relative(got, new))

    def report(self) -> float:
        done = self.done
        conformance_report(done.before, done.model, done.optimizer, done.vocab_map).require()
        return 0.0

    def ownership(self) -> float:
        done = self.done
        new_ids = torch.arange(_ROWS).to(self.setting.device) % len(self.order)
        slope = torch.zeros(_ROWS, done.vocab_map.new_size, device=self.setting.device)
        step(done.model, done.optimizer, new_ids, slope)
        return float(sum(done.faults) + _wrongly_owned(done.model, done.optimizer))

    def next_step(self) -> float:
        """Beside a twin that was not moved."""
        setting, done = self.setting, self.done
        twin = _Small(setting, setting.slice.shard)
        optimizer, ids = torch.optim.SGD(twin.parameters(), 0.1, 0.9), self.ids.to(setting.device)
        for _ in range(3):
            step(twin, optimizer, ids, self.slope)
        new_id = {old: new for new, old in enumerate(self.order)}
        step(
            done.model, done.optimizer, torch.tensor([new_id[old] for old in self.ids.tolist()]).to(setting.device),
            self.slope[:, self.order],
        )  # fmt: skip
        want, got = _tables(twin, optimizer)["weight"], _tables(done.model, done.optimizer)["weight"]
        return relative(got, want[self.order].double())

    def tied_gradient(self) -> float:
        shard, ids = self.setting.slice.shard, self.ids.to(self.setting.device)
        tied, apart = (_Small(self.setting, shard, tied=one) for one in (True, False))
        for model in (tied, apart):
            backward(model.weighted(ids, self.slope))
        want = gradient(apart.embedding.weight).double() + gradient(apart.lm_head.weight).double()
        return relative(gradient(tied.embedding.weight), want)

    def _moved(self, name: str) -> float:
        """Rows of kept tokens that have other bits than before."""
        old, new = self.identities
        of_old = {token: at for at, token in enumerate(old.tokens)}
        kept = [(of_old[token], at) for at, token in enumerate(new.tokens) if token in of_old]
        before, after = (torch.tensor(ids) for ids in zip(*kept, strict=True))
        rows = [unequal(new_row, old_row) > 0 for new_row, old_row in
                zip(self.done.new[name][after], self.done.old[name][before], strict=True)]  # fmt: skip
        return float(sum(rows))


@dataclasses.dataclass(frozen=True)
class _Outcome:
    """A migration that was done.

    Attributes:
        old, new: whole tables before and after, of the weight and of each state by row.
        faults: of the tie and its owner, before and after.
    """

    model: _Small
    optimizer: torch.optim.Optimizer
    vocab_map: VocabMap
    before: ModelRecord
    old: dict[str, Tensor]
    new: dict[str, Tensor]
    faults: list[int]


def step(model: _Small, optimizer: torch.optim.Optimizer, ids: Tensor, slope: Tensor) -> None:
    """One step along a weighted sum of logits."""
    optimizer.zero_grad(set_to_none=True)
    backward(model.weighted(ids, slope))
    optimizer.step()


def _tables(model: _Small, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The whole weight, and the states by row of the head's Parameter."""
    weight, shard = model.lm_head.weight, model.lm_head.shard
    states = {name: state for name, state in optimizer.state[weight].items() if state.shape == weight.shape}
    return {name: gather_vocab(shard, local).clone() for name, local in {"weight": weight, **states}.items()}


def _wrongly_owned(model: _Small, optimizer: torch.optim.Optimizer) -> int:
    """Faults of the tie that `verify_tied` does not raise itself."""
    tying.verify_tied(model, optimizer)
    held = [one for group in optimizer.param_groups for one in group["params"]]
    one = model.embedding.weight
    return (one is not model.lm_head.weight) + (len(held) != 1) + (held[0] is not one) + (len(optimizer.state) != 1)


def _named(setting: Setting) -> tuple[tuple[bytes, ...], tuple[str, ...]]:
    """Bytes and kinds of the slice's tokens, each with a name of its own."""
    identity, tokens = setting.vocabulary.identity, list[bytes]()
    for token_id in setting.slice.ids:
        token = identity.tokens[token_id]
        taken = identity.kinds[token_id] == "unused" or token in tokens
        tokens.append(b"\xffid %d" % token_id if taken else token)
    return tuple(tokens), ("normal",) * len(tokens)
