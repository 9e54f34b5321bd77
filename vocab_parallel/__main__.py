"""``python -m vocab_parallel``: hands over to the app."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from vocab_parallel.app import main


def end_with_agent() -> None:
    """Has the kernel kill this rank when the torchrun that started it is gone, which torchrun itself cannot do.

    A rank that went on alone would write where the next job writes.
    """
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


if __name__ == "__main__":
    end_with_agent()
    # `record` lets torchrun print which rank failed first, and how.
    code = record(main)()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written and closed. Interpreter shutdown destroys gloo's threads in no set order; once it aborted a rank
    # that had finished its work ("terminate called without an active exception"), and with it the job.
    os._exit(code or 0)
