"""Freed memory goes back to the system."""

from __future__ import annotations

import ctypes
import sys


def give_back() -> None:
    """Gives back what is freed: glibc keeps it, and blocks of other sizes would then be taken beside it."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)
