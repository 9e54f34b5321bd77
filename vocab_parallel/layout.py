"""Which rank owns which token id. Pure integers: no tensor, no process group."""

from __future__ import annotations

from dataclasses import dataclass, field

from vocab_parallel.errors import LayoutError, TokenRangeError


@dataclass(frozen=True)
class VocabLayout:
    """The vocabulary cut into `tp_size` equal shards of consecutive rows.

    Storage is equal on all ranks. Real ids come first, so the last ranks may hold fewer real ids, or none: 9 ids over 4
    ranks with `multiple_of=1` are 3, 3, 3, 0. Rows past the real ids are padding: storage that no operation reads.

    Args:
        vocab_size: Number of real token ids.
        tp_size: Number of ranks that share the vocabulary.
        multiple_of: `shard_size` is rounded up to a multiple of this (GEMM tiles like 128).

    Raises:
        LayoutError: A size below 1.
    """

    vocab_size: int
    tp_size: int
    multiple_of: int = field(default=128, kw_only=True, compare=False)
    padded_size: int = field(init=False)

    def __post_init__(self) -> None:
        for name in ("vocab_size", "tp_size", "multiple_of"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"{name} must be an integer of at least 1, got {value!r}")
        unit = self.multiple_of * self.tp_size
        object.__setattr__(self, "padded_size", -(-self.vocab_size // unit) * unit)

    @classmethod
    def from_padded(cls, vocab_size: int, padded_size: int, tp_size: int) -> VocabLayout:
        """The layout of a table that already has `padded_size` rows, for example one from a checkpoint.

        Raises:
            LayoutError: `padded_size` is below `vocab_size`, or does not divide by `tp_size`.
        """
        layout = cls(vocab_size, tp_size, multiple_of=1)
        if padded_size < vocab_size:
            raise LayoutError(
                f"padded_size {padded_size} is below vocab_size {vocab_size}: {vocab_size - padded_size} real ids "
                f"would have no row. Pad to at least {layout.padded_size} (the next multiple of tp_size {tp_size})."
            )
        if padded_size % tp_size:
            raise LayoutError(
                f"padded_size {padded_size} does not divide by tp_size {tp_size}: shards must have equal storage. "
                f"The nearest that does is {-(-padded_size // tp_size) * tp_size}."
            )
        object.__setattr__(layout, "padded_size", padded_size)
        return layout

    @property
    def shard_size(self) -> int:
        """Rows allocated on each rank, real and padding."""
        return self.padded_size // self.tp_size

    def range(self, rank: int) -> range:
        """The real token ids of `rank`; empty where its whole shard is padding."""
        if not 0 <= rank < self.tp_size:
            raise LayoutError(f"rank {rank} is outside [0, {self.tp_size})")
        start = min(rank * self.shard_size, self.vocab_size)
        return range(start, min(start + self.shard_size, self.vocab_size))

    def owner(self, token_id: int) -> int:
        """The rank that holds the row of `token_id`.

        Raises:
            TokenRangeError: The id is not a real one.
        """
        if not 0 <= token_id < self.vocab_size:
            raise TokenRangeError(f"token id {token_id} is outside [0, {self.vocab_size})")
        return token_id // self.shard_size

    def __str__(self) -> str:
        return f"V={self.vocab_size} padded to {self.padded_size} over {self.tp_size} ranks of {self.shard_size}"
