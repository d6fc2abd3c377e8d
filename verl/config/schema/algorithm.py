"""`algorithm.`: advantages, KL in the reward, group filtering, rollout correction; `distillation.`: teachers that
score what the policy sampled, and the loss that pulls it towards them."""

from verl.config.schema.actor import KL_NAMES, KL_OPTIONS, POLICY_LOSSES
from verl.config.schema.base import Group, Map, choice, key, open_map, same_as, sub

ESTIMATORS: tuple[str, ...] = ("gae", "grpo", "grpo_vectorized", "grpo_passk", "gdpo", "reinforce_plus_plus")
ESTIMATORS += ("reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized", "opo", "gpg")
ESTIMATORS += ("optimal_token_baseline", "tir_optimal_token_baseline", "maxrl", "gigpo", "real", "rae")
ESTIMATORS += ("mo_grpo", "hgpo", "rlcsd")
GROUP_ESTIMATORS = tuple(
    name for name in ESTIMATORS if name not in ("gae", "reinforce_plus_plus", "remax", "real", "rae")
)
TEACHER_KEYS = (
    "key",
    "model_path",
    "prompt",
    "solution_score",
    "contrast",
    "update_rate",
    "own_tokenizer",
    "num_replicas",
    "inference",
)
# The name of the teacher where there is one; its entry is there from the start.
ONLY_TEACHER = "teacher_model"
_WHOLE_MINI_BATCH = ("clip_cov", "kl_cov", "real", "stare", "bypass_mode")


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


class EntropyControlConfig(Group):
    """An entropy bonus in the loss whose coefficient adapts, in the place of `actor.entropy_coeff`.

    Attributes:
        target: Entropy per token, nats, below which there is a bonus; null = off.
        coeff: The coefficient's start.
        delta: What is added to it after a step below the target, and taken off after one above.
        max_coeff: The largest coefficient; the smallest is 0.
    """

    target: float | None = key(None, low=0)
    coeff: float = key(0.0, low=0)
    delta: float = key(0.005, low=0)
    max_coeff: float = key(1.0, low=0)


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
        gdpo_reward_keys: Components of `gdpo` and `mo_grpo`.
        gdpo_reward_weights: Their weights.
        passk_k: k of `grpo_passk`; null = the size of the group.
        gigpo_step_weight: ω of `gigpo`.
        hgpo_history: States before a step that `hgpo` compares, at most.
        hgpo_alpha: Exponent of the weights of its depths.
        rlcsd_tau: rlcsd: temperature of the contrast.
        rlcsd_scale: rlcsd: largest change of an advantage.
        rlcsd_threshold: rlcsd: change below which a token keeps its advantage.
        rlcsd_weight: rlcsd: weight of the tokens whose advantage is changed.
        by_source: By `data_source`: `{adv_estimator, weight, policy_loss, …}`, settings of this group for the responses to
            its rows, whose advantages × `weight` (1) they are. Their statistics are then of those responses alone.
            `policy_loss`: `{loss_mode, clip_ratio_high, …}`, keys of `actor.policy_loss`, `clip_ratio*` and
            `loss_agg_mode` for them.
        rae_decay: α of `rae`.
    """

    adv_estimator: str = choice("gae", *ESTIMATORS, registry="verl.trainer.ppo.core_algos.register_adv_est")
    gamma: float = key(1.0, low=0, high=1)
    lam: float = key(1.0, low=0, high=1)
    norm_adv_by_std_in_grpo: bool = True
    use_kl_in_reward: bool = False
    kl_penalty: str = choice("kl", *KL_OPTIONS)
    kl_ctrl: KLControlConfig = sub(KLControlConfig)
    entropy_ctrl: EntropyControlConfig = sub(EntropyControlConfig)
    filter_groups: FilterGroupsConfig = sub(FilterGroupsConfig)
    rollout_correction: RolloutCorrectionConfig = sub(RolloutCorrectionConfig)
    use_pf_ppo: bool = False
    pf_ppo: PFPPOConfig = sub(PFPPOConfig)
    gdpo_reward_keys: list[str] | None = None
    gdpo_reward_weights: list[float] | None = None
    passk_k: int | None = key(None, low=2)
    gigpo_step_weight: float = key(1.0, low=0)
    hgpo_history: int = key(2, low=0)
    hgpo_alpha: float = key(1.0)
    rlcsd_tau: float = key(0.02, above=0)
    rlcsd_scale: float = key(0.5, low=0)
    rlcsd_threshold: float = key(0.02, low=0)
    rlcsd_weight: float = key(1.0, low=0)
    by_source: Map = open_map()
    rae_decay: float = key(0.95, low=0, high=1)


TOPK_MODES = ("forward_kl_topk", "jsd_topk", "reverse_kl_topk")
TOKEN_SETS = ("student", "teacher", "intersection", "union", "difference")


class DistillationLossConfig(Group):
    """What is minimised.

    Attributes:
        loss_mode: The term per token, u = log π − log ν of the sampled token: names as `actor.kl_loss_type` without
            `+`; `forward_kl_topk`: KL from teacher to policy over the teacher's most likely tokens;
            `jsd_topk`: the Jensen-Shannon divergence over these; `reverse_kl_topk`: KL from policy to teacher over the
            tokens of `token_set`.
        token_set: reverse_kl_topk: of the most likely tokens those of the `student` (the policy at the start of the
            step), the `teacher`, both (`intersection`), either (`union`), or only one of them (`difference`).
        topk: How many tokens these compare.
        use_policy_gradient: True: −term is the advantage in a policy loss; False: the term itself is minimised.
        use_task_rewards: Added to the actor's loss; False: distillation alone.
        distillation_loss_coef: Weight beside the actor's loss.
        loss_max_clamp: Limit of the term, to both sides.
        log_prob_min_clamp: Limit of log-probs from below.
        policy_loss_mode: The policy loss of `use_policy_gradient`; its constants are those of the actor, but that
            `dppo_*` has its own c = 20 where `actor.clip_ratio_c` is 3.
        clip_ratio: ε of its clipped ratio.
        clip_ratio_low: ε below 1.
        clip_ratio_high: ε above 1.
    """

    loss_mode: str = choice("k3", *KL_NAMES, *TOPK_MODES)
    topk: int = key(32, low=1)
    token_set: str = choice("student", *TOKEN_SETS)
    use_policy_gradient: bool = False
    use_task_rewards: bool = True
    distillation_loss_coef: float = key(1.0, low=0)
    loss_max_clamp: float | None = key(None, above=0, inf=True)
    log_prob_min_clamp: float | None = key(None, high=0)
    policy_loss_mode: str = choice("vanilla", *(n for n in POLICY_LOSSES if n not in _WHOLE_MINI_BATCH))
    clip_ratio: float = key(0.2, low=0, inf=True)
    clip_ratio_low: float = same_as(".clip_ratio", low=0, inf=True)
    clip_ratio_high: float = same_as(".clip_ratio", low=0, inf=True)


PAIR_LOSSES = ("dpo", "dpo_norm", "ipo", "simpo", "reward")


class PreferenceConfig(Group):
    """Learning from pairs of responses, a chosen and a rejected one ([preference.md](preference.md)).

    Attributes:
        loss: `dpo`; `dpo_norm`, `ipo`, `simpo`: of log-probs per token; `reward`: a reward model is trained. null: rows
            are learned by cross-entropy.
        beta: β of all but `reward`.
        label_smoothing: dpo, dpo_norm: share of pairs that may be labelled the wrong way round.
        gamma: simpo: the margin that the reward of the chosen response has to have.
    """

    loss: str | None = choice(None, *PAIR_LOSSES, ours=True)
    beta: float = key(0.1, above=0, ours=True)
    label_smoothing: float = key(0.0, low=0, high=0.5, ours=True)
    gamma: float = key(0.5, low=0, ours=True)


class DistillationConfig(Group):
    """On-policy distillation: teachers score the responses of every step.

    Attributes:
        enabled: Run the teachers' pass and pull the policy towards them.
        teacher_models: By name `{key, model_path, prompt, num_replicas, inference}`. `key`: the value of `teacher_key`
            that picks the teacher (null = its name). `prompt`: what the teacher reads in place of the last user message,
            a text with `{prompt}`, `{ground_truth}`, `{solution}`, `{column}`; with it `model_path` null is the policy
            itself. `solution_score`: least score of another response to the prompt that is shown as `{solution}`
            (null = 1). `contrast`: how many responses below that score it reads in its place once more, for `rlcsd`
            (null = 0). `update_rate`: after each step this share of the policy's weights goes into the teacher's, a
            model of its own that starts as `model_path` (null = the policy's path). `own_tokenizer`: its tokenizer is
            not the policy's; responses are compared by spans of text. Of `inference` the tensor-parallel
            size is read.
        teacher_key: Column whose value picks a row's teacher where there are several.
        n_gpus_per_node: Devices of a pool of their own on each node.
        nnodes: Nodes of that pool; 0 = the teachers are on the policy's devices.
    """

    enabled: bool = False
    teacher_models: Map = open_map(**{ONLY_TEACHER: dict.fromkeys(TEACHER_KEYS) | {"num_replicas": 0, "inference": {}}})
    teacher_key: str = "data_source"
    n_gpus_per_node: int = key(8, low=1, high=1024)
    nnodes: int = key(0, low=0, high=100_000)
    distillation_loss: DistillationLossConfig = sub(DistillationLossConfig)
