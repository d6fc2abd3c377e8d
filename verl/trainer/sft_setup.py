"""What supervised training is built of: data, and the engine of one device or of this rank."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from verl.config import SFTConfig
    from verl.data.sft import SFTDataset
    from verl.engine.training.base import TrainingEngine
    from verl.trainer.sft_ranks import Ranks


def engine_settings(config: SFTConfig) -> dict[str, Any]:
    """The SFT keys under the names that the training engine reads from a role."""
    data = config.data
    return {
        "ppo_micro_batch_size_per_gpu": data.micro_batch_size_per_gpu,
        "use_dynamic_bsz": data.use_dynamic_bsz,
        "ppo_max_token_len_per_gpu": data.max_token_len_per_gpu,
        "use_prefix_grouper": False,
        "ulysses_sequence_parallel_size": config.engine.ulysses_sequence_parallel_size,
        "grad_clip": config.optim.grad_clip,
        "optim": config.optim,
        "fsdp_config": _always_away(config.engine),
        "checkpoint": config.checkpoint,
    }


def _always_away(engine: Any) -> Any:
    """The engine group, `param_offload` as `offload_policy`: this role is never idle, so it means during the step."""
    return engine if not engine.param_offload else dataclasses.replace(engine, offload_policy=True)


def open_data(config: SFTConfig, tokenizer: Any, tracking: Any) -> tuple[SFTDataset, SFTDataset | None]:
    """Training rows, and validation rows or None; `data.custom_cls` may replace the class."""
    from verl.data.load_object import load_extern_object
    from verl.data.sft import SFTDataset

    data = config.data
    kind = (
        load_extern_object(data.custom_cls.path, str(data.custom_cls.name))
        if data.custom_cls.path
        else SFTDataset
    )
    train = kind(data.train_files, tokenizer, data, max_samples=data.train_max_samples)
    validation = None
    if data.val_files:
        validation = kind(data.val_files, tokenizer, data, max_samples=data.val_max_samples)
        validation.split = "val"
    tracking.data_report(train, validation)
    return train, validation


def build_engine(config: SFTConfig, ranks: Ranks) -> TrainingEngine:
    """The engine of one device, or this rank's part of the sharded one."""
    settings: dict[str, Any] = {
        "model_cfg": config.model,
        "role_cfg": engine_settings(config),
        "seed": config.trainer.seed,
        "longest": int(config.data.max_length),
        "role": "train",
    }
    from verl.engine.training import get_engine

    engine = get_engine(config.engine.strategy)
    if ranks.size == 1:
        return engine(config.model.path, device=config.trainer.device, **settings)
    from verl.engine.training.process_group import init_from_environment
    from verl.platform import detect

    platform = detect(config.trainer.device, ranks.local + 1)
    index = 0 if platform.on_host else ranks.local
    platform.select(index)
    init_from_environment(platform)
    return engine(config.model.path, device=platform, device_index=index, **settings)
