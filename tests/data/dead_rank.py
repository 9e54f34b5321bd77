"""A training job of the core alone: rank 1 is killed between two steps. Run by `tests/e2e/test_dead_rank.py`."""

from __future__ import annotations

import os
import signal
import sys

import torch
import torch.distributed as dist

from vocab_parallel import VocabLayout, VocabParallelEmbedding, VocabParallelLMHead, VocabShard, tie_weights

STEPS, KILL_AFTER = 10, 3


def main() -> None:
    """Steps until the kill; a rank that gets to the end says so."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    shard = VocabShard(VocabLayout(1000, dist.get_world_size()), dist.group.WORLD)
    embedding, head = VocabParallelEmbedding(16, shard=shard), VocabParallelLMHead(16, shard=shard)
    tie_weights(embedding, head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for step in range(1, STEPS + 1):
        ids = torch.randint(1000, (32,), generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        loss = head.loss(embedding(ids), ids.roll(-1))
        loss.backward()
        optimizer.step()
        print(f"rank {shard.rank} step {step} loss {loss.item():.4f}", flush=True)
        if step == KILL_AFTER and shard.rank == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
    print(f"rank {shard.rank} finished", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
