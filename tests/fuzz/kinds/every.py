"""The kinds by name."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fuzz.case import Draw, FuzzCase
from tests.fuzz.kinds.checkpoints import Checkpoints
from tests.fuzz.kinds.diagnostics import Diagnosed
from tests.fuzz.kinds.distillation import Distillation
from tests.fuzz.kinds.errors import Errors
from tests.fuzz.kinds.invariant import Invariant
from tests.fuzz.kinds.lookup import Head, Lookup
from tests.fuzz.kinds.losses import Losses
from tests.fuzz.kinds.migrating import Migration, ModelMigration
from tests.fuzz.kinds.models import Clipping, Training
from tests.fuzz.kinds.policies import Policies
from tests.fuzz.kinds.replicas import Replicas
from tests.fuzz.kinds.roundtrips import RoundTrips
from tests.fuzz.kinds.search import BeamSteps, Searches
from tests.fuzz.kinds.selection import Selection

_EACH: tuple[tuple[type[FuzzCase], int], ...] = (
    (Losses, 4), (Distillation, 2), (Replicas, 1), (Invariant, 1), (Lookup, 1), (Head, 1), (Clipping, 1), (Training, 1),
    (Selection, 3), (Policies, 2), (BeamSteps, 1), (Searches, 1), (Diagnosed, 1), (Migration, 1), (ModelMigration, 1),
    (Checkpoints, 1), (RoundTrips, 1), (Errors, 3),
)  # fmt: skip
KINDS: Mapping[str, type[FuzzCase]] = {kind.kind: kind for kind, _ in _EACH}
SHARES: Mapping[str, int] = {kind.kind: share for kind, share in _EACH}  # of the cases that are drawn


def make(kind: str, seed: int) -> FuzzCase:
    """The case of a kind and a seed: always the same."""
    return KINDS[kind].draw(Draw(kind, seed))
