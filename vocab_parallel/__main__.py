"""``python -m vocab_parallel``: hands over to the app."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.errors import record

from vocab_parallel.app import main

if __name__ == "__main__":
    # `record` lets torchrun print which rank failed first, and how.
    code = record(main)()
    sys.stdout.flush()
    sys.stderr.flush()
    # All is written and closed. Interpreter shutdown destroys gloo's threads in no set order; once it aborted a rank
    # that had finished its work ("terminate called without an active exception"), and with it the job.
    os._exit(code or 0)
