"""The training engine of one process and one device.

Weights and gradients are float32; matrix products run in the compute data type (autocast). Gradient buffers are
made once and cleared in place. `module` is the Hugging Face model itself: a sampler in this process reads the
very tensors that the optimizer writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.config.adapter_files import ADAPTER_FOLDER
from verl.engine.training import sharded_state
from verl.engine.training.fuse import FusedForwards
from verl.engine.training.log_prob_head import LogProbHead
from verl.engine.training.lora import AdapterSource, inject, refuse_adapter_checkpoint
from verl.engine.training.lora_config import LoraSettings
from verl.engine.training.offload import Offloading
from verl.engine.training.optimizer import global_norm
from verl.engine.training.optimizer_state import load_state, save_state
from verl.engine.training.packed_engine import PackedEngine, StepAccumulator, serving_dtype
from verl.engine.training.settings import read
from verl.models import attention, positions
from verl.models import load as models
from verl.models.adapters import PlainView
from verl.models.flops import model_cost
from verl.platform import Platform

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl.tracking.mfu import ModelCost


class LocalEngine(PackedEngine):
    """See the module. `role_cfg` is the actor, reference or SFT group; absent keys take their defaults.

    log_prob_cfg  group with the `log_prob_*` micro-batch keys (the rollout group for an actor); None: role_cfg
    trainable     False builds no gradients and no optimizer
    longest       most tokens of a sequence of the run, for frequencies that depend on it (`verl.models.positions`)
    shared        a sampler of this process works on the same tensors: `fsdp_config.param_offload` leaves them alone
    """

    def __init__(
        self,
        model_path: str | Path | None = None,
        *,
        module: PreTrainedModel | None = None,
        model_cfg: Any = None,
        role_cfg: Any = None,
        log_prob_cfg: Any = None,
        device: str | Platform = "auto",
        trainable: bool = True,
        seed: int = 0,
        role: str = "actor",
        longest: int | None = None,
        shared: bool = False,
    ):
        self._place(device, role_cfg, role=role, trainable=trainable, seed=seed)
        loaded = module is None
        if module is None:
            if model_path is None:
                raise ValueError("give model_path or module")
            module = models.load_model(model_path, model_cfg)
        else:
            attention.register()
            models.check_supported(module, model_path or type(module).__name__)
            module.set_attn_implementation(attention.IMPLEMENTATION)
        positions.settle(module, longest)
        self._serving_dtype = serving_dtype(model_path, model_cfg)
        module.to(self.device)  # type: ignore[arg-type]
        if loaded:
            models.allow_training(module, trainable)
        settings = LoraSettings.of(model_cfg, str(model_path)) if trainable else None
        if settings is not None:
            self._adapter = inject(module, settings)
            self._adapter.materialise(AdapterSource(module, settings, seed, None), self.device)
        self.module = module.eval()
        wants_fused = read(model_cfg, "use_fused_kernels") is not False
        self.scorer = LogProbHead(self.module, models.find_head(self.module) if wants_fused else None)
        self._fused = FusedForwards(self.module)
        self._read_settings(model_cfg, role_cfg, log_prob_cfg)
        self._offloading = Offloading.of(role_cfg, shared=shared)
        if trainable:
            self._prepare_training(role_cfg)

    @classmethod
    def from_module(cls, module: PreTrainedModel, **options: Any) -> LocalEngine:
        """Around a model that is already built; its tensors and their requires_grad are used as they are."""
        return cls(module=module, **options)

    def _prepare_training(self, role_cfg: Any) -> None:
        super()._prepare_training(role_cfg)
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        kept = self._gradients()
        if kept:
            torch._foreach_zero_(kept)
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _conclude(self, tally: StepAccumulator) -> tuple[StepAccumulator, float]:
        return tally, math.nan if tally.refused else float(global_norm(self._gradients()))

    def cost(self) -> ModelCost | None:
        """See `TrainingEngine.cost`."""
        return model_cost(self.module, self.platform, self.compute_dtype)

    # -- weights and state ---------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.named_weights`; float32."""
        yield from models.checkpoint_names(self.module)

    def adapter_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.adapter_weights`; float32."""
        return iter(()) if self._adapter is None else self._adapter.tensors()

    def save_weights(self, directory: Path) -> None:
        """See `TrainingEngine.save_weights`; float32, one or more safetensors files."""
        if self._adapter is None:
            models.save_model(self.module, Path(directory), self._serving_dtype)
            return
        models.refuse_non_finite(self.module.named_parameters())
        self._adapter.save(Path(directory) / ADAPTER_FOLDER, dict(self._adapter.tensors()))
        if not self._adapter_only:
            sharded_state.write_alone(self.module, Path(directory), self._serving_dtype)

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """See `TrainingEngine.load_weights`. In place: tensors shared with a sampler stay shared."""
        if self._adapter is not None:
            own = PlainView(self.module).adapter_state()
            for name, tensor in self._adapter.read(Path(directory) / ADAPTER_FOLDER).items():
                own[name].copy_(tensor)
            self._adapter.check_base(Path(directory))
            return
        refuse_adapter_checkpoint(directory)
        loaded = models.saved_tensors(self.module, directory)
        for name, tensor in self.module.state_dict().items():
            tensor.copy_(loaded[name])

    def save_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.save_optimizer`."""
        optimizer = self._require_optimizer()
        assert self._schedule is not None
        save_state(Path(directory), optimizer, self._names, self._schedule.step)

    def load_optimizer(self, directory: Path) -> None:
        """See `TrainingEngine.load_optimizer`."""
        step = load_state(Path(directory), self._require_optimizer(), self._names)
        assert self._schedule is not None
        self._schedule.restore(step)
