"""`Manifest`: one JSON beside every checkpoint and run that says what two artifacts must agree on.

Shapes that fit prove little: two tensors `[V, D]` may give their rows to other tokens, two losses of one name may
spread their smoothing over other classes. A manifest names each such choice, `compare` finds where two differ, and the
gates refuse before anything is loaded or compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vocab_parallel.errors import CheckpointLayoutError
from vocab_parallel.layout import VocabLayout
from vocab_parallel.tying import vocab_parameters
from vocab_parallel.vocabulary.files import write_whole
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import describing
from vocab_parallel.vocabulary.manifest.fields import (
    CheckpointContract,
    HeadContract,
    LossContract,
    PolicyContract,
    RandomnessContract,
    RuntimeContract,
    TensorSpec,
    TyingContract,
    VocabularyContract,
    check_ids,
    require,
)
from vocab_parallel.vocabulary.manifest.strict_json import dump, parse, plain, read_json, to_text

VERSION = 1
NAME = "manifest.json"
_WHAT = f"a manifest (version {VERSION}, as `Manifest.write` makes it)"

Tensors = Mapping[str, tuple[torch.dtype | str, Collection[int]]]


@dataclass(frozen=True)
class Manifest:
    """What an artifact is. Groups that are None were not recorded, and are compared with nothing.

    Attributes:
        notes: Anything else that a reader may want to know; never a reason to refuse.

    Raises:
        CheckpointLayoutError: Values that cannot be, or that contradict each other; naming the dotted field.
    """

    head: HeadContract
    vocabulary: VocabularyContract
    tying: TyingContract
    loss: LossContract | None = None
    policy: PolicyContract | None = None
    randomness: RandomnessContract | None = None
    checkpoint: CheckpointContract | None = None
    runtime: RuntimeContract = field(default_factory=RuntimeContract)
    notes: Mapping[str, Any] = field(default_factory=dict)
    version: int = VERSION

    def __post_init__(self) -> None:
        require(self.version == VERSION, "version", str(VERSION), self.version)
        object.__setattr__(self, "notes", plain(self.notes, "notes"))
        size = self.vocabulary.size
        require(self.head.output_width == size, "head.output_width", f"vocabulary.size {size}", self.head.output_width)
        if self.policy is not None:
            require(self.policy.vocab_size in (None, size), "policy.vocab_size", str(size), self.policy.vocab_size)
            check_ids("policy.stop_ids", self.policy.stop_ids, size)
        if self.checkpoint is not None:
            _check_ranges(self.checkpoint, size)

    @classmethod
    def of(
        cls,
        model: nn.Module,
        *,
        identity: VocabIdentity | None = None,
        vocabulary_sha256: str | None = None,
        loss: LossContract | Mapping[str, Any] | None = None,
        policy: Any = None,
        randomness: RandomnessContract | None = None,
        step: int | None = None,
        tensors: Tensors | None = None,
        host: str | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """The manifest of a model, the same on every rank of its vocabulary's group.

        Reads shapes and names only, so it works under FSDP2, DeepSpeed (also ZeRO-3) and after `apply` of each host.

        Args:
            model: Holds a vocabulary-sharded embedding or head; wrappers around it are looked through.
            identity: Of its vocabulary.
            vocabulary_sha256: Where only the hash of the ordered table is known.
            loss: Options of the loss, by their names in `linear_cross_entropy`; None: not recorded.
            policy: A `Policy`, its `to_dict`, or a `PolicyContract`.
            step: Of a checkpoint.
            tensors: All that the checkpoint holds, key to (dtype, whole shape); None: the model's own.
            host: The stack that it runs in.

        Collectives:
            None.

        Raises:
            CheckpointLayoutError: No vocabulary-sharded parameter; or an identity with more tokens than rows.
        """
        model = describing.unwrap(model)
        layout = describing.shard_of(model).layout
        weight, _ = next(iter(vocab_parameters(model).values()))
        listed = describing.tensors_of(model) if tensors is None else _specs(tensors)
        return cls(
            describing.head_of(model),
            vocabulary_of(layout.vocab_size, identity, vocabulary_sha256),
            describing.tying_of(model),
            parse(LossContract, dict(loss), "loss") if isinstance(loss, Mapping) else loss,
            policy if policy is None or isinstance(policy, PolicyContract) else PolicyContract.of(policy),
            randomness,
            CheckpointContract.of(layout, listed, step),
            describing.runtime_of(host, weight),
            notes or {},
        )

    @classmethod
    def of_tensors(
        cls,
        tensors: Tensors,
        *,
        tables: Collection[str],
        ties: Mapping[str, str],
        layout: VocabLayout,
        identity: VocabIdentity | None = None,
        vocabulary_sha256: str | None = None,
        step: int | None = None,
        host: str | None = None,
        notes: Mapping[str, Any] | None = None,
        **head: Any,
    ) -> Manifest:
        """The manifest of a checkpoint without a model: of what its state.json says.

        Args:
            tensors: Key ("model.<name>", "optimizer.<name>.<state>") to (dtype, whole shape).
            tables: Names of the parameters over the vocabulary: `[vocab_size, width]`, the embedding before the head;
                a bias `[vocab_size]`.
            ties: Further name to first name.
            head: Fields of `HeadContract` that shapes do not tell: `softcap`, `head_key`, ...
        """
        specs = _specs(tensors)
        ties = {alias: first for alias, first in ties.items() if first in tables}  # not those of a shared trunk
        found = describing.head_of_tables(specs, tables, ties, layout.vocab_size)
        return cls(
            dataclasses.replace(found, **head),
            vocabulary_of(layout.vocab_size, identity, vocabulary_sha256),
            TyingContract(bool(ties), next(iter(ties.values()), None), dict(ties)),
            checkpoint=CheckpointContract.of(layout, specs, step),
            runtime=describing.runtime_of(host),
            notes=notes or {},
        )

    def moved(
        self,
        tensors: Tensors,
        layout: VocabLayout,
        *,
        step: int | None = None,
        vocabulary: VocabularyContract | None = None,
    ) -> Manifest:
        """This manifest for a checkpoint that was made from the one it describes, by a reshard or a migration.

        Args:
            vocabulary: What the rows mean now (`vocabulary_of`); None: what they meant. Of another one, or one that is
                not known, the policy is not taken over: its ids meant other tokens.
        """
        same = vocabulary is None or (
            vocabulary.ordered_table_sha256 is not None
            and vocabulary.ordered_table_sha256 == self.vocabulary.ordered_table_sha256
        )
        return dataclasses.replace(
            self,
            head=dataclasses.replace(self.head, output_width=layout.vocab_size),
            vocabulary=vocabulary or self.vocabulary,
            policy=self.policy if same else None,
            checkpoint=CheckpointContract.of(layout, _specs(tensors), step),
            runtime=describing.runtime_of(self.runtime.host),
        )

    def to_json(self) -> dict[str, Any]:
        """What JSON holds; `from_json` gives an equal manifest back."""
        made: dict[str, Any] = dump(self)
        return {"version": made.pop("version"), **made}

    @classmethod
    def from_json(cls, data: object, *, where: str = "the manifest") -> Manifest:
        """The manifest of a `to_json`.

        Raises:
            CheckpointLayoutError: Naming `where`, the dotted field, what was found and what was expected.
        """
        found = data.get("version") if isinstance(data, dict) else None
        if isinstance(data, dict) and (type(found) is not int or found != VERSION):
            raise CheckpointLayoutError(
                f"{where}: expected {_WHAT}, got version {found!r}. Another version of vocab_parallel wrote it, or it "
                "is another file: read it with that version"
            )
        try:
            made: Manifest = parse(cls, data, "")
        except CheckpointLayoutError as error:
            raise CheckpointLayoutError(f"{where}: {error}") from error
        return made

    @classmethod
    def read(cls, path: str | Path) -> Manifest:
        """Reads a file, or the manifest.json of a folder.

        Raises:
            CheckpointLayoutError: As `from_json`; or no such file, or one of more than 128 MiB.
        """
        path = Path(path)
        path = path / NAME if path.is_dir() else path
        return cls.from_json(read_json(path, _WHAT), where=str(path))

    def write(self, path: str | Path) -> Path:
        """Writes the file, or manifest.json into a folder: aside, then renamed. One rank calls it.

        Raises:
            CheckpointLayoutError: As `to_text`.
        """
        path = Path(path)
        path = path / NAME if path.is_dir() else path
        write_whole(path, self.to_text().encode())
        return path

    def to_text(self) -> str:
        """The text of the file.

        Raises:
            CheckpointLayoutError: It is larger than what `read` takes.
        """
        return to_text(self.to_json(), "the manifest")


def vocabulary_of(size: int, identity: VocabIdentity | None, sha256: str | None) -> VocabularyContract:
    """The group of a vocabulary with `size` rows."""
    if identity is None:
        return VocabularyContract(size, sha256)
    if sha256 not in (None, identity.sha256):
        raise CheckpointLayoutError(f"vocabulary_sha256 is {sha256}, that of the identity is {identity.sha256}")
    if identity.size > size:
        raise CheckpointLayoutError(
            f"the vocabulary ({identity.source}) has {identity.size} tokens, the model {size} rows: ids "
            f"[{size}, {identity.size}) would have none. Append rows: python -m vocab_parallel migrate"
        )
    special = {name: int(one) for name, one in identity.special_ids.items()}
    return VocabularyContract(size, identity.sha256, special, tuple(identity.added), identity.source)


def _specs(tensors: Tensors) -> dict[str, TensorSpec]:
    return {
        key: TensorSpec(describing.dtype_name(dtype), tuple(int(size) for size in shape))
        for key, (dtype, shape) in tensors.items()
    }


def _check_ranges(checkpoint: CheckpointContract, size: int) -> None:
    padded, tp = checkpoint.padded_size, checkpoint.tp_size
    good = padded >= size and padded % tp == 0
    require(good, "checkpoint.padded_size", f"at least {size} and a multiple of tp_size {tp}", padded)
    ranges = checkpoint.shard_ranges
    require(len(ranges) in (0, tp), "checkpoint.shard_ranges", f"one for each of {tp} ranks", f"{len(ranges)} of them")
    layout = VocabLayout.from_padded(size, padded, tp)
    for rank, given in enumerate(ranges):
        wanted = layout.range(rank)
        good = given == (wanted.start, wanted.stop)
        require(good, f"checkpoint.shard_ranges[{rank}]", f"[{wanted.start}, {wanted.stop}]", list(given))
