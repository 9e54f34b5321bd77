"""The token mean over data-parallel ranks whose rows differ in number: sum over count, never a mean of means."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.distributed as dist

from tests.multirank.sharded import Case, call, local, shard_of, unsharded, whole
from tests.multirank.shared_world import Batch
from tests.tolerances import require_close, require_equal
from vocab_parallel import reference

SETTINGS = [
    {"linear": False},
    {"bias": True, "chunk_size": 2},
    {"bias": True, "weighted": True, "options": {"z_loss": 0.1, "label_smoothing": 0.1}},
    {"linear": False, "weighted": True, "soft": True},
    {"spread": "uneven", "chunk_size": 2},
    {"function": "kl_div", "linear": False, "soft": True},
    {"function": "kl_div", "soft": True, "bias": True},
    {"function": "row_loss"},
]
IGNORED = [("some", "some"), ("all", "none"), ("all", "all")]


def replica_of(settings, ignored, replica):
    """One of two replicas: the same parameters, other rows and another number of them."""
    case = Case("replica", leading=(5 + 4 * replica,), ignored=ignored[replica], seed=replica, **settings)
    first = whole(replace(case, leading=(5,), seed=0))
    return case, whole(case) | {name: first[name] for name in case.names[1:]}


@functools.cache
def _groups():
    """The ranks of each of two replicas, and the pairs that hold the same ids; all groups are made on all ranks."""
    tp = dist.get_world_size() // 2
    shards = [dist.new_group(list(range(at, at + tp))) for at in (0, tp)]
    return shards, [dist.new_group([at, at + tp]) for at in range(tp)]


def _two_replicas(rank, settings, ignored):
    """This replica's loss, and its gradients averaged over the replicas as a data-parallel wrapper does it."""
    shards, pairs = _groups()
    replica, of_replica = divmod(rank, len(pairs))
    case, tensors = replica_of(settings, ignored, replica)
    case = replace(case, options=case.options | {"mean_group": pairs[of_replica]})
    shard = shard_of(case.vocab, group=shards[replica])
    mine = local(case, tensors, shard)
    for name in case.names:
        mine[name].requires_grad_()
    with torch.no_grad():
        silent = call(case, mine, shard)
    loss = call(case, mine, shard)
    loss.backward()
    require_equal("loss without grad", [loss.detach(), silent])
    result = {"loss": loss.detach(), "d_input": mine["input"].grad / 2}  # the trunk's gradients are averaged later
    if not case.linear:
        result["d_input"] = result["d_input"][:, : shard.num_valid]
    for name in case.names[1:]:
        dist.all_reduce(mine[name].grad, group=pairs[of_replica])
        result[f"d_{name}"] = mine[name].grad[: shard.num_valid] / 2
    return result


REPLICAS = Batch(_two_replicas, list(product(SETTINGS, IGNORED)))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("ignored", IGNORED, ids=str)
def test_gradients_that_are_averaged_over_replicas_are_those_of_the_global_token_mean(settings, ignored, world):
    ranks = REPLICAS(world, settings, ignored)
    total, count, leaves = 0.0, 0, []
    for replica in (0, 1):
        case, tensors = replica_of(settings, ignored, replica)
        leaves.append({name: tensors[name].clone().requires_grad_() for name in case.names})
        logits = reference.logits(*leaves[-1].values()) if case.linear else leaves[-1]["input"]
        total = total + unsharded(replace(case, options=case.options | {"reduction": "sum"}), logits, tensors)
        count += len(tensors["target"]) if case.soft else int((tensors["target"] != -100).sum())
    expected = total / max(count, 1)
    expected.backward()
    require_equal("loss on every rank", [result["loss"] for result in ranks])
    require_close("loss", ranks[0]["loss"], expected.detach(), torch.float64)
    tp = world // 2
    for replica, leaf in enumerate(leaves):
        mine = ranks[replica * tp : (replica + 1) * tp]
        parts = [result["d_input"] for result in mine]
        d_input = parts[0] if case.linear and not case.spread else torch.cat(parts, 0 if case.linear else -1)
        require_close("d_input", d_input, leaf["input"].grad, torch.float64)
        for name in case.names[1:]:
            d_table = torch.cat([result[f"d_{name}"] for result in mine])
            require_close(f"d_{name}", d_table, sum(other[name].grad for other in leaves), torch.float64)
