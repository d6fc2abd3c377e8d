"""Model FLOPs utilisation: what the model's own arithmetic takes, against what the devices could have done.

Counted are the matrix products of the model's definition, once: nothing for recomputed layers, nothing for padding
(there is none), and a prompt that its group shares as often as it was computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.trajectory import Trajectory

BACKWARD = 2.0
"""A backward pass takes two products where the forward pass takes one."""


@dataclass(frozen=True, slots=True)
class ModelCost:
    """FLOPs of one forward pass: `per_token`, and `per_pair` for each pair of a token and one that it attends to.

    `peak`: FLOP/s of all training devices together, in the data type that the products run in.
    """

    per_token: float
    per_pair: float
    peak: float

    def forward(self, lengths: Iterable[int]) -> float:
        """FLOPs of a forward pass over causal sequences of these lengths."""
        tokens = pairs = 0
        for length in lengths:
            tokens += length
            pairs += length * (length + 1) // 2
        return self.per_token * tokens + self.per_pair * pairs


def mfu(cost: ModelCost, lengths: Iterable[int], seconds: float, *, passes: float) -> float:
    """Share of the devices' peak: `passes` forward passes' worth of work over the sequences in so many seconds."""
    return cost.forward(lengths) * passes / (seconds * cost.peak) if seconds > 0 else math.nan


def step_mfu(
    cost: ModelCost | None,
    batch: Iterable[Trajectory],
    timings: Mapping[str, float],
    *,
    epochs: int = 1,
    computed: float = 1.0,
) -> dict[str, float]:
    """perf/mfu/actor of `timings["update_actor"]`, and perf/mfu/actor_infer of `old_log_prob` if that pass ran.

    `computed`: the share of the sequences' tokens that went through the model. {} without a known peak.
    """
    if cost is None:
        return {}
    rows = list(batch)
    trained = [t for t in rows if t.loss_mask is not None and t.loss_mask.any()]
    out = {}
    for name, phase, chosen, passes in (
        ("perf/mfu/actor", "update_actor", trained, (1 + BACKWARD) * epochs),
        ("perf/mfu/actor_infer", "old_log_prob", rows, 1.0),
    ):
        if phase in timings:
            lengths = (len(t.prompt.ids) + t.length for t in chosen)
            out[name] = mfu(cost, lengths, timings[phase], passes=passes * computed)
    return out
