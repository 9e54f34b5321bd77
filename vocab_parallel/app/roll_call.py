"""When a collective fails: which ranks of the job still answer, asked through its store and not through the group."""

from __future__ import annotations

import os
import socket
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from vocab_parallel.collectives import lost_rank, short
from vocab_parallel.errors import CollectiveError

_PACKAGE = Path(__file__).parents[1]
_HELPERS = {"join", "main", "train", "wrapper", "apply", "wait"}


class RollCall:
    """One rank's part: it says at the start who it is, and at a failed collective where it waited.

    Args:
        store: The job's; torchrun's agent holds it, so that it outlives every rank.
        rank, world: Of this process in the job.
        patience: Seconds that the other ranks have to report, after this one has seen a failure.
    """

    def __init__(self, store: Store, rank: int, world: int, *, patience: float = 5.0) -> None:
        self._store = PrefixStore("roll_call", store)
        self.rank, self.world, self.patience = rank, world, patience
        self._host = socket.gethostname()
        self._store.set(f"who/{rank}", f"{os.getpid()} {self._host}")

    def explain(self, error: BaseException) -> CollectiveError | None:
        """The same error with what the roll call found; None if `error` is not that of a lost rank.

        Says at once, on stderr, what has failed: torchrun may end this process while it waits for the others.
        """
        likely = lost_rank(error)
        if likely is None or not isinstance(error, RuntimeError):
            return None
        place = where(error.__traceback__)
        words = f"{error if isinstance(error, CollectiveError) else f'{short(error)}. {likely}'} It waited in: {place}"
        print(f"CollectiveError (rank {self.rank}): {words}", file=sys.stderr, flush=True)
        return CollectiveError(f"{words}. {self._find(place)}")

    def _find(self, place: str) -> str:
        """Who else reports a failure, and what is known of those that do not."""
        others = [rank for rank in range(self.world) if rank != self.rank]
        try:
            self._store.set(f"failed/{self.rank}", place)
            until = time.monotonic() + self.patience
            silent = others
            while (silent := [rank for rank in silent if not self._store.check([f"failed/{rank}"])]) and (
                time.monotonic() < until
            ):
                time.sleep(0.1)
            told = {rank: self._store.get(f"failed/{rank}").decode() for rank in others if rank not in silent}
            lost = [self._about(rank) for rank in silent]
        except RuntimeError as error:
            return f"The job's store does not answer either ({error}): torchrun's agent has ended"
        elsewhere = [f"rank {rank} waited in: {its}" for rank, its in told.items() if its != place]
        if not lost:
            return "; ".join(["Every other rank reports a failed collective too", *elsewhere])
        return "; ".join([f"Of {self.world} ranks, these do not answer: {', '.join(lost)}", *elsewhere])

    def _about(self, rank: int) -> str:
        if not self._store.check([f"who/{rank}"]):
            return f"rank {rank}, which never started"
        pid, host = self._store.get(f"who/{rank}").decode().split(" ", 1)
        state = _state(int(pid)) if host == self._host else f"look there: py-spy dump --pid {pid}"
        return f"rank {rank} (pid {pid} on {host}: {state})"


def where(trace: TracebackType | None) -> str:
    """The package's functions that a trace passed, the outermost first, without helpers."""
    frames = traceback.extract_tb(trace)
    inside = [frame.name for frame in frames if Path(frame.filename).is_relative_to(_PACKAGE)]
    names = [name for name in inside if not name.startswith(("_", "<")) and name not in _HELPERS]
    return " > ".join(dict.fromkeys(names)) or "the caller's code"


def _state(pid: int) -> str:
    """Of a process on this machine, in words."""
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return "it has ended; torchrun's Root Cause names it, its own log has the reason"
    if letter in "ZX":
        return "it has ended; torchrun's Root Cause names it, its own log has the reason"
    if letter in "Tt":
        return f"it is stopped, by SIGSTOP or a debugger; kill -CONT {pid} lets it go on"
    return f"it runs, and hangs or works elsewhere; look: py-spy dump --pid {pid}"
