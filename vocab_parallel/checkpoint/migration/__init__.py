"""Another vocabulary for a checkpoint, block by block."""

from vocab_parallel.checkpoint.migration.checks import check_migration
from vocab_parallel.checkpoint.migration.migrating import migrate_checkpoint
from vocab_parallel.checkpoint.migration.report import MigrationReport

__all__ = ["MigrationReport", "check_migration", "migrate_checkpoint"]
