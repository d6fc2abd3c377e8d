"""The reward function that `verl.proving.rewards` scores with: it fails."""

from __future__ import annotations


def compute_score(**kwargs: object) -> float:
    """Raises RuntimeError."""
    raise RuntimeError("this failure is a test of verl prove")
