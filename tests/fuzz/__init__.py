"""Differential fuzzing: drawn cases of every public operation on ranks, against the oracle on one."""
