"""What the rows of a vocabulary mean, what two artifacts must agree on, and how rows move to another vocabulary."""

from vocab_parallel.vocabulary.auditing import audit, first_difference
from vocab_parallel.vocabulary.formats import read_vocabulary
from vocab_parallel.vocabulary.formats.encoders import old_encoder
from vocab_parallel.vocabulary.formats.tables import byte_identity
from vocab_parallel.vocabulary.identity import VocabIdentity
from vocab_parallel.vocabulary.manifest import Manifest
from vocab_parallel.vocabulary.manifest.comparison import Difference, compare, require_comparable, require_loadable
from vocab_parallel.vocabulary.mapping import VocabMap, compose
from vocab_parallel.vocabulary.migration import MigrationReport, migrate_model_
from vocab_parallel.vocabulary.migration.conformance import ConformanceReport
from vocab_parallel.vocabulary.migration.initialization import (
    CopyOf,
    MeanOfRows,
    MeanOfSources,
    Normal,
    RowInit,
    Zeros,
    parse_init,
)
from vocab_parallel.vocabulary.migration.model_conformance import ModelRecord, conformance_report, record_model
from vocab_parallel.vocabulary.migration.moving import migrate
from vocab_parallel.vocabulary.ownership import verify_ownership

__all__ = [
    "ConformanceReport",
    "CopyOf",
    "Difference",
    "Manifest",
    "MeanOfRows",
    "MeanOfSources",
    "MigrationReport",
    "ModelRecord",
    "Normal",
    "RowInit",
    "VocabIdentity",
    "VocabMap",
    "Zeros",
    "audit",
    "byte_identity",
    "compare",
    "compose",
    "conformance_report",
    "first_difference",
    "migrate",
    "migrate_model_",
    "old_encoder",
    "parse_init",
    "read_vocabulary",
    "record_model",
    "require_comparable",
    "require_loadable",
    "verify_ownership",
]
