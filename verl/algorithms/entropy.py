"""An entropy bonus whose coefficient moves so that the entropy stays at a target."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from verl.config.schema.base import setting
from verl.trajectory import Trajectory

STATE = "entropy_ctrl"
"""Where c is kept in the state that the steps of a run share, and that checkpoints have."""


def controls_entropy(algorithm: Any) -> bool:
    """True where `algorithm.entropy_ctrl.target` is set."""
    return setting(algorithm, "entropy_ctrl.target") is not None


def weigh_entropy(rows: Iterable[Trajectory], algorithm: Any, state: dict[str, Any]) -> dict[str, float]:
    """The column `entropy_weights` of a step's responses: α_k = c_k where e_k ≤ target, else 0.

    e_k is the mean entropy of the policy's tokens before the step's updates. Then c_{k+1} = c_k + Δ where e_k < target,
    c_k − Δ where it is above, within [0, max_coeff]. A step without a token changes nothing. Metric:
    actor/entropy_coeff, α_k. Source: Skywork-OR1, arXiv 2505.22312, section on adaptive entropy control.
    """
    control, rows = setting(algorithm, "entropy_ctrl"), list(rows)
    target, coefficient = float(control.target), float(state.get(STATE, control.coeff))
    parts = [np.asarray(t.entropy, np.float64)[np.asarray(t.response_mask, bool)] for t in rows]
    values = np.concatenate(parts) if parts else np.zeros(0)
    entropy = float(values.mean()) if len(values) else target
    applied = coefficient if entropy <= target else 0.0
    for t in rows:
        for segment in t.segments:
            segment.put("entropy_weights", np.full(segment.length, applied, np.float32))
    moved = coefficient + float(np.sign(target - entropy)) * float(control.delta)
    state[STATE] = min(max(moved, 0.0), float(control.max_coeff))
    return {"actor/entropy_coeff": applied}
