"""Seeded bugs, each of which must turn the suite red: ``python -m tests.mutants``."""
