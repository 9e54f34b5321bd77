"""Searches over prefixes: beams and best-first, each step one exchange."""
