"""How the ranks of one attempt find each other in a store that outlives it."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from vocab_parallel.errors import CollectiveError

_POLL_S = 0.02


def meet(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """A part of `store` that is this attempt's alone; returns when all of its ranks are here.

    torchrun's store stays over a restart. A rank that looks for the others in it finds the addresses of the attempt
    before, and its count of restarts is no name for an attempt, because each node's agent has its own. So rank 0 gives
    the attempt a name, and tells it to everyone who says hello with a name of their own: those of before do not answer.

    Raises:
        CollectiveError: Naming the ranks that did not come in time.

    Source:
        github.com/pytorch/pytorch/issues/135712
    """
    mine = uuid.uuid4().hex
    store.set(f"hello/{rank}", mine)
    if rank == 0:
        _gather(store, world, mine, time.monotonic() + timeout.total_seconds())
        return PrefixStore(mine, store)
    try:
        store.wait([f"called/{mine}"], timeout)
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {rank}: rank 0 did not come within {timeout.total_seconds():.0f} s of this one's start; its log has "
            f"the reason ({error})"
        ) from error
    attempt = store.get(f"called/{mine}").decode()
    store.set(f"here/{attempt}/{rank}", "")
    return PrefixStore(attempt, store)


def _gather(store: Store, world: int, attempt: str, until: float) -> None:
    """On rank 0: calls every rank by the name that it said last, until all have answered."""
    missing = list(range(1, world))
    while missing := [rank for rank in missing if not store.check([f"here/{attempt}/{rank}"])]:
        if time.monotonic() > until:
            raise CollectiveError(
                f"rank 0: of {world} ranks, {missing} did not come in time after the start; their logs have the reason"
            )
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                store.set(f"called/{store.get(f'hello/{rank}').decode()}", attempt)
        time.sleep(_POLL_S)
