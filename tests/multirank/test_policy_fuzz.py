"""20,000 rows through random chains of transforms on 1 to 4 ranks: id for id what the oracle chooses."""

from __future__ import annotations

import math

import torch

from tests.multirank.sharded import TP, shard_of
from tests.multirank.shared_world import Batch
from tests.unit.policies import chain_of, logits_of, request_lists
from vocab_parallel import Streams
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.reference.policy import run_policy

ROWS = 50  # of each chain, every one with its own parameters, prefix and stream
CHAINS = 100  # times 50 rows, times 4 numbers of ranks
LONGEST = 7
VOCABULARIES = (9, 5, 9, 23)  # over 4 ranks: 3 3 3 0, 2 2 1 0, 6 6 6 5
DTYPES = (torch.bfloat16, torch.float32, torch.float32, torch.float64)


def given(seed):
    vocab = VOCABULARIES[seed % 4]
    policy = chain_of(seed, ROWS, LONGEST, vocab)
    logits = logits_of(seed, ROWS, DTYPES[seed // 4 % 4], masked=seed % 3 == 0, vocab=vocab)
    return policy, logits, *request_lists(torch.Generator().manual_seed(seed), ROWS, vocab)


def streams_of(seed):
    return Streams.of([seed] * ROWS, list(range(ROWS)))


def _chosen(rank):
    """The ids of every chain, one after the other."""
    chosen = []
    for seed in range(CHAINS):
        policy, logits, prompts, generated = given(seed)
        shard = shard_of(logits.shape[1])
        view = View.of([[*p, *g] for p, g in zip(prompts, generated, strict=True)], [len(p) for p in prompts])
        mine = shard.slice(logits, -1, fill=math.nan)
        chosen.append(policy.step(mine, view, policy.start(ROWS, streams_of(seed)), shard=shard).token_ids)
    return chosen


CHOSEN = Batch(_chosen, [()])
EXPECTED: list[torch.Tensor] = []  # of every chain, once for all numbers of ranks


def expected():
    for seed in range(len(EXPECTED), CHAINS):
        policy, logits, prompts, generated = given(seed)
        EXPECTED.append(run_policy(policy.to_dict(), logits, prompts, generated, streams_of(seed).bits()).token_ids)
    return EXPECTED


@TP
def test_every_rank_chooses_the_oracles_ids_after_any_chain_of_transforms(tp):
    cases = 0
    for chosen in CHOSEN(tp):
        for seed, (got, wanted) in enumerate(zip(chosen, expected(), strict=True)):
            rows = (got != wanted).nonzero()[:, 0].tolist()
            assert not rows, f"rows {rows} of\n{given(seed)[0].to_json()}"
        cases = len(chosen) * ROWS
    assert 4 * cases == 20_000


def test_the_chains_hold_every_transform_in_chains_of_every_length():
    chains = [[one.name for one in given(seed)[0].transforms] for seed in range(CHAINS)]
    names = {name for chain in chains for name in chain}
    assert len(names) == 22 and {len(chain) for chain in chains} == set(range(1, LONGEST + 1))
    for name in names:
        assert any(name in chain for chain in chains), name
