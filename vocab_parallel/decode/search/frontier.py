"""The live beams of a search, step by step: candidates, ends, and what lives on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vocab_parallel.decode.search.beam import BeamStep, Expansion, expand, join, require_candidates
from vocab_parallel.decode.search.hypotheses import (
    Coverage,
    Finished,
    LengthPenalty,
    can_improve,
    check_early_stopping,
    finite,
)
from vocab_parallel.decode.search.reordering import flat_parents, reorder
from vocab_parallel.decode.search.searching import Chain, Model, Stepped, ask, at_least_one, check_ends
from vocab_parallel.decode.transforms.transform import Choice, View
from vocab_parallel.select.scores import Scores
from vocab_parallel.shard import VocabShard


@dataclass
class Frontier:
    """A search on its way. A request's beams lie side by side, group by group; at first there is one for all groups."""

    rules: Rules
    shard: VocabShard
    view: View
    source: Tensor | None
    chain: Chain
    state: Any
    length: int = 0
    attended: Tensor | None = None  # float64 [R, S]
    sums: Tensor = field(init=False)  # float64 [B, beams], -inf: not live
    index: Tensor = field(init=False)  # int64 [R], the row of the last step that each continues
    trail: Tensor = field(init=False)  # int64 [R, length], the beam that each generated token continued
    finished: list[Finished] = field(init=False)  # of each group
    running: list[Tensor] = field(init=False)  # bool [B], of each group: whether it can still improve

    def __post_init__(self) -> None:
        rows, device = len(self.view.prefix), self.view.prefix.device
        self.sums = torch.zeros(rows, 1, dtype=torch.float64, device=device)
        self.index = torch.arange(rows, device=device)
        self.trail = self.index.new_zeros(rows, 0)
        empty = Finished.empty(rows, self.rules.width, self.rules.max_length, device)
        self.finished = [empty] * self.rules.groups
        self.running = [self.index >= 0] * self.rules.groups

    @property
    def going(self) -> bool:
        """Whether another step can change a result. Reads from the device."""
        return self.length < self.rules.max_length and bool(torch.stack(self.running).any())

    def advance(self, model: Model) -> list[BeamStep]:
        """One step of all beams: each group's candidates."""
        rules = self.rules
        attends = rules.coverage.beta > 0
        scores, stepped = ask(
            model, self.view, self.index, self.state, self.chain, self.shard, self.sums, "beam_search step",
            attends=attends,
        )  # fmt: skip
        self.length += 1
        if attends and stepped.attention is not None:
            attention = stepped.attention.detach().double()
            self.attended = attention if self.attended is None else self.attended + attention
        most = rules.candidates + (rules.groups - 1) * rules.width  # others may have taken as many
        expansion = expand(scores, most, normalized=not rules.renormalize)
        steps, lives = [], []
        taken = self.index.new_zeros(len(self.sums), 0)
        for group in range(rules.groups):
            step = self._candidates(expansion, group, taken)
            live = self._settle(step, group, scores)
            taken = torch.cat([taken, torch.where(live.sums > -torch.inf, live.token_ids, -1)], 1)
            steps.append(step)
            lives.append(live)
        if self.length < rules.max_length:
            self._move(Live(*(torch.cat(parts, 1) for parts in zip(*lives, strict=True))), stepped)
        return steps

    def _candidates(self, expansion: Expansion, group: int, taken: Tensor) -> BeamStep:
        """The best of a group; parents are beams of the request."""
        rows, beams = self.sums.shape
        first, width = (0, 1) if self.length == 1 else (group * self.rules.width, self.rules.width)
        mine = Expansion(*(x.view(rows, beams, -1)[:, first : first + width].flatten(0, 1) for x in expansion))
        sums = torch.where(self.running[group][:, None], self.sums[:, first : first + width], -torch.inf)
        step = join(mine, sums, self.rules.candidates, penalized=taken, penalty=self.rules.diversity)
        return step._replace(parents=step.parents + first)

    def _settle(self, step: BeamStep, group: int, scores: Scores) -> Live:
        """Moves a group's ends to its finished set, and takes what lives on."""
        rules, running = self.rules, self.running[group]
        there = step.scores > -torch.inf
        ends = torch.isin(step.token_ids, torch.tensor(rules.ends, dtype=torch.int64, device=there.device))
        over = there & (ends | (self.length == rules.max_length))
        self.finished[group] = self.finished[group].add(self._hypotheses(step, over, ends))
        goes_on = there & ~ends  # at the last length too: later groups want to know what was chosen
        at = (~goes_on).to(torch.int8).sort(dim=1, stable=True).indices[:, : rules.width]
        alive = goes_on.gather(1, at)
        live = Live(*(x.gather(1, at) for x in step))
        live = live._replace(
            sums=torch.where(alive, live.sums, -torch.inf), token_ids=torch.where(alive, live.token_ids, 0)
        )
        best = self.finished[group].scores[:, 0]
        require_candidates(scores, running, torch.maximum(best, live.sums[:, 0]))
        improves = can_improve(
            self.finished[group], live.sums[:, 0], self.length, rules.max_length, rules.penalty, rules.early_stopping
        )
        self.running[group] = running & improves
        return live

    def _hypotheses(self, step: BeamStep, over: Tensor, ends: Tensor) -> Finished:
        """The candidates that are over, among a group's best `width`."""
        width, beams = self.rules.width, self.sums.shape[1]
        sums, parents, tokens = (x[:, :width] for x in step[:3])
        rows = flat_parents(parents, beams)
        scores = sums / self.rules.penalty.of(self.length)
        if self.attended is not None:
            source = None if self.source is None else self.source.repeat_interleave(beams, 0)[rows]
            scores = scores + self.rules.coverage.of(self.attended[rows], source).view_as(scores)
        left = self.rules.max_length - self.length

        def line(past: Tensor, last: Tensor) -> Tensor:
            whole = torch.cat([past[rows].view(*parents.shape, -1), last[:, :, None]], 2)
            return torch.nn.functional.pad(whole, (0, left), value=-1)

        generated = self.view.prefix[:, self.view.prefix.shape[1] - self.length + 1 :]
        lengths = torch.full_like(parents, self.length)
        return Finished(
            torch.where(over[:, :width], scores, -torch.inf), sums, lengths, line(generated, tokens),
            line(self.trail, parents), ends[:, :width],
        )  # fmt: skip

    def _move(self, live: Live, stepped: Stepped) -> None:
        """All state to the beams that live on."""
        self.index = flat_parents(live.parents, self.sums.shape[1])
        self.sums = live.sums
        ids, active = live.token_ids.flatten(), live.sums.flatten() > -torch.inf
        choice = Choice(torch.where(active, ids, -1), live.logprobs.flatten(), active)
        self.chain = self.chain.follow(self.index, choice)
        self.view = self.view.rows(self.index).appended(ids)
        self.trail = torch.cat([self.trail[self.index], live.parents.flatten()[:, None]], 1)
        self.state = reorder(stepped.state, self.index)
        if self.attended is not None:
            self.attended = self.attended[self.index]


class Live(NamedTuple):
    """The beams of one group that live on: `[B, width]` each, -inf and id 0 where there are fewer."""

    sums: Tensor
    parents: Tensor
    token_ids: Tensor
    logprobs: Tensor


@dataclass(frozen=True)
class Rules:
    """The options of a search that do not change."""

    beams: int
    groups: int
    max_length: int
    ends: tuple[int, ...]
    penalty: LengthPenalty
    coverage: Coverage
    early_stopping: bool | str
    diversity: float
    renormalize: bool

    def check(self, vocab_size: int, num_return: int | None) -> None:
        at_least_one(num_beams=self.beams, groups=self.groups, max_new_tokens=self.max_length)
        check_ends(self.ends, vocab_size)
        check_early_stopping(self.early_stopping)
        if self.beams % self.groups:
            raise ValueError(f"num_beams {self.beams} must divide by groups {self.groups}")
        finite("diversity_penalty", self.diversity, 0.0)
        self.penalty.check(self.max_length)
        if num_return is not None:
            at_least_one(num_return=num_return)
            if num_return > self.beams:
                raise ValueError(f"num_return {num_return} is above num_beams {self.beams}: no more are kept")

    @property
    def width(self) -> int:
        """Beams of a group."""
        return self.beams // self.groups

    @property
    def candidates(self) -> int:
        """Of a group at a step: enough that `width` are left if each beam's best are ends."""
        return (1 + max(1, len(self.ends))) * self.width
