"""What DeepSpeed would unpickle of a checkpoint, looked at before it does: its loader runs what a file tells it to."""

from __future__ import annotations

from pathlib import Path

from vocab_parallel.archives import names_in
from vocab_parallel.errors import CheckpointLayoutError

# What DeepSpeed 0.19 pickles of its own; nothing in them acts when it is made.
KNOWN = frozenset({
    "argparse.Namespace", "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler", "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address", "types.SimpleNamespace",
})  # fmt: skip


def require_known(folder: Path) -> None:
    """Raises unless the files of a checkpoint name nothing but tensors, plain values and DeepSpeed's own classes.

    Raises:
        CheckpointLayoutError: Naming the file and the class or function that it would have called.
    """
    for path in sorted(folder.rglob("*.pt")):
        try:
            unknown = names_in(path) - KNOWN
        except Exception as error:  # a broken archive raises nearly anything
            what = f"{type(error).__name__}: {str(error)[:200]}"
            raise CheckpointLayoutError(f"{path} is damaged, or made to do harm ({what})") from error
        if unknown:
            raise CheckpointLayoutError(
                f"{path} names {min(unknown)[:100]}, which DeepSpeed would import and call as it reads it. Nothing "
                "was read. If you know who wrote the file, load it in an engine yourself, with engine.load_checkpoint, "
                "or convert it with to_universal(..., trusted=True); or take the tensors alone, with "
                "vocab_parallel.integrations.deepspeed.from_deepspeed"
            )
