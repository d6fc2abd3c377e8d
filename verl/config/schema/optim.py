"""`*.optim.`: optimizer and learning-rate schedule of the actor, the critic and supervised fine-tuning."""

from verl.config.schema.base import Group, Map, choice, group, items, key, open_map


@group
class OptimConfig(Group):
    """Optimizer and schedule."""

    lr: float = key(1e-6, low=0)
    """Peak learning rate."""
    weight_decay: float = key(0.01, low=0)
    """Decoupled weight decay."""
    betas: list[float] = items(0.9, 0.999)
    """Decay rates of the two moments."""
    lr_warmup_steps: int = -1
    """Training steps of linear warm-up from 0; a value ≥ 0 wins over the ratio."""
    lr_warmup_steps_ratio: float = key(0.0, low=0, high=1)
    """Warm-up as a share of all training steps."""
    lr_scheduler_type: str = choice("constant", "constant", "cosine", "linear")
    """Shape after the warm-up; one scheduler step per training step."""
    min_lr_ratio: float = key(0.0, low=0, high=1)
    """Floor of the schedule as a share of `lr`."""
    num_cycles: float = 0.5
    """Cosine waves; 0.5 is one fall to the floor."""
    zero_indexed_step: bool = True
    """False: the first warm-up step has lr/warmup, not 0."""
    optimizer: str = "AdamW"
    """Class name of the optimizer."""
    optimizer_impl: str = "torch.optim"
    """Module the class is taken from."""
    override_optimizer_config: Map = open_map()
    """Extra arguments of the optimizer's constructor (Megatron: `optimizer_cpu_offload`, …)."""
    total_training_steps: int = -1
    """Length of the schedule in steps; filled from the trainer."""
    lr_decay_steps: int | None = None
    """Megatron only: steps until the floor is reached."""
    min_lr: float | None = None
    """Megatron only: floor as a learning rate."""
    lr_warmup_init: float | None = None
    """Megatron only: learning rate the warm-up starts from."""
    lr_wsd_decay_style: str | None = None
    """Megatron only: decay of the warm-up-stable-decay schedule."""
    lr_wsd_decay_steps: int | None = None
    """Megatron only: steps of that decay."""
    weight_decay_incr_style: str | None = None
    """Megatron only: how the weight decay grows."""
    use_checkpoint_opt_param_scheduler: bool | None = None
    """Megatron only: take the schedule from the checkpoint."""


@group
class CriticOptimConfig(OptimConfig):
    """As the actor's, with a larger learning rate."""

    lr: float = key(1e-5, low=0)
    """Peak learning rate."""


@group
class SFTOptimConfig(OptimConfig):
    """As the actor's, with a larger learning rate."""

    lr: float = key(1e-5, low=0)
    """Peak learning rate."""
    grad_clip: float = key(1.0, above=0)
    """Largest global gradient norm."""
