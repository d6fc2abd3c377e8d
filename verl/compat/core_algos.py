"""What users import as `verl.trainer.ppo.core_algos`: estimators, losses, KL and the registries, under the names and
signatures of the public system."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from types import ModuleType
from typing import Any

from verl.algorithms import advantage, entropy_losses, policy_loss, step_credit  # noqa: F401  (they fill the registries)
from verl.algorithms.advantage import EPSILON
from verl.algorithms.kl import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.algorithms.registry import (
    ESTIMATORS,
    LOSSES,
    AdvantageEstimator,
    Algorithm,
    Name,
    Registry,
    WholeMiniBatch,
)
from verl.compat import estimators, losses
from verl.compat.losses import agg_loss, apply_kl_penalty, compute_value_loss

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "FixedKLController",
    "agg_loss",
    "apply_kl_penalty",
    "compute_value_loss",
    "get_kl_controller",
    "kl_penalty",
]

# -- estimators --------------------------------------------------------------------------------------------------

_REWARDS = ("token_level_rewards", "response_mask")
_PADDED: dict[int, tuple[Algorithm, Callable[..., Any]]] = {}


def _padded_estimator(estimator: Algorithm, *required: str, **optional: Any) -> Callable[..., estimators.Tensors]:
    function = estimators.padded_form(estimator, *required, **optional)
    _PADDED[id(estimator)] = (estimator, function)
    return function


def _of_groups(estimator: Algorithm) -> Callable[..., estimators.Tensors]:
    optional: dict[str, Any] = {"epsilon": EPSILON, "norm_adv_by_std_in_grpo": True}
    optional |= dict.fromkeys(("config", "loss_mask", "non_tensor_batch"))
    return _padded_estimator(estimator, *_REWARDS, "index", **optional)


compute_grpo_outcome_advantage = compute_grpo_vectorized_outcome_advantage = _of_groups(advantage.grpo)
compute_grpo_passk_outcome_advantage = _of_groups(advantage.grpo_passk)
compute_gdpo_outcome_advantage = _of_groups(advantage.gdpo)
compute_mo_grpo_outcome_advantage = _of_groups(advantage.mo_grpo)
compute_reinforce_plus_plus_baseline_outcome_advantage = _of_groups(advantage.reinforce_plus_plus_baseline)
compute_rloo_outcome_advantage = compute_rloo_vectorized_outcome_advantage = _of_groups(advantage.rloo)
compute_opo_outcome_advantage = _of_groups(advantage.opo)
compute_gpg_outcome_advantage = _of_groups(advantage.gpg)
compute_maxrl_outcome_advantage = _of_groups(advantage.maxrl)
compute_real_outcome_advantage = _of_groups(advantage.real)
compute_gae_advantage_return = _padded_estimator(
    advantage.gae, "token_level_rewards", "values", "response_mask", gamma=1.0, lam=1.0, loss_mask=None
)
compute_reinforce_plus_plus_outcome_advantage = _padded_estimator(
    advantage.reinforce_plus_plus, *_REWARDS, config=None, loss_mask=None
)
compute_remax_outcome_advantage = _padded_estimator(
    advantage.remax, "token_level_rewards", "reward_baselines", "response_mask", config=None
)
compute_optimal_token_baseline_advantage = _padded_estimator(
    advantage.optimal_token_baseline,
    *_REWARDS,
    "index",
    "old_log_probs",
    "sum_pi_squared",
    rollout_is_weights=None,
)

# -- losses ------------------------------------------------------------------------------------------------------


def _padded_loss(loss: Algorithm) -> losses.PaddedLoss:
    function: losses.PaddedLoss = losses.padded_form(loss)
    _PADDED[id(loss)] = (loss, function)
    return function


compute_policy_loss_vanilla = _padded_loss(policy_loss.vanilla)
compute_policy_loss_cispo = _padded_loss(policy_loss.cispo)
compute_policy_loss_sapo = _padded_loss(policy_loss.sapo)
compute_policy_loss_gpg = _padded_loss(policy_loss.gpg)
compute_policy_loss_dro = _padded_loss(policy_loss.dro)
compute_policy_loss_dppo_tv = _padded_loss(policy_loss.dppo_tv)
compute_policy_loss_dppo_kl = _padded_loss(policy_loss.dppo_kl)
compute_policy_loss_reinforce = _padded_loss(policy_loss.reinforce)
compute_policy_loss_bypass_mode = _padded_loss(policy_loss.bypass_mode)
compute_policy_loss_gspo = _padded_loss(policy_loss.gspo)
compute_policy_loss_geo_mean = _padded_loss(policy_loss.geo_mean)
compute_policy_loss_clip_cov = _padded_loss(entropy_losses.clip_cov)
compute_policy_loss_kl_cov = _padded_loss(entropy_losses.kl_cov)
compute_policy_loss_vespo = _padded_loss(policy_loss.vespo)
compute_policy_loss_fipo = _padded_loss(policy_loss.fipo)
compute_policy_loss_ce_gppo = _padded_loss(policy_loss.ce_gppo)

# -- registries --------------------------------------------------------------------------------------------------


def _public(function: Algorithm) -> Algorithm:
    """What a user registered, or the public form of one of ours."""
    return getattr(function, "public", None) or _PADDED.get(id(function), (function, function))[1]


def _flat(function: Algorithm, flat_form: Callable[[Algorithm], Algorithm]) -> Algorithm:
    """What the core calls: the one of ours that has this public form, or the user's function behind `flat_form`."""
    return next((flat for flat, public in _PADDED.values() if public is function), None) or flat_form(function)


class _Table(MutableMapping[str, Algorithm]):
    """A registry's functions by name, in their public forms, as the dict that users of the public system change."""

    def __init__(self, registry: Registry, functions: dict[str, Algorithm]):
        self._registry, self.functions = registry, functions

    def __getitem__(self, name: str) -> Algorithm:
        return _public(self.functions[name])

    def __setitem__(self, name: str, function: Algorithm) -> None:
        of_estimators = self._registry is ESTIMATORS
        flat = _flat(function, estimators.flat_form if of_estimators else losses.flat_form)
        self.functions[name] = flat
        if of_estimators:
            self._registry.declare(flat, estimators.declaration(function))

    def __delitem__(self, name: str) -> None:
        del self.functions[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.functions)

    def __len__(self) -> int:
        return len(self.functions)

    def copy(self) -> dict[str, Algorithm]:
        """A dict of the same functions."""
        return dict(self)


class _Module(ModuleType):
    """Whoever assigns another table of estimators to this module gives it to the trainer, too."""

    table = _Table(ESTIMATORS, ESTIMATORS.functions)

    @property
    def ADV_ESTIMATOR_REGISTRY(self) -> _Table:
        return _Module.table

    @ADV_ESTIMATOR_REGISTRY.setter
    def ADV_ESTIMATOR_REGISTRY(self, table: Mapping[str, Algorithm]) -> None:
        if not isinstance(table, _Table):
            functions, table = table, _Table(ESTIMATORS, {})
            table.update(functions)
        _Module.table, ESTIMATORS.functions = table, table.functions


POLICY_LOSS_REGISTRY = _Table(LOSSES, LOSSES.functions)
sys.modules[__name__].__class__ = _Module


def register_adv_est(
    name: Name, needs: Collection[str] = (), compares_groups: bool | None = None
) -> Callable[[Algorithm], Algorithm]:
    """Decorator: an advantage estimator under a name, for `algorithm.adv_estimator=name`.

    The function is called with keywords and receives those it names among token_level_rewards, response_mask, index,
    config, … (verl.compat.estimators); it returns (advantages, returns), both [N, L]. `needs`: columns that have to be
    there, e.g. {"ref_log_probs"}, beside those that required parameters name. `compares_groups`: it compares the
    responses to one prompt; None: it does if it has a parameter `index`. ValueError if another function has the name.
    """

    def add(function: Algorithm) -> Algorithm:
        declaration = estimators.declaration(function)
        compares = declaration.compares_groups if compares_groups is None else compares_groups
        flat = _flat(function, estimators.flat_form)
        ESTIMATORS.register(name, {*needs, *declaration.needs}, compares)(flat)
        return function

    return add


def register_policy_loss(
    name: Name, needs: Collection[str] = (), whole: WholeMiniBatch | None = None, keys: Sequence[str] = ()
) -> Callable[[Algorithm], Algorithm]:
    """Decorator: a policy loss under a name, for `actor_rollout_ref.actor.policy_loss.loss_mode=name`.

    A function of one argument gets `verl.algorithms.policy_loss.LossInputs`, with the columns that `needs` names; any
    other is called with the public signature. ValueError if another function has the name.
    """

    def add(function: Algorithm) -> Algorithm:
        LOSSES.register(name, needs, whole=whole, keys=keys)(_flat(function, losses.flat_form))
        return function

    return add


def get_adv_estimator_fn(name: Name) -> Algorithm:
    """The estimator under a name, in its public form. ValueError "Unknown advantage estimator simply: …" if there is
    none."""
    return _public(ESTIMATORS.get(name))


def get_policy_loss_fn(name: Name) -> Algorithm:
    """The policy loss under a name, in its public form. ValueError naming those that exist if there is none."""
    return _public(LOSSES.get(name))
