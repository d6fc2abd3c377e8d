"""The whole configuration of each entry point: main_ppo, sft_trainer, main_eval, main_generation."""

from typing import ClassVar

from verl.config.schema.actor import STRATEGIES, ActorConfig, CriticConfig, RefConfig
from verl.config.schema.algorithm import AlgorithmConfig, DistillationConfig, PreferenceConfig
from verl.config.schema.base import FilePath, Group, Map, Root, choice, items, key, open_map, sub
from verl.config.schema.data import DataConfig, SFTDataConfig
from verl.config.schema.misc import GlobalProfilerConfig, RayConfig, RoleProfilerConfig, SkipConfig
from verl.config.schema.model import ModelConfig
from verl.config.schema.reward import (
    CustomRewardFunctionConfig,
    RewardManagerConfig,
    RewardModelConfig,
    ScoringConfig,
)
from verl.config.schema.rollout import MOST_RESPONSES, GenerationRolloutConfig, RolloutConfig
from verl.config.schema.trainer import GenerationTrainerConfig, RecordsConfig, SFTTrainerConfig, TrainerConfig
from verl.config.schema.training import CheckpointConfig, FSDPConfig, MegatronConfig, SFTOptimConfig


class ActorRolloutRefConfig(Group):
    """The policy: its model, its update, its sampler, its reference.

    Attributes:
        hybrid_engine: Sampler and trainer share devices; False needs `rollout.nnodes` > 0.
        nccl_timeout: Seconds a collective may take; honoured by every process group.
    """

    model: ModelConfig = sub(ModelConfig)
    actor: ActorConfig = sub(ActorConfig)
    ref: RefConfig = sub(RefConfig)
    rollout: RolloutConfig = sub(RolloutConfig)
    hybrid_engine: bool = True
    nccl_timeout: float = key(600.0, above=0, inf=True)


class Config(Root):
    """All keys of reinforcement learning."""

    entry: ClassVar[str] = "ppo"
    data: DataConfig = sub(DataConfig)
    actor_rollout_ref: ActorRolloutRefConfig = sub(ActorRolloutRefConfig)
    algorithm: AlgorithmConfig = sub(AlgorithmConfig)
    critic: CriticConfig = sub(CriticConfig)
    distillation: DistillationConfig = sub(DistillationConfig)
    custom_reward_function: CustomRewardFunctionConfig = sub(CustomRewardFunctionConfig)
    reward_model: RewardModelConfig = sub(RewardModelConfig)
    reward_manager: RewardManagerConfig = sub(RewardManagerConfig)
    trainer: TrainerConfig = sub(TrainerConfig)
    global_profiler: GlobalProfilerConfig = sub(GlobalProfilerConfig)
    ray_kwargs: RayConfig = sub(RayConfig)
    skip: SkipConfig = sub(SkipConfig)


class EngineConfig(FSDPConfig, MegatronConfig):
    """Placement, precision and parallel layout; the Megatron keys count with `strategy=megatron`.

    Attributes:
        strategy: `fsdp` and `fsdp2` (both: torch FSDP2), `megatron`.
        ulysses_sequence_parallel_size: Devices a sequence is split over.
        use_torch_compile: torch.compile for norms, gated MLPs and rotations on a device that Triton compiles for and verl has no
            kernels for (AMD's); elsewhere no effect.
    """

    strategy: str = choice("fsdp", *STRATEGIES)
    ulysses_sequence_parallel_size: int = key(1, low=1)
    use_torch_compile: bool = True


class SFTConfig(Root):
    """All keys of supervised fine-tuning."""

    entry: ClassVar[str] = "sft"
    data: SFTDataConfig = sub(SFTDataConfig)
    model: ModelConfig = sub(ModelConfig)
    engine: EngineConfig = sub(EngineConfig)
    optim: SFTOptimConfig = sub(SFTOptimConfig)
    preference: PreferenceConfig = sub(PreferenceConfig)
    checkpoint: CheckpointConfig = sub(CheckpointConfig)
    trainer: SFTTrainerConfig = sub(SFTTrainerConfig)
    profiler: RoleProfilerConfig = sub(RoleProfilerConfig)
    global_profiler: GlobalProfilerConfig = sub(GlobalProfilerConfig)
    ray_kwargs: RayConfig = sub(RayConfig)


class EvalDataConfig(Group):
    """Responses to score.

    Attributes:
        path: Parquet file with responses; required.
        prompt_key: Column of the prompt.
        response_key: Column of the responses.
        data_source_key: Column that selects the reward function.
        reward_model_key: Column of the ground truth.
        image_key: Column of the images, for `reward_model.images`.
    """

    path: FilePath | None = key(None, required=True)
    image_key: str = "images"
    prompt_key: str = "prompt"
    response_key: str = "responses"
    data_source_key: str = "data_source"
    reward_model_key: str = "reward_model"


class EvalMetricsConfig(Group):
    """What is computed of the scores.

    Attributes:
        k: Sizes k of pass@k and maj@k; those above the number of responses to a prompt are left out.
        pass_score: A response is right if its `acc`, or without one its score, is at least this.
        confidence: Coverage of the accuracy's interval.
        text: Comparisons with a reference text: `bleu` (needs sacrebleu), `rouge` (needs rouge-score).
        reference: Column of the reference text, or a field of it as `extra_info.answer`; null = the ground truth.
    """

    k: list[int] | None = key(None, low=1, shown="1, 2, 4, … and the number of responses")
    pass_score: float = 1.0
    confidence: float = key(0.95, low=0.5, high=0.9999)
    text: list[str] = items(options=("bleu", "rouge"))
    reference: str | None = None


class EvalConfig(Root):
    """All keys of evaluation."""

    entry: ClassVar[str] = "eval"
    data: EvalDataConfig = sub(EvalDataConfig)
    metrics: EvalMetricsConfig = sub(EvalMetricsConfig)
    custom_reward_function: CustomRewardFunctionConfig = sub(CustomRewardFunctionConfig)
    reward_model: ScoringConfig = sub(ScoringConfig)
    trainer: RecordsConfig = sub(RecordsConfig)
    ray_kwargs: RayConfig = sub(RayConfig)


class GenerationDataConfig(Group):
    """Prompts to sample responses for.

    Attributes:
        path: File with prompts, or several; required.
        prompt_key: Column of the prompt.
        n_samples: Responses per prompt.
        batch_size: Prompts at a time.
        output_path: Parquet file written: the rows of all files plus `responses`; required.
        apply_chat_template_kwargs: Passed to the chat template.
        trust_remote_code: Run code that is shipped with the tokenizer, and with the model.
        image_key: Column of the images.
        allow_image_urls: Fetch images that are named by a URL.
        mm_processor_kwargs: Passed to the model's image processor.
    """

    path: list[FilePath] | None = key(None, required=True)
    prompt_key: str = "prompt"
    n_samples: int = key(5, low=1, high=MOST_RESPONSES)
    batch_size: int = key(128, low=1)
    output_path: FilePath | None = key(None, required=True)
    apply_chat_template_kwargs: Map = open_map()
    trust_remote_code: bool = False
    image_key: str = key("images", ours=True)
    allow_image_urls: bool = key(False, ours=True)
    mm_processor_kwargs: Map = open_map()


class GenerationConfig(Root):
    """All keys of generation."""

    entry: ClassVar[str] = "generation"
    model: ModelConfig = sub(ModelConfig)
    data: GenerationDataConfig = sub(GenerationDataConfig)
    rollout: GenerationRolloutConfig = sub(GenerationRolloutConfig)
    trainer: GenerationTrainerConfig = sub(GenerationTrainerConfig)
    ray_kwargs: RayConfig = sub(RayConfig)


ROOTS: dict[str, type[Root]] = {cls.entry: cls for cls in (Config, SFTConfig, EvalConfig, GenerationConfig)}
"""The whole configuration by entry point."""
PROGRAMS = {
    "ppo": "verl.trainer.main_ppo",
    "sft": "verl.trainer.sft_trainer",
    "eval": "verl.trainer.main_eval",
    "generation": "verl.trainer.main_generation",
}
"""What `python3 -m` runs by entry point."""
