"""Which tensors of an optimizer's state have a row for each token."""

from __future__ import annotations

from collections.abc import Sequence

# Sums over the rows, one number a column: Adafactor's in torch, and in Transformers and fairseq; CAME's.
_COLUMN_STATES = ("col_var", "exp_avg_sq_col", "exp_avg_res_col")
# A weight in full precision, of which the model's is a rounded copy.
MASTER_WEIGHTS = ("master_weight", "master_param", "master", "fp32_master")


def is_row_state(name: str, value_shape: Sequence[int], parameter_shape: Sequence[int]) -> bool:
    """Whether a state of a table `[rows, ...]` is addressed by row: row i of it belongs to row i of the table.

    AdamW's `exp_avg`, `exp_avg_sq` and `max_exp_avg_sq`, the `momentum_buffer` of SGD and Muon, a master weight;
    Adafactor's `row_var` `[rows, 1]` and `exp_avg_sq_row` `[rows]`. Not column factors, though a square table's have
    as many entries; not scalars such as `step`.

    Args:
        name: Of the state, the last part of a dotted name counts.
        value_shape: Its shape, of a shard or of the whole table.
        parameter_shape: Shape of the shard or table that it belongs to.
    """
    if name.rpartition(".")[2] in (*_COLUMN_STATES, "step"):
        return False
    return len(value_shape) > 0 and tuple(value_shape[:1]) == tuple(parameter_shape[:1])


def is_known_other(name: str, value_shape: Sequence[int]) -> bool:
    """Whether a state that is not of rows is one that stays as it is: a column factor, or a single number."""
    return name.rpartition(".")[2] in _COLUMN_STATES or all(size == 1 for size in value_shape)


def is_master_weight(name: str) -> bool:
    """Whether a state is the full-precision weight."""
    return name.rpartition(".")[2] in MASTER_WEIGHTS
