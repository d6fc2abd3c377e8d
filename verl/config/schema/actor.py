"""`actor_rollout_ref.actor.`, `.ref.` and `critic.`: the policy update, the reference, the value model."""

from verl.config.schema.base import SEEDS, Group, Map, choice, key, open_map, same_as, sub
from verl.config.schema.misc import RoleProfilerConfig
from verl.config.schema.model import CriticModelConfig, RefModelConfig
from verl.config.schema.training import (
    CheckpointConfig,
    CriticOptimConfig,
    FSDPConfig,
    LogProbConfig,
    MegatronConfig,
    OptimConfig,
    RefFSDPConfig,
    RefMegatronConfig,
)

STRATEGIES = ("fsdp", "fsdp2", "megatron")
AGG_MODES: tuple[str, ...] = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean")
AGG_MODES += ("seq-mean-token-sum-norm",)
POLICY_LOSSES: tuple[str, ...] = ("vanilla", "gspo", "sapo", "gpg", "clip_cov", "kl_cov", "geo_mean", "cispo")
POLICY_LOSSES += ("dppo_tv", "dppo_kl", "dro", "luspo", "vespo", "fipo", "real", "ce_gppo", "stare", "bypass_mode")
LOSS_AGG_MODES = dict.fromkeys(("gspo", "sapo", "real"), "seq-mean-token-mean") | {"luspo": "seq-mean-token-sum"}
"""What `loss_agg_mode` is for a policy loss whose paper has another one than the default."""
CLIP_BOUNDS = ("clip_ratio_low", "clip_ratio_high")
OF_POLICY_LOSS = ("clip_ratio", *CLIP_BOUNDS, "clip_ratio_c", "loss_agg_mode")
"""Keys of the actor that belong to its policy loss, beside those of `policy_loss`: a data source may set them, too."""
KL_NAMES = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
KL_OPTIONS = KL_NAMES + tuple(f"{name}+" for name in KL_NAMES)


class PolicyLossConfig(Group):
    """Which policy loss, and the constants of each.

    Attributes:
        loss_mode: The policy loss, or the name of a registered one.
        clip_cov_ratio: clip_cov: share of tokens whose gradient is cut.
        clip_cov_lb: clip_cov: smallest covariance of a candidate.
        clip_cov_ub: clip_cov: largest covariance of a candidate.
        kl_cov_ratio: kl_cov: share of tokens that get the penalty.
        ppo_kl_coef: kl_cov: the penalty's weight.
        dro_beta: dro: β, required by it.
        tau_pos: sapo: temperature for positive advantages.
        tau_neg: sapo: temperature for negative advantages.
        vespo_k_pos: vespo: exponent of the sequence's weight, positive advantages.
        vespo_lambda_pos: vespo: rate of its exponential, positive advantages.
        vespo_k_neg: vespo: exponent, negative advantages.
        vespo_lambda_neg: vespo: rate, negative advantages.
        fipo_decay_rate: fipo: tokens after which a later token counts half.
        fipo_clip_low: fipo: how far a token's weight may fall below 1.
        fipo_clip_high: fipo: how far it may rise above 1.
        fipo_safety_threshold: fipo: ratio above which the weight of a negative advantage is not above 1.
        real_tau: real: temperature τ.
        gppo_beta1: ce_gppo: weight of the gradient below the clip, where the advantage is negative.
        gppo_beta2: ce_gppo: weight of the gradient above the clip, where the advantage is positive.
        stare_top_p_ratio: stare: share of the tokens of one sign of the advantage that are weighted, the least likely.
        stare_reweight_w: stare: weight of those with a positive advantage.
        stare_reweight_m: stare: weight of those with a negative one.
        stare_target_entropy: stare: mean entropy, in nats, from which on nothing is weighted.
    """

    loss_mode: str = choice("vanilla", *POLICY_LOSSES, registry="verl.trainer.ppo.core_algos.register_policy_loss")
    clip_cov_ratio: float = key(2e-4, low=0)
    clip_cov_lb: float = key(1.0)
    clip_cov_ub: float = key(5.0, inf=True)
    kl_cov_ratio: float = key(2e-4, low=0)
    ppo_kl_coef: float = key(0.1, low=0)
    dro_beta: float | None = key(None, above=0)
    tau_pos: float = key(1.0, above=0)
    tau_neg: float = key(1.05, above=0)
    vespo_k_pos: float = key(2.0, low=0)
    vespo_lambda_pos: float = key(3.0, low=0)
    vespo_k_neg: float = key(3.0, low=0)
    vespo_lambda_neg: float = key(2.0, low=0)
    fipo_decay_rate: float = key(32.0, above=0)
    fipo_clip_low: float = key(0.0, low=0, high=1)
    fipo_clip_high: float = key(0.2, low=0)
    fipo_safety_threshold: float = key(4.0, above=0)
    real_tau: float = key(0.5, above=0)
    gppo_beta1: float = key(0.75, low=0)
    gppo_beta2: float = key(1.0, low=0)
    stare_top_p_ratio: float = key(0.1, above=0, high=1)
    stare_reweight_w: float = key(1.1, above=0)
    stare_reweight_m: float = key(1.0, above=0)
    stare_target_entropy: float = key(0.3, low=0)


class TrainedRoleConfig(Group):
    """What the policy's update and the value model's have in common.

    Attributes:
        strategy: `fsdp` and `fsdp2` (both: torch FSDP2; one device: no sharding), `megatron`.
        ppo_micro_batch_size_per_gpu: Responses per forward of the update on one device; null = by token budget.
        data_loader_seed: Seed of the order of mini-batches with `shuffle`.
        grad_clip: Largest global gradient norm.
        ulysses_sequence_parallel_size: Devices a sequence is split over.
    """

    strategy: str = choice("fsdp", *STRATEGIES)
    ppo_micro_batch_size_per_gpu: int | None = key(None, low=1)
    data_loader_seed: int = key(42, low=0, high=SEEDS)
    grad_clip: float = key(1.0, above=0, inf=True)
    ulysses_sequence_parallel_size: int = key(1, low=1)
    megatron: MegatronConfig = sub(MegatronConfig)
    checkpoint: CheckpointConfig = sub(CheckpointConfig)
    profiler: RoleProfilerConfig = sub(RoleProfilerConfig)


class RouterReplayConfig(Group):
    """Which experts the tokens of a mixture-of-experts model go to in the update.

    Attributes:
        mode: `disabled`: those that the router chooses; `R2`: those of the pass that gave the old log-probs; `R3`:
            those of the sampler, with `rollout.enable_rollout_routing_replay`.
    """

    mode: str = choice("disabled", "disabled", "R2", "R3")


class DemonstrationsConfig(Group):
    """Supervised learning in the same step: loss = (1 − μ)·policy loss + μ·cross-entropy of the rows' demonstrations.

    Attributes:
        column: The field of extra_info, or the column, that holds a demonstration's text, or `ground_truth`; null = off.
        mu: μ, or its greatest value.
        final_mu: Where it ends with `decay_steps`.
        warmup_steps: Steps over which it rises from 0.
        decay_steps: Steps after those over which it falls; 0 = never.
        by_confidence: Multiply a token's cross-entropy by p·(1 − p) of its probability p, without gradient.
    """

    column: str | None = None
    mu: float = key(0.1, low=0, high=1)
    final_mu: float = key(0.0, low=0, high=1)
    warmup_steps: int = key(0, low=0)
    decay_steps: int = key(0, low=0)
    by_confidence: bool = False


class ActorConfig(TrainedRoleConfig):
    """The policy update.

    Attributes:
        ppo_mini_batch_size: Prompts per optimizer step, global; × `rollout.n` responses.
        ppo_epochs: Passes over the step's batch.
        shuffle: Mini-batches in random order.
        use_dynamic_bsz: True: token budget even if a micro-batch size is given; null: budget only if none is.
        ppo_max_token_len_per_gpu: Token budget of a micro-batch on one device, × sequence-parallel size; lowered to
            what memory allows unless set.
        clip_ratio: ε of the clipped ratio.
        clip_ratio_low: ε below 1.
        clip_ratio_high: ε above 1.
        clip_ratio_c: Dual clip; 20 for `dppo_*` unless set.
        loss_agg_mode: How per-token losses become one number; if not set, `gspo`, `sapo`
            and `real` use `seq-mean-token-mean`, `luspo` `seq-mean-token-sum`.
        loss_scale_factor: H of `seq-mean-token-sum-norm`.
        entropy_coeff: loss −= coeff · entropy.
        use_kl_loss: KL to the reference in the loss.
        kl_loss_coef: Weight of that KL.
        kl_loss_type: Estimator: `kl`/`k1`, `abs`, `mse`/`k2`, `low_var_kl`/`k3`, each also with `+` (straight-through
            gradient).
        observation_loss_coef: loss += coef · cross-entropy of the response tokens that the policy did not write (what
            tools and environments said), its mean over those of a mini-batch.
        observation_loss_roles: Weights in that loss by the role of a message, `{tool: 1, user: 0}`; 1 where none is given.
        turn_weights: Weights of a response's first, second, … turn in the policy loss, and in the loss of observations
            of what was said after it; the last one is that of all later turns.
        use_prefix_grouper: Compute the shared prompt once per group; null = when it pays.
        freeze_vision_tower: No gradient to the vision encoder.
        use_torch_compile: torch.compile for norms, gated MLPs and rotations on a device that Triton compiles for and verl has no
            kernels for (AMD's); elsewhere no effect.
        calculate_sum_pi_squared: Σπ² per token (variance metrics); on by itself for `optimal_token_baseline`.
    """

    ppo_mini_batch_size: int = key(256, low=1)
    ppo_epochs: int = key(1, low=1)
    shuffle: bool = False
    use_dynamic_bsz: bool | None = key(None, ours=True)
    ppo_max_token_len_per_gpu: int = key(16384, low=1)
    clip_ratio: float = key(0.2, low=0, inf=True)
    clip_ratio_low: float = same_as(".clip_ratio", low=0, inf=True, ours=True)
    clip_ratio_high: float = same_as(".clip_ratio", low=0, inf=True, ours=True)
    clip_ratio_c: float = key(3.0, above=1, inf=True)
    loss_agg_mode: str = choice("token-mean", *AGG_MODES)
    loss_scale_factor: float = same_as("data.max_response_length", above=0)
    policy_loss: PolicyLossConfig = sub(PolicyLossConfig)
    entropy_coeff: float = 0.0
    use_kl_loss: bool = False
    kl_loss_coef: float = key(0.001, low=0)
    kl_loss_type: str = choice("low_var_kl", *KL_OPTIONS)
    observation_loss_roles: Map = open_map()
    turn_weights: list[float] | None = None
    demonstrations: DemonstrationsConfig = sub(DemonstrationsConfig)
    observation_loss_coef: float = key(0.0, low=0)
    use_prefix_grouper: bool | None = key(None, ours=True)
    freeze_vision_tower: bool = False
    use_torch_compile: bool = True
    calculate_sum_pi_squared: bool = False
    router_replay: RouterReplayConfig = sub(RouterReplayConfig)
    optim: OptimConfig = sub(OptimConfig)
    fsdp_config: FSDPConfig = sub(FSDPConfig)


_ACTOR = "actor_rollout_ref.actor."


class RefConfig(LogProbConfig):
    """The reference policy; built only when `use_kl_loss` or `use_kl_in_reward` asks for it.

    Attributes:
        strategy: As `actor.strategy`.
        ulysses_sequence_parallel_size: Devices a sequence is split over.
        use_torch_compile: As the actor's.
    """

    strategy: str = same_as(_ACTOR + "strategy", options=STRATEGIES)
    model: RefModelConfig = sub(RefModelConfig)
    fsdp_config: RefFSDPConfig = sub(RefFSDPConfig)
    megatron: RefMegatronConfig = sub(RefMegatronConfig)
    ulysses_sequence_parallel_size: int = same_as(_ACTOR + "ulysses_sequence_parallel_size", low=1)
    use_torch_compile: bool = same_as(_ACTOR + "use_torch_compile")
    profiler: RoleProfilerConfig = sub(RoleProfilerConfig)


class CriticConfig(TrainedRoleConfig):
    """The value model.

    Attributes:
        enable: null = only if the estimator needs values (`gae`).
        ppo_mini_batch_size: Prompts per optimizer step.
        ppo_epochs: Passes over the step's batch.
        shuffle: Mini-batches in random order.
        use_dynamic_bsz: As the actor's.
        ppo_max_token_len_per_gpu: Token budget of the update.
        forward_micro_batch_size_per_gpu: Responses per forward when values are computed.
        forward_max_token_len_per_gpu: Token budget when values are computed.
        loss_agg_mode: As the actor's.
        loss_scale_factor: As the actor's.
        cliprange_value: How far a value may move from the old one.
        ulysses_sequence_parallel_size: Devices a sequence is split over.
        nnodes: > 0: a pool of its own for the critic; 0 = it shares the policy's devices.
        n_gpus_per_node: Devices per node of that pool.
    """

    enable: bool = key(None, nullable=True)
    model: CriticModelConfig = sub(CriticModelConfig)
    optim: CriticOptimConfig = sub(CriticOptimConfig)
    ppo_mini_batch_size: int = same_as(_ACTOR + "ppo_mini_batch_size", low=1)
    ppo_epochs: int = same_as(_ACTOR + "ppo_epochs", low=1)
    shuffle: bool = same_as(_ACTOR + "shuffle")
    use_dynamic_bsz: bool | None = same_as(_ACTOR + "use_dynamic_bsz")
    ppo_max_token_len_per_gpu: int = key(32768, low=1)
    forward_micro_batch_size_per_gpu: int | None = same_as(".ppo_micro_batch_size_per_gpu", low=1)
    forward_max_token_len_per_gpu: int = same_as(".ppo_max_token_len_per_gpu", low=1)
    loss_agg_mode: str = same_as(_ACTOR + "loss_agg_mode", options=AGG_MODES)
    loss_scale_factor: float = same_as(_ACTOR + "loss_scale_factor", above=0)
    cliprange_value: float = key(0.5, low=0, inf=True)
    ulysses_sequence_parallel_size: int = same_as(_ACTOR + "ulysses_sequence_parallel_size", low=1, ours=True)
    nnodes: int = key(0, low=0, high=100_000, ours=True)
    n_gpus_per_node: int = same_as("trainer.n_gpus_per_node", low=1, high=1024, ours=True)
