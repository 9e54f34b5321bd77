"""One progress bar on a terminal; a few plain lines anywhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from tqdm import tqdm


class Progress:
    """Shows steps with loss, tokens/s and peak memory.

    Args:
        total: steps of the whole run.
        done: steps done before.
        visible: only the first rank shows anything.
        lines: about how many lines to print where there is no terminal.
    """

    def __init__(self, total: int, done: int, *, visible: bool, lines: int = 20) -> None:
        self._terminal = sys.stderr.isatty()
        self._visible = visible
        self._total = total
        self._every = max(1, -(-total // lines))
        self._bar = tqdm(total=total, initial=done, disable=not (visible and self._terminal), unit="step")

    def show(self, row: Mapping[str, Any]) -> None:
        """Takes one step's line of metrics."""
        step = int(row["step"])
        words = f"loss {row['loss']:.3f}"
        if row["validation_loss"] is not None:
            words += f", validation {row['validation_loss']:.3f}"
        words += f", {row['tokens_per_second']:,.0f} tokens/s, peak {row['peak_memory_bytes'] / 1e6:,.0f} MB"
        self._bar.set_postfix_str(words, refresh=False)
        self._bar.update()
        if self._visible and not self._terminal and (step % self._every == 0 or step in (1, self._total)):
            print(f"step {step:>{len(str(self._total))}}/{self._total}  {words}", file=sys.stderr, flush=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()
