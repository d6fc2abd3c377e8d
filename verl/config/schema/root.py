"""The whole configuration of `main_ppo`."""

from typing import ClassVar

from verl.config.schema.actor import ActorConfig, RefConfig
from verl.config.schema.algorithm import AlgorithmConfig
from verl.config.schema.base import Group, Root, group, key, sub
from verl.config.schema.critic import CriticConfig
from verl.config.schema.data import DataConfig
from verl.config.schema.misc import GlobalProfilerConfig, RayConfig, SkipConfig
from verl.config.schema.model import ModelConfig
from verl.config.schema.reward import CustomRewardFunctionConfig, RewardManagerConfig, RewardModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.config.schema.trainer import TrainerConfig


@group
class ActorRolloutRefConfig(Group):
    """The policy: its model, its update, its sampler, its reference."""

    model: ModelConfig = sub(ModelConfig)
    actor: ActorConfig = sub(ActorConfig)
    ref: RefConfig = sub(RefConfig)
    rollout: RolloutConfig = sub(RolloutConfig)
    hybrid_engine: bool = True
    """Sampler and trainer share devices; False needs `rollout.nnodes` > 0."""
    nccl_timeout: float = key(600.0, above=0)
    """Seconds a collective may take; honoured by every process group."""


@group
class Config(Root):
    """All keys of reinforcement learning."""

    entry: ClassVar[str] = "ppo"
    data: DataConfig = sub(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = sub(ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = sub(AlgorithmConfig)
    critic: CriticConfig = sub(CriticConfig)
    custom_reward_function: CustomRewardFunctionConfig = sub(CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = sub(RewardModelConfig)
    reward_manager: RewardManagerConfig = sub(RewardManagerConfig)
    trainer: TrainerConfig = sub(TrainerConfig)
    global_profiler: GlobalProfilerConfig = sub(GlobalProfilerConfig)
    ray_kwargs: RayConfig = sub(RayConfig)
    skip: SkipConfig = sub(SkipConfig)
