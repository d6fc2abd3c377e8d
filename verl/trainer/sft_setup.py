"""What supervised training is built of: data, rows as trajectories, cross-entropy as the loss, and the engine of one
device or of this rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from verl.config.layout import policy_placement
from verl.engine.registry import TRAINING_ENGINES
from verl.trajectory import Prompt, Trajectory

if TYPE_CHECKING:
    import torch

    from verl.config import SFTConfig
    from verl.data.sft import SFTDataset, SFTRow
    from verl.engine.training.base import MicroBatch, TrainingEngine
    from verl.trainer.sft_ranks import Ranks


def engine_settings(config: SFTConfig) -> dict[str, Any]:
    """The SFT keys under the names that the training engine reads from a role."""
    data = config.data
    return {
        **config.engine,
        "ppo_micro_batch_size_per_gpu": data.micro_batch_size_per_gpu,
        "use_dynamic_bsz": data.use_dynamic_bsz,
        "ppo_max_token_len_per_gpu": data.max_token_len_per_gpu,
        "use_prefix_grouper": False,
        "grad_clip": config.optim.grad_clip,
        "optim": config.optim,
        "checkpoint": config.checkpoint,
    }


def open_data(
    config: SFTConfig, tokenizer: Any, tracking: Any, processor: Any = None
) -> tuple[SFTDataset, SFTDataset | None]:
    """Training rows, and validation rows or None; `data.custom_cls` may replace the class. processor: of a model that
    sees images."""
    from verl.data.load_object import load_extern_object
    from verl.data.sft import SFTDataset

    data, kind = config.data, SFTDataset
    if data.custom_cls.path:
        kind = load_extern_object(data.custom_cls.path, str(data.custom_cls.name))
    files = config.as_written("data.train_files")
    train = kind(files, tokenizer, data, processor, max_samples=data.train_max_samples)
    validation = None
    if data.val_files:
        files = config.as_written("data.val_files")
        validation = kind(files, tokenizer, data, processor, max_samples=data.val_max_samples)
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
        "idles": False,
        "placement": policy_placement(config),
    }
    build = TRAINING_ENGINES.named(config.engine.strategy).build
    if ranks.size == 1:
        return build(str(config.model.path), device=config.trainer.device, **settings)
    from verl.engine.training.process_group import init_from_environment
    from verl.platform import detect

    platform = detect(config.trainer.device, ranks.local + 1)
    index = 0 if platform.on_host else ranks.local
    platform.select(index)
    init_from_environment(platform)
    return build(str(config.model.path), device=platform, device_index=index, **settings)


def as_trajectory(row: SFTRow, uid: str) -> Trajectory:
    """A row for the engine: prompt up to the first learned token (at least one), response up to the last."""
    learned = np.flatnonzero(row.mask[1:]) + 1
    start, stop = int(learned[0]), int(learned[-1]) + 1
    response = row.ids[start:stop]
    return Trajectory(
        prompt=Prompt(uid=uid, ids=row.ids[:start], messages=None, media=row.media),
        index=0,
        response_ids=response,
        response_mask=np.ones(len(response), bool),
        loss_mask=row.mask[start:stop],
    )


class CrossEntropy:
    """−Σ log p of the learned tokens / `total`, the learned tokens of the whole batch."""

    def __init__(self, total: int):
        self._total = total

    def __call__(self, micro: MicroBatch) -> tuple[torch.Tensor, dict[str, tuple[float, float]]]:
        import torch

        assert micro.log_probs is not None
        mask = np.concatenate([row.loss_mask for row in micro.rows])
        learned = micro.log_probs[torch.from_numpy(mask).to(micro.log_probs.device)]
        negative = -learned.sum()
        return negative / self._total, {"train/loss": (float(negative.detach()), float(learned.numel()))}
