"""The head's own rows as the rungs of decoding read them: this rank's columns, and whole rows for the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vocab_parallel.app.verify.setting import Setting
from vocab_parallel.decode.transforms.transform import View
from vocab_parallel.select.streams import Streams
from vocab_parallel.shard import VocabShard

ROWS = 6
LOGPROB_TOLERANCE = 1e-8  # nats: probabilities are integers of 2**-40 of the largest or finer


@dataclass(frozen=True)
class Rows:
    """Some rows of scores over the ranks, and whole.

    Attributes:
        setting: whose ranks they are on.
        shard: which columns are here.
        local: ``[T, shard_size]``; NaN in padding columns, which nothing may read.
        whole: ``[T, V]``, the same bits on every rank; on the CPU.
        mine: int64: the rows that this rank compares with the oracle. The ranks that share the vocabulary have all of
            them together, and compare what they chose with each other: so every row is compared.
    """

    setting: Setting
    shard: VocabShard
    local: Tensor
    whole: Tensor
    mine: Tensor

    def streams(self) -> Streams:
        """A stream for each row."""
        return Streams.of([self.setting.config.generate.seed] * len(self.whole), list(range(len(self.whole))))

    def view(self) -> View:
        """Requests whose ids so far are the shards' first and last: two of prompt, one generated."""
        edges, last = self.setting.edges, self.shard.vocab_size - 1
        ids = [[min(edges[(row + at) % len(edges)], last) for at in range(3)] for row in range(len(self.whole))]
        return View.of(ids, [2] * len(ids)).to(self.local.device)

    def wrong(self, got: Tensor, want: Tensor) -> float:
        """How many of `got` ``[T, ...]``, a result that every rank has, are not the oracle's, or differ between ranks.

        Args:
            want: of the rows `mine`.

        Collectives: one object broadcast.
        """
        got = got.cpu()
        return unlike_first(self.setting, got) + differing(got[self.mine], want)


def own_rows(setting: Setting) -> Rows:
    """Rows of the head's logits: as they are, sharper, cut off in whole nats so that the best tie, and in quarters.

    Collectives: those of `Setting.hidden` and `Setting.whole_logits`.
    """
    index = torch.arange(ROWS) % len(setting.hidden)

    def varied(logits: Tensor) -> Tensor:
        rows = logits[index.to(logits.device)]
        rows[1::4] *= 4
        rows[2::4] = rows[2::4].round().clamp(max=2.0)
        rows[3::4] = (rows[3::4] * 16).round() / 4
        return rows

    local = varied(setting.logits)
    local[:, setting.shard.num_valid :] = torch.nan
    return rows_of(setting, setting.shard, local, varied(setting.whole_logits.cpu()))


def small_rows(setting: Setting, whole: Tensor) -> Rows:
    """Whole rows ``[T, V]`` of any small vocabulary over the setting's ranks; some may hold no column.

    Collectives: those of a shard's construction.
    """
    shard = setting.job.shard(whole.shape[1], 1)
    return rows_of(setting, shard, shard.slice(whole.to(setting.device), -1, fill=torch.nan), whole)


def rows_of(setting: Setting, shard: VocabShard, local: Tensor, whole: Tensor) -> Rows:
    """`Rows` with the ranks' shares of them."""
    return Rows(setting, shard, local, whole, torch.arange(len(whole))[shard.rank :: shard.tp_size])


def differing(got: Tensor, want: Tensor) -> float:
    """How many entries are not the same; all of them where the shapes are not."""
    return float((got != want).sum()) if got.shape == want.shape else math.inf


def unlike_first(setting: Setting, mine: Tensor) -> float:
    """How many entries differ from the first rank's. One object broadcast."""
    mine = mine.cpu()
    return differing(mine, setting.job.agree(mine))


def not_raised_alike(setting: Setting, call: Callable[[], object], kind: type[Exception]) -> float:
    """How many ranks `call` did not raise `kind` on, or in other words than on the first. One object gather."""
    words = None
    try:
        call()
        setting.shard.raise_deferred()
    except kind as error:
        words = str(error)
    said = setting.job.gather(words)
    return float(sum(one is None or one != said[0] for one in said))
