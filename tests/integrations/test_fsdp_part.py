"""An FSDP2 model that covers a part of the job is saved and loaded by its own ranks alone."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.integrations.fsdp_models import SETTINGS, Sharded
from tests.integrations.test_fsdp import mine
from tests.ranks import run_ranks
from vocab_parallel import VocabLayout, VocabShard
from vocab_parallel.checkpoint import load_checkpoint, save_checkpoint
from vocab_parallel.checkpoint.together import ranks_of
from vocab_parallel.integrations import fsdp
from vocab_parallel.integrations.fsdp.setup import reshard

VOCAB = 9


def _half(rank, folder):
    """Ranks 0 and 1 train, save and load; 2 and 3 exchange something else over their own group, and save nothing."""
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("part", "dp", "tp"))
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    if rank > 1:
        values = torch.tensor([float(rank)])
        dist.all_reduce(values, group=halves[1])
        return values
    mesh = mesh["dp", "tp"]
    shard = VocabShard(VocabLayout(VOCAB, 1, multiple_of=1), mesh.get_group("tp"))
    model = Sharded(shard, True, mean_group=mesh.get_group("dp"))
    fsdp.apply(model, mesh, shard=shard)
    optimizer = torch.optim.AdamW(model.parameters(), **SETTINGS)
    model(*mine(mesh, VOCAB, 0)).backward()
    optimizer.step()
    ranks = ranks_of(model, shard, None)
    assert dist.get_process_group_ranks(ranks.group) == [0, 1] and ranks_of(model, shard, None) is ranks
    fsdp.save(Path(folder) / "whole", model, optimizer)
    saved = fsdp.full_state_dict(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    fsdp.load(Path(folder) / "whole", model, optimizer)
    loaded = fsdp.full_state_dict(model)
    assert all(torch.equal(loaded[name], value) for name, value in saved.items())
    reshard(model)
    save_checkpoint(Path(folder) / "steps", model, optimizer, step=1)
    load_checkpoint(Path(folder) / "steps" / "step-00000001", model, optimizer)
    return saved["embedding.weight"]


def test_half_of_a_job_saves_and_loads_while_the_other_half_does_something_else(tmp_path: Path) -> None:
    first, second, third, fourth = run_ranks(_half, 4, str(tmp_path), timeout=100)
    assert torch.equal(first, second) and first.isfinite().all()
    assert third.item() == fourth.item() == 5.0
