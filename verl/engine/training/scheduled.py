"""What training engines with an optimizer have in common: settings, the update, adapters, the schedule of the learning
rate.

The loss arrives divided by counts of the whole mini-batch, so gradients are summed over ranks and micro-batches.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from verl.config.schema.base import setting
from verl.config.schema.training import OptimConfig
from verl.engine.training import lora
from verl.engine.training.base import LOG_PROBS, MicroLoss, TrainingEngine, TrainStepResult
from verl.engine.training.optimizer import LOSS_SCALES, Schedule, StepAccumulator
from verl.engine.training.packing import MicroBatching
from verl.engine.training.process_group import on_all_ranks
from verl.engine.training.weight_files import refuse_non_finite
from verl.platform import Platform, detect

if TYPE_CHECKING:
    from verl.trajectory import Segment


class ScheduledEngine(TrainingEngine):
    """A training engine whose subclass builds `_model`, and `_optimizer` from the settings `_optim` where it is
    trainable."""

    role: str
    device: torch.device
    #: Of the matrix products.
    compute_dtype: torch.dtype
    #: (optimizer, settings, number of training steps) → the schedule.
    _build_schedule: ClassVar[Any] = Schedule
    #: Its `adapter` is a `lora.Adapter` or None.
    _model: Any
    _optimizer: Any = None
    _optim: OptimConfig

    def _take_device(self, device: str | Platform, index: int, seed: int, *, deterministic: bool = False) -> None:
        self.platform = detect(device) if isinstance(device, str) else device
        self.platform.prepare()
        if deterministic:
            self.platform.be_deterministic()
        self.device = self.platform.device(index)
        self.platform.select(index)
        self.platform.seed(seed)

    def _read_settings(self, role_cfg: Any, log_prob_cfg: Any) -> None:
        """What the configuration says about passes and steps of any engine."""
        self._replays = setting(role_cfg, "router_replay.mode", "disabled") != "disabled"
        self.update_batching = self._micro_batching(role_cfg, role_cfg, "ppo")
        group = role_cfg if log_prob_cfg is None else log_prob_cfg
        prefix = "ppo" if setting(group, "log_prob_max_token_len_per_gpu") is None else "log_prob"
        self.forward_batching = self._micro_batching(role_cfg, group, prefix)
        self._adapter_only = bool(setting(role_cfg, "checkpoint.save_lora_only", False))
        self._grad_clip = setting(role_cfg, "grad_clip", 1.0)

    @abstractmethod
    def _micro_batching(self, role_cfg: Any, group: Any, prefix: str) -> MicroBatching:
        """The micro-batches that the `{prefix}_…` keys of the group ask for."""

    # -- update ----------------------------------------------------------------------------------------------

    def step(
        self, rows: Sequence[Segment], loss: MicroLoss, outputs: Collection[str] = LOG_PROBS, *, temperature: float
    ) -> TrainStepResult:
        """See `TrainingEngine.step`. Metrics hold `{role}/grad_norm` (before clipping) beside the loss's own.

        In float16 the largest scale with which nothing overflows is found anew in each step: what a run does then
        depends on nothing before it.
        """
        self._require_optimizer()
        for scale in LOSS_SCALES if self.compute_dtype == torch.float16 else (1.0,):
            total, norm = self._accumulate(rows, loss, outputs, temperature, scale)
            if total.refused or math.isfinite(norm):
                break
        norm /= scale
        if not total.refused and not math.isfinite(norm):
            total.refused = f"the gradient norm is {norm}"
        metrics = {} if total.refused else total.metrics()
        if not total.refused:
            clips = self._grad_clip is not None and 0 < self._grad_clip < norm
            factor = (self._grad_clip / (norm + 1e-6) if clips else 1.0) / scale
            if factor != 1.0:
                self._multiply_gradients(factor)
            self._update_weights()
        derivative = None if total.scale_derivative is None else total.scale_derivative / scale
        return TrainStepResult(
            metrics | {f"{self.role}/grad_norm": norm}, norm, total.refused, total.tokens, derivative
        )

    @abstractmethod
    def _accumulate(
        self, rows: Sequence[Segment], loss: MicroLoss, outputs: Collection[str], temperature: float, scale: float
    ) -> tuple[StepAccumulator, float]:
        """Gradients of scale · loss in the place of those before. What all ranks' micro-batches came to, and the norm
        of all gradients (NaN for a refused step)."""

    @abstractmethod
    def _multiply_gradients(self, factor: float) -> None:
        """Multiply the gradients that `_update_weights` takes."""

    @abstractmethod
    def _update_weights(self) -> None:
        """One step of the optimizer."""

    def _count_changed_routes(self, total: StepAccumulator, changed: torch.Tensor) -> None:
        valid = changed[changed >= 0]
        total.add({f"{self.role}/router_replay/changed_frac": (float(valid.sum()), len(valid))})

    def _require_optimizer(self) -> Any:
        if self._optimizer is None:
            raise RuntimeError(f"the {self.role} engine was built with trainable=False")
        return self._optimizer

    def schedule(self, total_steps: int) -> None:
        """See `TrainingEngine.schedule`."""
        self._schedule = self._build_schedule(self._require_optimizer(), self._optim, total_steps)

    def advance(self) -> float:
        """See `TrainingEngine.advance`."""
        self._require_optimizer()
        return float(self._schedule.advance())

    # -- weights ---------------------------------------------------------------------------------------------

    @property
    def adapted(self) -> bool:
        """See `TrainingEngine.adapted`."""
        return self._model.adapter is not None

    def without_adapter(self) -> AbstractContextManager[None]:
        """See `TrainingEngine.without_adapter`."""
        return super().without_adapter() if self._model.adapter is None else self._model.adapter.off()

    def fill_adapter(self, value: float, layers: Collection[str] | None = None) -> list[str]:
        """See `TrainingEngine.fill_adapter`."""
        return self._model.adapter.fill(value, layers) if self._model.adapter is not None else []

    def _follows_routes(self) -> bool:
        """Without its adapter the model is the reference, which is nobody else's routes."""
        return self._replays and (self._model.adapter is None or self._model.adapter.is_on)

    @torch.no_grad()
    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.adapter_weights`; float32, every rank gets every tensor."""
        if self._model.adapter is not None:
            yield from self._model.adapter.tensors()

    def save_weights(self, directory: Path) -> None:
        """See `TrainingEngine.save_weights`; float32, each rank writes a share of the safetensors files."""
        directory, adapter = Path(directory), self._model.adapter
        for module in self._modules():
            refuse_non_finite(module)
        if adapter is not None:
            adapter.save(directory)
        if adapter is None or not self._adapter_only:
            self._write_weights(directory)

    def load_weights(self, directory: Path) -> None:
        """See `TrainingEngine.load_weights`; whatever the layout that wrote it. In place: tensors that are shared with
        a sampler stay shared."""
        directory = Path(directory)
        if self._model.adapter is not None:
            self._model.adapter.load(directory)
        else:
            on_all_ranks(lambda: lora.refuse_adapter_checkpoint(directory))
            self._read_weights(directory)

    @abstractmethod
    def _modules(self) -> Sequence[torch.nn.Module]:
        """What has this rank's weights."""

    @abstractmethod
    def _write_weights(self, directory: Path) -> None: ...

    @abstractmethod
    def _read_weights(self, directory: Path) -> None: ...
