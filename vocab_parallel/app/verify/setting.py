"""What the ladder is climbed with: the user's own model, head, vocabulary and ranks, and a few fixed rows for them."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from vocab_parallel import reference
from vocab_parallel.app.config import Config
from vocab_parallel.app.hosts import Host, open_host
from vocab_parallel.app.job import Job
from vocab_parallel.app.vocabulary import Vocabulary
from vocab_parallel.collectives import all_gather, gather_rows, gather_vocab
from vocab_parallel.errors import ConfigError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.shard import VocabShard

ROWS = 24  # hidden rows that the head's checks read
IGNORE = -100
_SPREAD = 2.0  # about the standard deviation of the logits that the hidden rows give
_SLICE = 256  # ids of each rank that a slice of the table is made of, at most
_BLOCK_BYTES = 2**26  # of the table in float64 that the oracle holds at a time

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# The largest error that passes against the oracle in float64 on the same inputs: of a loss in nats where it is under 1,
# and of its size above; of gradients, of their largest entry.
TOLERANCE = {
    torch.float64: 1e-11,
    torch.float32: 1e-5,
    torch.bfloat16: 3e-2,
    torch.float16: 4e-3,
}


@dataclass(frozen=True)
class Slice:
    """A few rows of the user's table, taken from every rank's shard, as a small vocabulary of their own.

    Attributes:
        ids: the user's id of each of the V' rows.
        table: ``[V', D]`` in float64, of values that the setting's dtype holds; the same on every rank.
        bias: ``[V']``, seeded where the user's head has none.
        alone: the small vocabulary on this rank alone, storage in eights.
        shard: the small vocabulary over the ranks, storage as the number of ids needs.
    """

    ids: list[int]
    table: Tensor
    bias: Tensor
    alone: VocabShard
    shard: VocabShard


@dataclass(frozen=True)
class Setting:
    """One rank's view of what is verified. Everything in it that is not a shard is the same on every rank.

    Attributes:
        job: this rank.
        config: of the run.
        vocabulary: the run's.
        host: the run's model in the run's stack: of a run folder with the newest checkpoint's weights, else fresh.
        folder: the run folder, or None.
        dtype: of weights and hidden rows in the head's checks, whatever the host trains in.
    """

    job: Job
    config: Config
    vocabulary: Vocabulary
    host: Host
    folder: Path | None = None
    dtype: torch.dtype = torch.float32

    @classmethod
    def open(
        cls,
        job: Job,
        config: Config,
        vocabulary: Vocabulary,
        *,
        folder: Path | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Setting:
        """Builds the run's model, and loads the newest checkpoint of `folder`.

        Raises:
            ConfigError: the host cannot run here, or the folder holds no checkpoint of it.
            CheckpointLayoutError: the checkpoint does not fit.
        """
        host = open_host(config, job, vocabulary.size)
        if folder is not None:
            latest = job.agree(host.latest(folder / "checkpoints"))
            if latest is None:
                raise ConfigError(
                    f"{folder}/checkpoints holds no whole checkpoint of host={config.host}: expected a run folder that "
                    "`train` wrote, or a YAML config, which is verified with fresh weights"
                )
            host.load(latest, vocabulary_sha256=vocabulary.sha256, weights_only=True)
        return cls(job, config, vocabulary, host, folder, dtype)

    @property
    def shard(self) -> VocabShard:
        """The vocabulary over the ranks."""
        return self.host.shard

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.job.device

    @property
    def width(self) -> int:
        """D."""
        return self.weight.shape[1]

    @property
    def tolerance(self) -> float:
        """`TOLERANCE` of the dtype."""
        return TOLERANCE[self.dtype]

    @functools.cached_property
    def weight(self) -> Tensor:
        """The head's own rows ``[shard_size, D]`` in `dtype`, without gradient; padding rows are zero."""
        rows = self.host.head().weight.to(self.device, self.dtype, copy=True)
        rows[self.shard.num_valid :] = 0.0
        return rows

    @functools.cached_property
    def bias(self) -> Tensor | None:
        """The head's own bias ``[shard_size]`` in `dtype`; None if it has none."""
        bias = self.host.head().bias
        return None if bias is None else bias.to(self.device, self.dtype, copy=True)

    @functools.cached_property
    def hidden(self) -> Tensor:
        """Hidden rows ``[ROWS, D]`` in `dtype`, scaled so that the logits are spread like a trained model's.

        Collectives:
            One object gather, when it is first asked for.
        """
        blocks = torch.split(self.weight, self.block_rows)  # of which the norm makes a copy in float64
        squares = sum(float(torch.linalg.vector_norm(block, dtype=torch.float64)) ** 2 for block in blocks)
        parts = [sums for rank, sums in enumerate(self.job.gather(squares)) if rank < self.shard.tp_size]
        norm = (sum(parts) / self.shard.vocab_size) ** 0.5  # of a row
        rows = self.normal("hidden", ROWS, self.width)
        return (rows * _power_of_two(_SPREAD / norm if 0 < norm < math.inf else 1.0)).to(self.dtype)

    @functools.cached_property
    def target(self) -> Tensor:
        """Target ids int64 ``[ROWS]``: the first and last of shards, then drawn ones; every seventh row is ignored."""
        ids = torch.randint(self.shard.vocab_size, (ROWS,), generator=self.draws("target"))
        edges = torch.tensor(self.edges[:ROWS])
        ids[: len(edges)] = edges
        ids[6::7] = IGNORE
        return ids.to(self.device)

    @property
    def edges(self) -> list[int]:
        """The first and the last id of every shard that has any."""
        ranges = [self.shard.layout.range(rank) for rank in range(self.shard.tp_size)]
        return sorted({one for ids in ranges if len(ids) for one in (ids[0], ids[-1])})

    @functools.cached_property
    def logits(self) -> Tensor:
        """This rank's logits of the hidden rows, ``[ROWS, shard_size]`` in `dtype`; padding columns are -inf."""
        found = self.hidden @ self.weight.T
        if self.bias is not None:
            found += self.bias
        found[:, self.shard.num_valid :] = -torch.inf
        return found

    @functools.cached_property
    def whole_logits(self) -> Tensor:
        """The bits of all ranks' `logits`, ``[ROWS, V]``.

        Collectives:
            One all-gather, when it is first asked for.
        """
        return gather_vocab(self.shard, self.logits, dim=-1)

    def exact(self, hidden: Tensor) -> Tensor:
        """The oracle's logits of all ids: float64 ``[T, V]``, of rows ``[T, D]`` and the head as `dtype` holds them.

        Collectives:
            Those of `blocks`.
        """
        found = torch.empty(len(hidden), self.shard.vocab_size, dtype=torch.float64, device=self.device)
        for ids, rows, bias in self.blocks():
            found[:, ids] = reference.logits(hidden.double(), rows, bias)
        return found

    @property
    def block_rows(self) -> int:
        """Rows of a rank that the oracle holds at a time."""
        return max(1, _BLOCK_BYTES // (8 * self.width * self.shard.tp_size))

    def blocks(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """The whole head in float64, block by block: ids as columns of whole logits, rows ``[n, D]``, bias ``[n]``.

        Collectives:
            An all-gather a block (two with a bias).

        Memory:
            One block over all ranks, at most 64 MiB in float64, so that a head of any size has an oracle.
        """
        shard, step = self.shard, self.block_rows
        for at in range(0, shard.shard_size, step):
            rows = all_gather(shard, self.weight[at : at + step]).wait()
            bias = None if self.bias is None else all_gather(shard, self.bias[at : at + step]).wait()
            for rank in range(shard.tp_size):
                ids = shard.layout.range(rank)[at : at + step]
                if len(ids):
                    own = None if bias is None else bias[rank, : len(ids)].double()
                    yield slice(ids[0], ids[-1] + 1), rows[rank, : len(ids)].double(), own

    @functools.cached_property
    def slice(self) -> Slice:
        """A small vocabulary of the user's own rows.

        Collectives:
            Those of a shard's construction, an object gather, and an all-gather (two with a bias), when it is first
            asked for.
        """
        shard = self.shard
        counts = [min(_SLICE, len(shard.layout.range(rank))) for rank in range(shard.tp_size)]
        ids = [one for rank, count in enumerate(counts) for one in shard.layout.range(rank)[:count]]
        size = len(ids) - (1 if len(ids) % max(2, shard.tp_size) == 0 and len(ids) > 2 else 0)  # uneven
        own = counts[shard.rank]
        table = gather_rows(shard, self.weight[:own], counts)[:size].double()
        if self.bias is None:
            bias = self.normal("bias", size).to(self.dtype).double()
        else:
            bias = gather_rows(shard, self.bias[:own], counts)[:size].double()
        spread = VocabShard(VocabLayout(size, shard.tp_size, multiple_of=1), shard.group)
        return Slice(ids[:size], table, bias, VocabShard(VocabLayout(size, 1, multiple_of=8)), spread)

    def draws(self, name: str) -> torch.Generator:
        """Random numbers that depend on this name and the run's seed alone."""
        return torch.Generator().manual_seed(zlib.crc32(name.encode()) ^ self.config.train.seed)

    def normal(self, name: str, *shape: int) -> Tensor:
        """float32 of the standard normal distribution, from `draws`, on the device."""
        return torch.randn(*shape, generator=self.draws(name)).to(self.device)


def _power_of_two(value: float) -> float:
    """The nearest: a product with it is exact, and small differences in `value` do not matter."""
    return float(2.0 ** round(float(torch.tensor(value, dtype=torch.float64).log2())))
