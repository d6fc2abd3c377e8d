"""What users import: the estimators, losses, KL and registries under the names of the public interface.

Plug-ins reach this module as `verl.trainer.ppo.core_algos`. Names of the public interface that this release
lacks can be imported; calling one raises ValueError that says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from verl.algorithms.advantage import (
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
)
from verl.algorithms.aggregate import agg_loss
from verl.algorithms.kl import (
    AdaptiveKLController,
    FixedKLController,
    get_kl_controller,
    kl_penalty,
)
from verl.algorithms.policy_loss import (
    compute_policy_loss_bypass_mode,
    compute_policy_loss_reinforce,
    compute_policy_loss_vanilla,
)
from verl.algorithms.registry import (
    ESTIMATORS,
    LOSSES,
    AdvantageEstimator,
    Algorithm,
    F,
    Name,
    not_in_release,
)

__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "POLICY_LOSS_REGISTRY",
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "compute_grpo_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_policy_loss_bypass_mode",
    "compute_policy_loss_reinforce",
    "compute_policy_loss_vanilla",
    "get_adv_estimator_fn",
    "get_kl_controller",
    "get_policy_loss_fn",
    "kl_penalty",
    "register_adv_est",
    "register_policy_loss",
]

# The tables the trainer reads.
ADV_ESTIMATOR_REGISTRY: dict[str, Algorithm] = ESTIMATORS.functions
POLICY_LOSS_REGISTRY: dict[str, Algorithm] = LOSSES.functions

_LATER_ESTIMATORS = (
    "compute_gae_advantage_return",
    "compute_grpo_passk_outcome_advantage",
    "compute_gdpo_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_gpg_outcome_advantage",
    "compute_optimal_token_baseline_advantage",
)
_LATER_LOSSES = (
    *(f"compute_policy_loss_{name}" for name in LOSSES.known if name not in LOSSES.functions),
    "compute_value_loss",
)


def register_adv_est(name: Name, needs: Collection[str] = ()) -> Callable[[F], F]:
    """Decorator: an advantage estimator under `name`, for `algorithm.adv_estimator=name`.

    The function is called with keywords and receives those it names among token_level_rewards,
    response_mask, index, config, … (verl.algorithms.driver); it returns (advantages, returns), both [N, L].
    needs: columns that have to be there, e.g. {"ref_log_probs"}; those that required parameters name are.
    ValueError if another function has the name.
    """
    return ESTIMATORS.register(name, needs)


def get_adv_estimator_fn(name_or_enum: Name) -> Algorithm:
    """The estimator under a name. ValueError "Unknown advantage estimator simply: …" if there is none."""
    return ESTIMATORS.get(name_or_enum)


def register_policy_loss(name: Name, needs: Collection[str] = ()) -> Callable[[F], F]:
    """Decorator: a policy loss under `name`, for `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    A function of one argument gets `verl.algorithms.objective.LossInputs`, with the columns that `needs` names; any other
    is called with the public signature of `verl.algorithms.policy_loss`. ValueError if another function has the name.
    """
    return LOSSES.register(name, needs)


def get_policy_loss_fn(name: Name) -> Algorithm:
    """The policy loss under a name. ValueError naming those that exist if there is none."""
    return LOSSES.get(name)


def __getattr__(name: str) -> Any:
    if name in _LATER_ESTIMATORS:
        return not_in_release(name, f"Estimators there are: {', '.join(sorted(ADV_ESTIMATOR_REGISTRY))}.")
    if name in _LATER_LOSSES:
        return not_in_release(name, f"Losses there are: {', '.join(sorted(POLICY_LOSS_REGISTRY))}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
