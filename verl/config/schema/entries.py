"""The whole configurations of evaluation (`main_eval`) and generation (`main_generation`)."""

from typing import ClassVar

from verl.config.schema.base import FilePath, Group, Map, Root, group, key, open_map, sub
from verl.config.schema.misc import RayConfig
from verl.config.schema.model import ModelConfig
from verl.config.schema.reward import CustomRewardFunctionConfig
from verl.config.schema.rollout import GenerationRolloutConfig
from verl.config.schema.trainer import GenerationTrainerConfig


@group
class EvalDataConfig(Group):
    """Answers to score."""

    path: FilePath | None = key(None, required=True)
    """Parquet file with answers; required."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    response_key: str = "responses"
    """Column of the answers."""
    data_source_key: str = "data_source"
    """Column that selects the reward function."""
    reward_model_key: str = "reward_model"
    """Column of the ground truth."""


@group
class EvalConfig(Root):
    """All keys of evaluation."""

    entry: ClassVar[str] = "eval"
    data: EvalDataConfig = sub(EvalDataConfig)
    custom_reward_function: CustomRewardFunctionConfig = sub(CustomRewardFunctionConfig)
    ray_kwargs: RayConfig = sub(RayConfig)


@group
class GenerationDataConfig(Group):
    """Prompts to answer."""

    path: FilePath | None = key(None, required=True)
    """Parquet file with prompts; required."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    n_samples: int = key(5, low=1)
    """Answers per prompt."""
    batch_size: int = key(128, low=1)
    """Prompts at a time."""
    output_path: FilePath | None = key(None, required=True)
    """Parquet file written: the input rows plus `responses`; required."""
    apply_chat_template_kwargs: Map = open_map()
    """Passed to the chat template."""
    trust_remote_code: bool = False
    """Run code that is shipped with the tokenizer."""


@group
class GenerationConfig(Root):
    """All keys of generation."""

    entry: ClassVar[str] = "generation"
    model: ModelConfig = sub(ModelConfig)
    data: GenerationDataConfig = sub(GenerationDataConfig)
    rollout: GenerationRolloutConfig = sub(GenerationRolloutConfig)
    trainer: GenerationTrainerConfig = sub(GenerationTrainerConfig)
    ray_kwargs: RayConfig = sub(RayConfig)
