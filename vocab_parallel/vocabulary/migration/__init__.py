"""Rows that move to another vocabulary: on live shards, with proof that nothing was lost."""

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
from vocab_parallel.vocabulary.migration.models import MigrationReport, migrate_model_
from vocab_parallel.vocabulary.migration.moving import migrate

__all__ = [
    "ConformanceReport",
    "CopyOf",
    "MeanOfRows",
    "MeanOfSources",
    "MigrationReport",
    "ModelRecord",
    "Normal",
    "RowInit",
    "Zeros",
    "conformance_report",
    "migrate",
    "migrate_model_",
    "parse_init",
    "record_model",
]
