"""`algorithm.`: advantages, KL in the reward, group filtering, rollout correction."""

from verl.config.schema.actor import KL_OPTIONS
from verl.config.schema.base import Group, choice, key, sub

ESTIMATORS: tuple[str, ...] = ("gae", "grpo", "grpo_vectorized", "grpo_passk", "gdpo", "reinforce_plus_plus")
ESTIMATORS += ("reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized", "opo", "gpg")
ESTIMATORS += ("optimal_token_baseline", "tir_optimal_token_baseline")
GROUP_ESTIMATORS = tuple(name for name in ESTIMATORS if name not in ("gae", "reinforce_plus_plus", "remax"))


class KLControlConfig(Group):
    """β of the KL in the reward.

    Attributes:
        type: `fixed` or `adaptive`.
        kl_coef: β, or its start.
        horizon: adaptive: responses over which β adapts.
        target_kl: adaptive: KL aimed at.
    """

    type: str = choice("fixed", "fixed", "adaptive")
    kl_coef: float = key(0.001, low=0)
    horizon: int = key(10000, low=1)
    target_kl: float = key(0.1, above=0)


class FilterGroupsConfig(Group):
    """Dynamic sampling: groups whose responses all score the same are replaced.

    Attributes:
        enable: Drop such groups and draw more prompts.
        metric: What must differ: `reward`, or a key the reward function returns.
        max_num_gen_batches: Batches drawn per step at most; 0 = no limit.
        max_inflight_gen_batches: Batches in flight at most, in units of `train_batch_size`.
    """

    enable: bool = False
    metric: str = "reward"
    max_num_gen_batches: int = key(0, low=0)
    max_inflight_gen_batches: int = key(1, low=1)


class RolloutCorrectionConfig(Group):
    """Correction for a sampler that is not the policy at the start of the step.

    Attributes:
        rollout_is: Importance weights per `token` or `sequence`.
        rollout_is_threshold: A number truncates, "2.0"; a pair zeroes outside, "0.5_5.0".
        rollout_is_batch_normalize: Divide the weights by their mean.
        rollout_rs: Rejection: comma list of `token_k1..3`, `seq_sum_k1..3`, `seq_mean_k1..3`, `seq_max_k2..3`.
        rollout_rs_threshold: One threshold each, or one for all.
        rollout_rs_in_baseline: Rejected responses count in the statistics (mean, std) of their group.
        bypass_mode: Old log-probs are the sampler's.
        loss_type: `ppo_clip`, `reinforce` (with `bypass_mode`).
    """

    rollout_is: str | None = choice(None, "token", "sequence")
    rollout_is_threshold: float | str | None = key(2.0, inf=True)
    rollout_is_batch_normalize: bool = False
    rollout_rs: str | None = None
    rollout_rs_threshold: float | str | None = key(None, inf=True)
    rollout_rs_in_baseline: bool = True
    bypass_mode: bool = False
    loss_type: str = choice("ppo_clip", "ppo_clip", "reinforce")


class PFPPOConfig(Group):
    """Responses drawn again in proportion to a weight (gae only).

    Attributes:
        reweight_method: `pow`, `max_min`, `max_random`.
        weight_pow: Exponent of `pow`.
    """

    reweight_method: str = choice("pow", "pow", "max_min", "max_random")
    weight_pow: float = key(2.0, low=0)


class AlgorithmConfig(Group):
    """Advantages and rewards.

    Attributes:
        adv_estimator: The advantage estimator, or the name of a registered one; `reinforce` = `reinforce_plus_plus`.
        gamma: Discount.
        lam: λ of GAE.
        norm_adv_by_std_in_grpo: Divide by the group's standard deviation; False = the Dr. GRPO advantage.
        use_kl_in_reward: Token rewards −= β·KL(old‖ref).
        kl_penalty: Estimator of that KL; names as `actor.kl_loss_type`.
        use_pf_ppo: Draw responses again by weight (gae only).
        gdpo_reward_keys: Components of `gdpo`.
        gdpo_reward_weights: Their weights.
    """

    adv_estimator: str = choice("gae", *ESTIMATORS, registry="verl.trainer.ppo.core_algos.register_adv_est")
    gamma: float = key(1.0, low=0, high=1)
    lam: float = key(1.0, low=0, high=1)
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = choice("kl", *KL_OPTIONS)
    kl_ctrl: KLControlConfig = sub(KLControlConfig)
    filter_groups: FilterGroupsConfig = sub(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = sub(RolloutCorrectionConfig)
    use_pf_ppo: bool = False
    pf_ppo: PFPPOConfig = sub(PFPPOConfig)
    gdpo_reward_keys: list[str] | None = None
    gdpo_reward_weights: list[float] | None = None
