"""The whole configuration of supervised fine-tuning (`verl.trainer.sft_trainer`)."""

from typing import ClassVar

from verl.config.schema.actor import STRATEGIES, CheckpointConfig
from verl.config.schema.base import (
    FilePath,
    Group,
    Map,
    Root,
    choice,
    group,
    items,
    key,
    open_map,
    same_as,
    sub,
)
from verl.config.schema.data import CustomClassConfig
from verl.config.schema.fsdp import FSDPConfig
from verl.config.schema.megatron import MegatronConfig
from verl.config.schema.misc import GlobalProfilerConfig, RayConfig, RoleProfilerConfig
from verl.config.schema.model import ModelConfig
from verl.config.schema.optim import SFTOptimConfig
from verl.config.schema.trainer import SFTTrainerConfig


@group
class SFTDataConfig(Group):
    """Rows to learn from."""

    train_files: list[FilePath] = items("~/data/gsm8k/train.parquet", ours=True)
    """One or several parquet, json or jsonl files."""
    val_files: list[FilePath] | None = None
    """The same for validation; null = no validation."""
    train_batch_size: int = key(256, low=1)
    """Sequences per optimizer step, global."""
    micro_batch_size_per_gpu: int | None = key(None, low=1)
    """Sequences per forward on one device; null = by token budget."""
    use_dynamic_bsz: bool = True
    """Token budget even if a micro-batch size is given."""
    max_token_len_per_gpu: int = key(8192, low=1)
    """Token budget of a micro-batch on one device."""
    max_length: int = key(1024, low=1)
    """Tokens of a sequence."""
    truncation: str = choice("error", "error", "left", "right")
    """Sequences that are too long: `error`, `left`, `right`."""
    messages_key: str = "messages"
    """Column of the dialogue."""
    tools_key: str = "tools"
    """Column of the tools."""
    enable_thinking_key: str = "enable_thinking"
    """Column that switches thinking per row."""
    enable_thinking_default: bool | None = None
    """Rows without that column; null = the template's default."""
    image_key: str = "images"
    """Column of the images."""
    video_key: str = "videos"
    """Column of the videos."""
    prompt_key: str | None = None
    """Column of the question; set it for question/answer rows."""
    response_key: str | None = None
    """Column of the answer."""
    prompt_dict_keys: list[str] | None = None
    """Keys inside a struct column."""
    response_dict_keys: list[str] | None = None
    """Keys inside a struct column."""
    ignore_input_ids_mismatch: bool = False
    """Accept a template that renders turns differently alone and together."""
    apply_chat_template_kwargs: Map = open_map()
    """Passed to the chat template."""
    mm_processor_kwargs: Map = open_map()
    """Passed to the processor."""
    shuffle: bool = True
    """New order each epoch."""
    seed: int = same_as("trainer.seed")
    """Seed of the order."""
    train_max_samples: int = -1
    """Use at most this many rows; -1 = all."""
    val_max_samples: int = -1
    """The same for validation."""
    tokenizer: FilePath | None = same_as("model.tokenizer_path")
    """Tokenizer of the data; null = the model's."""
    custom_cls: CustomClassConfig = sub(CustomClassConfig)
    num_workers: int = key(8, low=0)
    """At most this many loading processes."""
    use_shm: bool = False
    """Copy files to shared memory first."""
    cache_dir: FilePath = "~/.cache/verl/sft"
    """Where remote files are kept."""
    max_bad_row_ratio: float = key(0.01, low=0, high=1, ours=True)
    """More unusable rows than this refuse the run."""


@group
class EngineConfig(FSDPConfig, MegatronConfig):
    """Placement, precision and parallel layout; the Megatron keys count with `strategy=megatron`."""

    strategy: str = choice("fsdp", *STRATEGIES)
    """`fsdp` and `fsdp2` (both: torch FSDP2), `megatron`."""
    ulysses_sequence_parallel_size: int = key(1, low=1)
    """Devices a sequence is split over."""
    use_torch_compile: bool = True
    """Compile the log-prob kernel where the platform can."""


@group
class SFTConfig(Root):
    """All keys of supervised fine-tuning."""

    entry: ClassVar[str] = "sft"
    data: SFTDataConfig = sub(SFTDataConfig)
    model: ModelConfig = sub(ModelConfig)
    engine: EngineConfig = sub(EngineConfig)
    optim: SFTOptimConfig = sub(SFTOptimConfig)
    checkpoint: CheckpointConfig = sub(CheckpointConfig)
    trainer: SFTTrainerConfig = sub(SFTTrainerConfig)
    profiler: RoleProfilerConfig = sub(RoleProfilerConfig)
    global_profiler: GlobalProfilerConfig = sub(GlobalProfilerConfig)
    ray_kwargs: RayConfig = sub(RayConfig)
