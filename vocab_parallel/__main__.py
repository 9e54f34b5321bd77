"""``python -m vocab_parallel``: hands over to the app."""

from __future__ import annotations

import sys

from torch.distributed.elastic.multiprocessing.errors import record

from vocab_parallel.app import main

if __name__ == "__main__":
    # `record` lets torchrun print which rank failed first, and how.
    sys.exit(record(main)())
