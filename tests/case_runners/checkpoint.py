"""Checkpoints: other numbers of ranks, and a tie that the file has and the model has not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.batch import Attempt, assert_all_raise, attempt
from tests.case_runners.common import Expected, Ranks
from tests.cases import Case, as_tensor
from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, tie_weights
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint

MOMENTS = ("exp_avg", "exp_avg_sq")


class Table(nn.Module):
    """An embedding, and a head over the same ids."""

    def __init__(self, shard: VocabShard, width: int, tied: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.embed = VocabParallelEmbedding(width, shard=shard, dtype=dtype)
        self.lm_head = VocabParallelLMHead(width, shard=shard, dtype=dtype)
        if tied:
            tie_weights(self.embed, self.lm_head)

    def fill_(self, embed: torch.Tensor, head: torch.Tensor | None = None) -> None:
        shard = self.embed.shard
        with torch.no_grad():
            self.embed.weight.copy_(shard.slice(embed))
            self.lm_head.weight.copy_(shard.slice(embed if head is None else head))


def folder(ranks: Ranks) -> Path:
    """One that all ranks see."""
    made = [tempfile.mkdtemp() if ranks.rank == 0 else ""]
    if dist.is_initialized():
        dist.broadcast_object_list(made, 0)
    return Path(made[0])


def shard_of(vocab: int, tp: int) -> VocabShard:
    """Over the first `tp` ranks: a shard of one rank is every rank's own."""
    group = dist.new_group(list(range(tp))) if tp > 1 else None
    member = not dist.is_initialized() or dist.get_rank() < tp
    return VocabShard(VocabLayout(vocab, tp, multiple_of=1), group) if member else None  # type: ignore[return-value]


def observe_reshard(case: Case, dtype: torch.dtype, ranks: Ranks) -> list[dict[str, Any]]:
    """Rows filled with their ids go from two ranks to four, to one: weight and moments of each on the way."""
    place, seen, vocab = folder(ranks), [], case.inputs["vocab"]
    assert case.inputs["weight_row_value"] == "global id"
    ids = torch.arange(vocab).to(dtype)[:, None].expand(vocab, 2)
    for step, tp in enumerate((2, 4, 1)):
        shard = shard_of(vocab, tp)
        if shard is None:
            seen.append({})
            dist.barrier()
            continue
        model = Table(shard, 2, True, dtype)
        optimizer = torch.optim.AdamW(model.parameters())
        if step == 0:
            model.fill_(ids)
            model.embed.weight.grad = torch.zeros_like(model.embed.weight)
            optimizer.step()
            model.fill_(ids)
            for at, name in enumerate(MOMENTS):
                optimizer.state[model.embed.weight][name].copy_(shard.slice(ids * (at + 2)))
        else:
            with torch.no_grad():
                model.embed.weight.fill_(torch.nan)
            load_checkpoint(place / f"step-{step - 1:08d}", model, optimizer)
        save_checkpoint(place / (str(ranks.rank) if tp == 1 else ""), model, optimizer, step)
        state = optimizer.state[model.embed.weight]
        seen.append({"weight": model.embed.weight.detach().clone(), **{name: state[name].clone() for name in MOMENTS}})
        if dist.is_initialized():
            dist.barrier()
    return seen


def check_reshard(case: Case, dtype: str, tp: int, expect: Expected, seen: list[list[dict[str, Any]]]) -> None:
    assert expect.take("optimizer_moments") == "same mapping"
    for at, ranks in enumerate((2, 4, 1)):
        for rank, row_ids in enumerate(expect.take(f"tp{ranks}")):
            found, real = seen[rank][at], [one for one in row_ids if one is not None]
            for factor, name in enumerate(("weight", *MOMENTS), 1):
                want = torch.tensor([one * factor for one in real] + [0] * (len(row_ids) - len(real)))
                got = found[name]
                assert torch.equal(got.double(), want.double()[:, None].expand(-1, 2)), (case.id, ranks, rank, name)


def observe_tie_change(case: Case, dtype: torch.dtype, ranks: Ranks) -> dict[str, Any]:
    """Saved tied, loaded untied without and with the option; saved untied, loaded tied."""
    place, embed = folder(ranks), as_tensor(case.inputs["embed"], dtype)
    shard = ranks.shard(case, len(embed))
    models = {tied: Table(shard, 2, tied, dtype) for tied in (True, False)}
    models[True].fill_(embed)
    tied = save_checkpoint(place / "tied", models[True], None, 1)
    models[False].fill_(embed, embed.flip(0))
    untied = save_checkpoint(place / "untied", models[False], None, 1)
    models[False].fill_(embed)
    equal = save_checkpoint(place / "equal", models[False], None, 1)
    with torch.no_grad():
        models[False].lm_head.weight.fill_(torch.nan)
    seen: dict[str, Any] = {"error": attempt(lambda: load_checkpoint(tied, models[False]))}
    load_checkpoint(tied, models[False], tie="untie")
    seen["head"] = torch.equal(models[False].lm_head.weight, shard.slice(embed))
    seen["apart"] = models[False].lm_head.weight.data_ptr() != models[False].embed.weight.data_ptr()
    models[True].fill_(torch.zeros_like(embed))
    seen["differ"] = attempt(lambda: load_checkpoint(untied, models[True]))
    seen["unchanged"] = not models[True].embed.weight.any()
    load_checkpoint(equal, models[True])
    seen["equal"] = torch.equal(models[True].embed.weight, shard.slice(embed))
    return seen


def check_tie_change(case: Case, dtype: str, tp: int, expect: Expected, seen: list[dict[str, Any]]) -> None:
    assert expect.take("untied_head") == "copy of embed or an error, never uninitialised"
    assert expect.take("tied_from_untied") == "error if the two differ"
    for what, words in (("error", ["embed.weight", "lm_head.weight", "untie"]), ("differ", ["row", "0"])):
        attempts: list[Attempt] = [one[what] for one in seen]
        assert_all_raise(f"{case.id} {what}", attempts, ["CheckpointLayoutError"], words)
    for one in seen:
        assert one["head"] and one["apart"] and one["unchanged"] and one["equal"], one
