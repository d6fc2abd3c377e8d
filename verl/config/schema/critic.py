"""`critic.`: the value model; built only for estimators that need values."""

from verl.config.schema.actor import AGG_MODES, STRATEGIES, CheckpointConfig
from verl.config.schema.base import Group, choice, group, key, same_as, sub
from verl.config.schema.megatron import MegatronConfig
from verl.config.schema.misc import RoleProfilerConfig
from verl.config.schema.model import CriticModelConfig
from verl.config.schema.optim import CriticOptimConfig

_ACTOR = "actor_rollout_ref.actor."


@group
class CriticConfig(Group):
    """The value model."""

    enable: bool = key(None, nullable=True)
    """null = only if the estimator needs values (`gae`)."""
    strategy: str = choice("fsdp", *STRATEGIES)
    """As `actor.strategy`."""
    model: CriticModelConfig = sub(CriticModelConfig)
    optim: CriticOptimConfig = sub(CriticOptimConfig)
    megatron: MegatronConfig = sub(MegatronConfig)
    checkpoint: CheckpointConfig = sub(CheckpointConfig)
    profiler: RoleProfilerConfig = sub(RoleProfilerConfig)
    ppo_mini_batch_size: int = same_as(_ACTOR + "ppo_mini_batch_size", low=1)
    """Prompts per optimizer step."""
    ppo_epochs: int = same_as(_ACTOR + "ppo_epochs", low=1)
    """Passes over the step's batch."""
    shuffle: bool = same_as(_ACTOR + "shuffle")
    """Mini-batches in random order."""
    data_loader_seed: int = 42
    """Seed of that order."""
    ppo_micro_batch_size_per_gpu: int | None = key(None, low=1)
    """Answers per forward of the update; null = by token budget."""
    use_dynamic_bsz: bool | None = same_as(_ACTOR + "use_dynamic_bsz")
    """As the actor's."""
    ppo_max_token_len_per_gpu: int = key(32768, low=1)
    """Token budget of the update."""
    forward_micro_batch_size_per_gpu: int | None = same_as(".ppo_micro_batch_size_per_gpu", low=1)
    """Answers per forward when values are computed."""
    forward_max_token_len_per_gpu: int = same_as(".ppo_max_token_len_per_gpu", low=1)
    """Token budget when values are computed."""
    loss_agg_mode: str = same_as(_ACTOR + "loss_agg_mode", options=AGG_MODES)
    """As the actor's."""
    loss_scale_factor: float = same_as(_ACTOR + "loss_scale_factor", above=0)
    """As the actor's."""
    cliprange_value: float = key(0.5, low=0)
    """How far a value may move from the old one."""
    grad_clip: float = key(1.0, above=0)
    """Largest global gradient norm."""
    ulysses_sequence_parallel_size: int = key(1, low=1)
    """Devices a sequence is split over."""
