# ruff: noqa: F401  (everything here is for others to import)
"""What users import: the estimators, losses, KL and registries under the names of the public interface.

Plug-ins reach this module as `verl.trainer.ppo.core_algos`. Importing it fills the registries.
"""

from __future__ import annotations

import sys
from types import ModuleType

from verl.algorithms.advantage import (
    compute_gdpo_outcome_advantage,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_rloo_outcome_advantage,
    compute_rloo_vectorized_outcome_advantage,
)
from verl.algorithms.covariance_loss import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.algorithms.policy_loss import (
    agg_loss,
    compute_policy_loss_bypass_mode,
    compute_policy_loss_cispo,
    compute_policy_loss_dppo_kl,
    compute_policy_loss_dppo_tv,
    compute_policy_loss_dro,
    compute_policy_loss_gpg,
    compute_policy_loss_reinforce,
    compute_policy_loss_sapo,
    compute_policy_loss_vanilla,
)
from verl.algorithms.registry import ESTIMATORS, LOSSES, AdvantageEstimator, Algorithm
from verl.algorithms.sequence_loss import compute_policy_loss_geo_mean, compute_policy_loss_gspo
from verl.algorithms.token_advantage import (
    compute_gae_advantage_return,
    compute_optimal_token_baseline_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
)
from verl.algorithms.value_loss import compute_value_loss


class _Module(ModuleType):
    # The table that the trainer reads, also where somebody sets another one.
    ADV_ESTIMATOR_REGISTRY = property(
        lambda _: ESTIMATORS.functions, lambda _, table: setattr(ESTIMATORS, "functions", table)
    )


sys.modules[__name__].__class__ = _Module
POLICY_LOSS_REGISTRY: dict[str, Algorithm] = LOSSES.functions

register_adv_est = ESTIMATORS.register
# Decorator: an advantage estimator under a name, for `algorithm.adv_estimator=name`. The function is called with keywords and
# receives those it names among token_level_rewards, response_mask, index, config, … (verl.algorithms.of_batches); it returns
# (advantages, returns), both [N, L]. `needs`: columns that have to be there, e.g. {"ref_log_probs"}, beside those that required
# parameters name. ValueError if another function has the name.
get_adv_estimator_fn = ESTIMATORS.get
# The estimator under a name. ValueError "Unknown advantage estimator simply: …" if there is none.

register_policy_loss = LOSSES.register
# Decorator: a policy loss under a name, for `actor_rollout_ref.actor.policy_loss.loss_mode=name`. A function of one argument gets
# `verl.algorithms.policy_loss.LossInputs`, with the columns that `needs` names; any other is called with the public signature.
# ValueError if another function has the name.
get_policy_loss_fn = LOSSES.get
# The policy loss under a name. ValueError naming those that exist if there is none.
