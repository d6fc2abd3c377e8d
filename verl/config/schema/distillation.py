"""`distillation.`: teachers that score what the policy sampled, and the loss that pulls it towards them."""

from verl.config.schema.actor import KL_NAMES, POLICY_LOSSES
from verl.config.schema.base import Group, Map, choice, key, open_map, same_as, sub

TEACHER_KEYS = ("key", "model_path", "num_replicas", "inference")
# The name of the teacher where there is one; its entry is there from the start.
ONLY_TEACHER = "teacher_model"
_WHOLE_MINI_BATCH = ("clip_cov", "kl_cov", "bypass_mode")


class DistillationLossConfig(Group):
    """What is minimised.

    Attributes:
        loss_mode: The term per token, u = log π − log ν of the sampled token: names as `actor.kl_loss_type` without
            `+`; `forward_kl_topk`: KL from teacher to policy over the teacher's most likely tokens.
        topk: How many tokens `forward_kl_topk` compares.
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

    loss_mode: str = choice("k3", *KL_NAMES, "forward_kl_topk")
    topk: int = key(32, low=1)
    use_policy_gradient: bool = False
    use_task_rewards: bool = True
    distillation_loss_coef: float = key(1.0, low=0)
    loss_max_clamp: float | None = key(None, above=0, inf=True)
    log_prob_min_clamp: float | None = key(None, high=0)
    policy_loss_mode: str = choice("vanilla", *(n for n in POLICY_LOSSES if n not in _WHOLE_MINI_BATCH))
    clip_ratio: float = key(0.2, low=0, inf=True)
    clip_ratio_low: float = same_as(".clip_ratio", low=0, inf=True)
    clip_ratio_high: float = same_as(".clip_ratio", low=0, inf=True)


class DistillationConfig(Group):
    """On-policy distillation: teachers score the responses of every step.

    Attributes:
        enabled: Run the teachers' pass and pull the policy towards them.
        teacher_models: By name `{key, model_path, num_replicas, inference}`. `key`: the value of `teacher_key` that
            picks the teacher (null = its name). Of `inference` the tensor-parallel size is read.
        teacher_key: Column whose value picks a row's teacher where there are several.
        n_gpus_per_node: Devices of a pool of their own on each node.
        nnodes: Nodes of that pool; 0 = the teachers are on the policy's devices.
    """

    enabled: bool = False
    teacher_models: Map = open_map(
        **{ONLY_TEACHER: {"key": None, "model_path": None, "num_replicas": 0, "inference": {}}}
    )
    teacher_key: str = "data_source"
    n_gpus_per_node: int = key(8, low=1, high=1024)
    nnodes: int = key(0, low=0, high=100_000)
    distillation_loss: DistillationLossConfig = sub(DistillationLossConfig)
