"""A policy as a `LogitsProcessor`, for those who must stay in `model.generate`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from transformers import LogitsProcessor

from vocab_parallel.decode.policy import Policy
from vocab_parallel.decode.state import PolicyState
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.layout import VocabLayout
from vocab_parallel.select.streams import Streams
from vocab_parallel.shard import VocabShard


class PolicyProcessor(LogitsProcessor):  # type: ignore[misc]  # a class of an untyped package
    """Chooses by a policy on the whole logits that `model.generate` has, the ids that `generate` here chooses.

        model.generate(ids, attention_mask=mask, do_sample=False,
                       logits_processor=LogitsProcessorList([PolicyProcessor(policy, streams, eos_token_id=eos)]))

    The chosen id keeps 0 and every other gets -inf, so `generate`'s own argmax takes it. It must be the only processor
    that changes scores, in a `generate` with `do_sample=False` and one beam. One object serves one call: it holds the
    state of that call's requests.

    What it costs: a converted model gathers each step's logits, `V` numbers a row on every rank, and every rank selects
    on all of them. `generate` does neither.

    Args:
        streams: Of the rows; a policy that draws nothing needs none.
        attention_mask: The prompts', if they are padded: padding is no history.
        eos_token_id: Ids that end a row: all those of `model.generate`, its generation config's among them, as a
            processor cannot see them. A row that has ended takes no more draws.

    Attributes:
        state: The policy's after the last step; None before the first.
    """

    def __init__(
        self,
        policy: Policy,
        streams: Streams | None = None,
        *,
        attention_mask: Tensor | None = None,  # [B, S]
        eos_token_id: int | Sequence[int] | None = None,
    ) -> None:
        self.policy = policy
        self._streams, self._mask = streams, attention_mask
        ends = [] if eos_token_id is None else eos_token_id if isinstance(eos_token_id, Iterable) else [eos_token_id]
        self._ends = torch.tensor(list(ends), dtype=torch.int64)
        self._shard: VocabShard | None = None
        self._view: View
        self._active: Tensor
        self._length = 0
        self.state: PolicyState | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:  # [B, L], [B, V] -> [B, V]
        """This step's scores, all but the chosen ids' at -inf; rows that have ended keep theirs."""
        if self._shard is None:
            self._begin(input_ids, scores.shape[1])
        elif input_ids.shape[1] != self._length + 1:
            raise ValueError(
                f"a PolicyProcessor serves one call of model.generate: it expected {self._length + 1} ids a row, got "
                f"{input_ids.shape[1]}. Make a new one; its streams are state.streams of this one."
            )
        else:
            self._follow(input_ids)
        assert self._shard is not None and self.state is not None
        step = self.policy.step(scores, self._view, self.state, shard=self._shard, active=self._active)
        self.state, self._view, self._length = step.state, self._view.appended(step.token_ids), input_ids.shape[1]
        chosen = torch.full_like(scores, -torch.inf)
        chosen.scatter_(1, step.token_ids.clamp(min=0)[:, None], 0.0)
        return torch.where(self._active[:, None], chosen, scores)

    def _begin(self, input_ids: Tensor, vocab_size: int) -> None:
        rows = len(input_ids)
        self._shard = VocabShard(VocabLayout(vocab_size, 1, multiple_of=1))
        mask = torch.ones_like(input_ids) if self._mask is None else self._mask.to(input_ids.device)
        if mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask is {list(mask.shape)}, but model.generate has ids {list(input_ids.shape)}: give the "
                "mask of these prompts, and generate with one beam and one sequence a row."
            )
        self._view = View.of(torch.where(mask != 0, input_ids, -1))
        self._active = torch.ones(rows, dtype=torch.bool, device=input_ids.device)
        self.state = self.policy.start(rows, self._streams)

    def _follow(self, input_ids: Tensor) -> None:
        """The ids that `generate` has appended must be the chosen ones."""
        chosen, taken = self._view.prefix[:, -1], input_ids[:, -1]
        odd = (self._active & (chosen != taken)).nonzero()
        if len(odd):
            row = int(odd[0])
            raise ValueError(
                f"row {row}: the policy chose {int(chosen[row])}, but model.generate took {int(taken[row])}. If the "
                "row had ended there, give the processor the same eos_token_id; else generate must run with "
                "do_sample=False, one beam and no other processor that changes scores."
            )
        self._active = self._active & ~torch.isin(taken, self._ends.to(taken.device))
