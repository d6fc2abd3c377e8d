"""Small batches and configs for the tests of verl/algorithms."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from verl.algorithms.flat_tokens import count_denominators, trajectory_tokens
from verl.algorithms.objective import ActorObjective
from verl.engine.training.base import MicroBatch
from verl.engine.training.optimizer import StepAccumulator
from verl.trajectory import Prompt, Segment, Trajectory


def response(uid: str, mask: list[int], score: float | None = 0.0, index: int = 0, **columns: Any) -> Trajectory:
    """One response whose policy mask is `mask`; other columns as float32 arrays."""
    prompt = Prompt(uid=uid, ids=np.arange(3), messages=[{"role": "user", "content": uid}], data_source="test")
    return Trajectory(
        prompt=prompt,
        index=index,
        response_ids=np.arange(len(mask)),
        response_mask=np.array(mask, dtype=bool),
        score=score,
        **{
            name: value if name in ("extra", "score_parts") else np.asarray(value, np.float32)
            for name, value in columns.items()
        },
    )


def actor(**settings: Any) -> SimpleNamespace:
    """An actor config with the defaults of the schema."""
    defaults: dict[str, Any] = {
        "clip_ratio": 0.2,
        "clip_ratio_low": None,
        "clip_ratio_high": None,
        "clip_ratio_c": 3.0,
        "loss_agg_mode": "token-mean",
        "loss_scale_factor": None,
        "entropy_coeff": 0.0,
        "use_kl_loss": False,
        "kl_loss_coef": 0.001,
        "kl_loss_type": "low_var_kl",
    }
    policy_loss = SimpleNamespace(loss_mode=settings.pop("loss_mode", "vanilla"))
    return SimpleNamespace(**(defaults | settings), policy_loss=policy_loss)


def algorithm(**settings: Any) -> SimpleNamespace:
    """An algorithm config with the defaults of the schema."""
    defaults = {
        "adv_estimator": "grpo",
        "gamma": 1.0,
        "lam": 1.0,
        "norm_adv_by_std_in_grpo": True,
        "use_kl_in_reward": False,
        "kl_penalty": "kl",
    }
    return SimpleNamespace(**(defaults | settings))


def run_objective(
    cfg: Any,
    rows: list[Segment],
    flat: torch.Tensor,
    entropy: torch.Tensor,
    parts: list[int],
    horizon: float = 9.0,
    correction: Any = None,
    by_source: Any = None,
) -> tuple[float, torch.Tensor, torch.Tensor, dict[str, float]]:
    """Loss, gradients by log-probs and by entropy, and the step's metrics when row i goes into micro-batch parts[i]."""
    lengths = [row.length for row in rows]
    leaf, bonus = flat.clone().requires_grad_(), entropy.clone().requires_grad_()
    pieces, bonuses = torch.split(leaf, lengths), torch.split(bonus, lengths)
    counts = trajectory_tokens(rows)
    tokens_of = None if counts is None else dict(zip(map(id, rows), counts, strict=True))
    objective = ActorObjective(cfg, count_denominators(rows, horizon), correction, tokens_of, by_source=by_source)
    total, sums = torch.zeros((), dtype=flat.dtype), StepAccumulator()
    for part in sorted(set(parts)):
        chosen = [i for i, own in enumerate(parts) if own == part]
        given = (torch.cat([values[i] for i in chosen]) for values in (pieces, bonuses))
        loss, metrics = objective(MicroBatch([rows[i] for i in chosen], *given))
        total = total + loss
        sums.add(metrics)
    found = torch.autograd.grad(total, (leaf, bonus), allow_unused=True, materialize_grads=True)
    return total.item(), *found, sums.metrics()


@st.composite
def matrices(draw: st.DrawFn, *elements: st.SearchStrategy[float]) -> tuple[list[list[Any]], ...]:
    """A small matrix of each kind of element and a mask, lists of rows, all of one shape."""
    rows, width = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    row = [st.lists(of, min_size=width, max_size=width) for of in (*elements, st.integers(0, 1))]
    return tuple([draw(one) for _ in range(rows)] for one in row)
