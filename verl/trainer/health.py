"""Are the weights still a model? Asked before a checkpoint replaces the one before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from verl.trajectory import Trajectory


def has_nonfinite_log_probs(
    log_probs: Callable[[Trajectory], np.ndarray], rows: Iterable[Trajectory], rate_key: str
) -> str:
    """Why the weights as they are now are not worth keeping, or "".

    `log_probs` gives those of a row's response tokens under these weights. One forward pass over the step's
    longest row: weights that training has blown up are often finite themselves, but what they compute is not.
    """
    longest = max(
        (row for row in rows if row.length), key=lambda row: len(row.prompt.ids) + row.length, default=None
    )
    if longest is None or np.isfinite(log_probs(longest)).all():
        return ""
    return (
        "its weights give log-probs that are not finite, training has blown them up (lower "
        f"{rate_key}, or go on from an earlier checkpoint)"
    )
