"""Loaded by pytest first; being in the package `tests` it makes `from tests.tiny import ...` work."""
