"""A checkpoint of ZeRO 1, 2 or 3 to one of ours, by one process, without DeepSpeed and without its classes."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import Tensor

from vocab_parallel.checkpoint.exchange.targets import require_free, write_ours
from vocab_parallel.checkpoint.migration.assets import VOCABULARY
from vocab_parallel.checkpoint.rows import Rows
from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.integrations.deepspeed.zero_files import Cut, ZeroFiles
from vocab_parallel.integrations.deepspeed.zero_tag import find_tag
from vocab_parallel.layout import VocabLayout
from vocab_parallel.vocabulary.identity import VocabIdentity

MASTER = "master_weight"


def from_deepspeed(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    tp_size: int = 1,
    vocab_size: int | None = None,
    multiple_of: int = 128,
) -> Path:
    """Makes a checkpoint of ours from what an engine of `integrations.deepspeed.initialize` saved.

    Any number of data-parallel and tensor-parallel ranks. Weights have the model's dtype; where that is a 16-bit one,
    the float32 masters are the optimizer's state `master_weight`. Moments and the count of steps are by parameter, the
    vocabulary's with real rows only, a tied weight once. Not kept: the optimizer's hyperparameters, the learning-rate
    scheduler, the loss scale and the client state.

    Args:
        source: The folder of one tag, or the one above it with its file ``latest``.
        target: The checkpoint to write, such as ``run/step-00000042``.
        tp_size: Files are cut along the shards of so many ranks; any number loads.
        vocab_size: Real rows that you expect; None takes what the checkpoint says.
        multiple_of: As of `VocabLayout`.

    Returns:
        `target`.

    Memory:
        Three blocks of 4 MiB: of a tensor, and of DeepSpeed's files, which are mapped while they are read.

    Raises:
        CheckpointLayoutError: Not saved by an engine of `initialize`; stage 0; files of ranks are missing, damaged or
            do not fit together; another vocabulary than expected; optimizer state that is not elementwise; `target`
            exists.
    """
    source, target = Path(source), Path(target)
    require_free(target, source)
    files = ZeroFiles.open(find_tag(source))
    if vocab_size is not None and vocab_size != files.vocab_size:
        raise CheckpointLayoutError(
            f"{files.folder} has a vocabulary of {files.vocab_size} real rows, not the {vocab_size} asked for. Convert "
            "it as it is, and then change it: python -m vocab_parallel migrate"
        )
    layout = VocabLayout(files.vocab_size, tp_size, multiple_of=multiple_of)
    parts, scalars = _parts(files, layout)
    table = files.folder.parent / VOCABULARY  # as the app saves it beside the engine's tag
    identity = VocabIdentity.read(table) if table.is_file() else None
    if identity is not None and identity.size != files.vocab_size:
        raise CheckpointLayoutError(
            f"{table} has {identity.size} ids, {files.folder} has {files.vocab_size} real rows: the table is of "
            "another model, put it elsewhere"
        )
    known = {} if identity is None else {"vocabulary_sha256": identity.sha256}
    write_ours(
        target, parts, layout, step=files.step, tables=[name for name in files.names if name in files.tables],
        ties=files.aliases, scalars=scalars, extra={"deepspeed": files.origin(), **known}, host="deepspeed",
        identity=identity, assets=None if identity is None else {VOCABULARY: table},
    )  # fmt: skip
    return target


def _parts(files: ZeroFiles, layout: VocabLayout) -> tuple[list[dict[str, Tensor]], dict[str, float]]:
    """What the virtual ranks write, and the optimizer's numbers."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(layout.tp_size)]
    scalars: dict[str, float] = {}
    for name in files.names:
        weight, states = files.weight(name), files.states(name)
        keyed = {f"model.{name}": weight}
        for state, cut in states.items():
            if state is not None:
                keyed[f"optimizer.{name}.{state}"] = cut
            elif cut.dtype != weight.dtype:
                keyed[f"optimizer.{name}.{MASTER}"] = cut
        for key, cut in keyed.items():
            _place(key, cut, parts, layout if name in files.tables else None)
        for number, value in files.numbers(name).items():
            if number == "step":  # as torch's optimizers keep it
                parts[0][f"optimizer.{name}.step"] = torch.tensor(float(value))
            else:
                scalars[f"optimizer.{name}.{number}"] = value
    parts[0].update({f"model.{name}": buffer for name, buffer in files.buffers.items()})
    return parts, scalars


def _place(key: str, cut: Cut, parts: list[dict[str, Tensor]], layout: VocabLayout | None) -> None:
    """A tensor to the virtual ranks that write it: a table's rows to their owners, all else to the first."""
    if not cut.shape or not cut.shape.numel():
        parts[0][key] = cut.rows(0, 1).reshape(cut.shape) if not cut.shape else torch.empty(cut.shape, dtype=cut.dtype)
        return
    for rank, part in enumerate(parts if layout is not None else parts[:1]):
        mine = range(cut.shape[0]) if layout is None else layout.range(rank)
        part[key] = Rows.made(cut.shape, cut.dtype, mine.start, len(mine), cut.rows)
