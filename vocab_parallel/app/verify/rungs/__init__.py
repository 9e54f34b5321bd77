"""The nine rungs of the ladder, lowest first: each may rely on those below it."""

from vocab_parallel.app.verify.ladder import Rung
from vocab_parallel.app.verify.rungs import (
    end_to_end,
    head,
    migration,
    normalization,
    processors,
    sampling,
    schedules,
    search,
    sharding,
)

__all__ = ["RUNGS"]

RUNGS: tuple[Rung, ...] = (
    head.RUNG,
    normalization.RUNG,
    schedules.RUNG,
    migration.RUNG,
    sharding.RUNG,
    processors.RUNG,
    sampling.RUNG,
    search.RUNG,
    end_to_end.RUNG,
)
