"""What two artifacts must agree on, in one JSON beside each of them."""

from vocab_parallel.vocabulary.manifest.comparison import Difference, compare, require_comparable, require_loadable
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
)
from vocab_parallel.vocabulary.manifest.manifest import NAME, Manifest

__all__ = [
    "NAME",
    "CheckpointContract",
    "Difference",
    "HeadContract",
    "LossContract",
    "Manifest",
    "PolicyContract",
    "RandomnessContract",
    "RuntimeContract",
    "TensorSpec",
    "TyingContract",
    "VocabularyContract",
    "compare",
    "require_comparable",
    "require_loadable",
]
