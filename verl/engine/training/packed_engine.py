"""What every engine of ours shares: packs through the model, the loss, one optimizer step.

    rows ── split_rows ──▶ micro-batches ── pack ──▶ body ──▶ hidden states ──▶ log-probs ──▶ loss ──▶ backward
                             one after the other; gradients add up                │
                                                          then: finite? clip, one optimizer step

How the weights are kept (whole, sharded), and how ranks agree, is the subclass's: see `LocalEngine` and `FSDPEngine`.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.engine.training.base import MicroBatch, MicroLoss, StepResult, TokenStats, TrainingEngine
from verl.engine.training.fuse import FusedForwards
from verl.engine.training.log_prob import Head, TokenTensors
from verl.engine.training.log_prob_head import LogProbHead, tensors
from verl.engine.training.offload import Offloading
from verl.engine.training.optimizer import OptimizerSettings, Schedule, build_optimizer, clip_gradients
from verl.engine.training.packing import Pack, pack, split_rows
from verl.engine.training.settings import compute_dtype, micro_batching, preferred_tokens, read
from verl.errors import UserError
from verl.models import attention
from verl.models import load as models
from verl.models.layers import is_recurrent
from verl.platform import Platform, detect

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl.engine.training.lora import Adapter
    from verl.trajectory import Trajectory

# Share of free memory that the activations of one micro-batch may take before layers are recomputed instead.
_ACTIVATION_SHARE = 0.4

# What the loss is multiplied with before the backward pass of float16, whose smallest numbers are far above the parts of a
# loss over 10⁵ tokens; the next one is tried where the gradients overflow. Powers of two change no other bit.
_LOSS_SCALES = (2.0**16, 2.0**12, 2.0**8, 2.0**4, 1.0)


@dataclass(slots=True)
class StepAccumulator:
    """What the micro-batches of a step came to: metrics as name → [sum, weight], tokens computed, and why the step
    must be refused ("" if it need not be)."""

    sums: dict[str, list[float]] = field(default_factory=dict)
    tokens: int = 0
    refused: str = ""

    def add(self, metrics: Mapping[str, tuple[float, float]]) -> None:
        for name, (total, weight) in metrics.items():
            entry = self.sums.setdefault(name, [0.0, 0.0])
            entry[0] += total
            entry[1] += weight


class PackedEngine(TrainingEngine):
    """See the module. A subclass loads `module`, wraps it in `scorer`, and calls `_place`, `_read_settings` and,
    if it trains, `_prepare_training` in this order."""

    module: PreTrainedModel
    scorer: LogProbHead
    _fused: FusedForwards
    _offloading = Offloading()
    _parameters: list[torch.nn.Parameter]
    _names: dict[str, torch.nn.Parameter]

    def _place(
        self, device: str | Platform, role_cfg: Any, *, role: str, trainable: bool, seed: int, index: int = 0
    ) -> None:
        """Choose the device and seed it."""
        self.platform = detect(device) if isinstance(device, str) else device
        self.platform.prepare()
        if read(role_cfg, "fsdp_config.full_determinism", False):
            self.platform.be_deterministic()
        self.device, self._index = self.platform.device(index), index
        self.role, self.trainable = role, trainable
        self.platform.seed(seed)
        self.compute_dtype = compute_dtype(role_cfg, self.platform)
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Schedule | None = None

    def _read_settings(self, model_cfg: Any, role_cfg: Any, log_prob_cfg: Any, devices: int = 1) -> None:
        """Everything the configuration says about passes and steps. A sequence lies on so many `devices`."""
        share = read(role_cfg, "use_prefix_grouper")
        preferred = preferred_tokens(self.platform, models.activation_bytes(self.config, 1))
        updates = micro_batching(role_cfg, "ppo", share_prompt=share, preferred=preferred)
        if log_prob_cfg is None and read(role_cfg, "log_prob_max_token_len_per_gpu") is not None:
            log_prob_cfg = role_cfg
        passes = updates
        if log_prob_cfg is not None:
            passes = micro_batching(log_prob_cfg, "log_prob", share_prompt=share, preferred=preferred)
        updates = replace(updates, tokens=updates.tokens * devices)
        passes = replace(passes, tokens=passes.tokens * devices)
        if is_recurrent(self.module):
            updates, passes = replace(updates, one_by_one=True), replace(passes, one_by_one=True)
        self.update_batching, self.forward_batching = updates, passes
        self._heads = int(self.config.get_text_config().num_attention_heads)
        self._checkpointing: bool | None = read(model_cfg, "enable_gradient_checkpointing")
        self._squares = bool(read(role_cfg, "calculate_sum_pi_squared", False))
        self._adapter_only = bool(read(role_cfg, "checkpoint.save_lora_only", False))
        self._grad_clip = read(role_cfg, "grad_clip", 1.0)

    def _prepare_training(self, role_cfg: Any) -> None:
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._names = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        self._settings = OptimizerSettings.of(read(role_cfg, "optim"))
        self._optimizer = build_optimizer(self._parameters, self._settings)
        self._layers = models.checkpoint_layers(self.module)
        if not self.module.supports_gradient_checkpointing:
            if self._checkpointing:
                raise UserError(
                    f"model.enable_gradient_checkpointing=True: {type(self.module).__name__} cannot recompute its layers; "
                    "set it to False"
                )
            self._checkpointing = False
        if self._checkpointing is not False and self._layers:
            options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": _recompute_contexts}
            self.module.gradient_checkpointing_enable(options)
            models.switch_off_dropout(self._layers)
        self.schedule(1)

    @property
    def config(self) -> Any:
        """The Hugging Face configuration of the model."""
        return self.module.config

    # -- adapters --------------------------------------------------------------------------------------------

    _adapter: Adapter | None = None
    _adapter_only = False

    @property
    def adapted(self) -> bool:
        """See `TrainingEngine.adapted`."""
        return self._adapter is not None

    def without_adapter(self) -> AbstractContextManager[None]:
        """See `TrainingEngine.without_adapter`."""
        return super().without_adapter() if self._adapter is None else self._adapter.off()

    @property
    def _head(self) -> Head | None:
        return self.scorer.head

    # -- what ranks agree on: here there is one --------------------------------------------------------------

    _alone = True

    def _agreed_count(self, micro_batches: int) -> int:
        """The number of micro-batches that every rank runs, at least this rank's own."""
        return micro_batches

    def _free_memory(self) -> int:
        """Bytes that decide whether layers are recomputed."""
        return self.platform.room(self._index)

    def _before_micro_batch(self, last: bool) -> None:
        """Called before the forward pass of a micro-batch of a step."""

    def _after_passes(self) -> None:
        """Called after the last pass of `log_probs` or `step`."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Make all gradients zero."""

    @abstractmethod
    def _conclude(self, tally: StepAccumulator) -> tuple[StepAccumulator, float]:
        """The tally of all ranks, and the norm of all gradients (NaN for a refused step)."""

    def _gradients(self) -> list[torch.Tensor]:
        """The gradients to scale, this rank's share."""
        return [p.grad for p in self._parameters if p.grad is not None]

    # -- forward ---------------------------------------------------------------------------------------------

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _forward(self, batch: Pack, temperature: float, entropy: bool, squares: bool) -> TokenTensors:
        """Statistics of the pack's response tokens, float32 [R]."""
        if not batch.targets.numel():
            empty = torch.zeros(0, device=self.device, requires_grad=torch.is_grad_enabled())
            return TokenTensors(empty, empty if entropy else None, empty if squares else None)
        with self._autocast(), attention.use(batch.plan(self._heads)):
            return tensors(
                self.scorer(
                    self.scorer.stats,
                    batch.input_ids,
                    batch.positions,
                    batch.source,
                    batch.targets,
                    temperature=temperature,
                    entropy=entropy,
                    squares=squares,
                )
            )

    @torch.no_grad()
    def log_probs(
        self, rows: Sequence[Trajectory], *, temperature: float, entropy: bool = False
    ) -> TokenStats:
        """See `TrainingEngine.log_probs`; Σπ² too where `calculate_sum_pi_squared` asks for it."""
        parts: list[TokenTensors] = []
        chunks = split_rows(rows, self.forward_batching)
        with self._fused.active():
            for number in range(self._agreed_count(len(chunks))):
                chunk = chunks[number] if number < len(chunks) else []
                batch = pack(chunk, self.forward_batching, self.device)
                parts.append(self._forward(batch, temperature, entropy, self._squares))
        self._after_passes()

        def join(found: list[torch.Tensor]) -> np.ndarray:
            return torch.cat(found).cpu().numpy() if found else np.zeros(0, np.float32)

        return TokenStats(
            join([p.log_probs for p in parts]),
            join([p.entropy for p in parts]) if entropy else None,  # type: ignore[misc]
            join([p.sum_pi_squared for p in parts]) if self._squares else None,  # type: ignore[misc]
        )

    # -- update ----------------------------------------------------------------------------------------------

    def step(
        self, rows: Sequence[Trajectory], loss: MicroLoss, *, temperature: float, entropy: bool = False
    ) -> StepResult:
        """See `TrainingEngine.step`. Metrics hold `{role}/grad_norm` (before clipping) beside the loss's own."""
        optimizer = self._require_optimizer()
        tally, norm = self._scaled_gradients(rows, loss, temperature, entropy)
        if not tally.refused and not math.isfinite(norm):
            tally.refused = f"the gradient norm is {norm}"
        logged = {f"{self.role}/grad_norm": norm}
        if tally.refused:
            self._clear_gradients()
            return StepResult(logged, norm, tally.refused, tally.tokens)
        clip_gradients(self._gradients(), norm, self._grad_clip)
        optimizer.step()
        logged = {
            n: total / weight if weight else total for n, (total, weight) in tally.sums.items()
        } | logged
        return StepResult(logged, norm, "", tally.tokens)

    _scale = 1.0

    def _scaled_gradients(
        self, rows: Sequence[Trajectory], loss: MicroLoss, temperature: float, entropy: bool
    ) -> tuple[StepAccumulator, float]:
        """The step's gradients, this rank's share, and what `_conclude` says of them. In float16 the largest scale with
        which nothing overflows is found anew in each step: what a run does then depends on nothing before it."""
        for scale in _LOSS_SCALES if self.compute_dtype == torch.float16 else (1.0,):
            self._scale = scale
            self._clear_gradients()
            tally, norm = self._conclude(self._accumulate(rows, loss, temperature, entropy))
            if tally.refused or math.isfinite(norm):
                break
        if scale != 1.0:
            torch._foreach_mul_(self._gradients(), 1.0 / scale)
        return tally, norm / scale

    def _accumulate(
        self, rows: Sequence[Trajectory], loss: MicroLoss, temperature: float, entropy: bool
    ) -> StepAccumulator:
        """Forward and backward of all micro-batches. A loss that is not finite ends it, where no rank waits."""
        tally = StepAccumulator()
        chunks = split_rows(rows, self.update_batching)
        count = self._agreed_count(len(chunks))
        for number in range(count):
            self._before_micro_batch(last=number + 1 == count)
            chunk = chunks[number] if number < len(chunks) else []
            batch = pack(chunk, self.update_batching, self.device)
            tally.tokens += batch.size
            value, metrics = self._micro_step(batch, loss, temperature, entropy)
            if not math.isfinite(value):
                tally.refused = (
                    tally.refused or f"the loss of micro-batch {number} is {value} ({_name_rows(chunk)})"
                )
                if self._alone:
                    break
            tally.add(metrics)
        self._after_passes()
        return tally

    def _micro_step(
        self, batch: Pack, loss: MicroLoss, temperature: float, entropy: bool
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Forward and backward of one pack; gradients are added to what is there."""
        with self._fused.active(), self._recomputing(batch.size):
            stats = self._forward(batch, temperature, entropy, False)
            scalar, metrics = loss(MicroBatch(batch.rows, stats.log_probs, stats.entropy))
            value = float(scalar.detach())
            if math.isfinite(value) and scalar.requires_grad:
                scalar.backward(torch.full_like(scalar, self._scale))
        return value, metrics

    @contextmanager
    def _recomputing(self, tokens: int) -> Iterator[None]:
        """Recompute layers in the backward pass of this block if asked for, or if memory asks for it.

        transformers looks at each layer's own `training` flag. Nothing below it is told, so dropout stays off there;
        a layer's own was switched off for good.
        """
        wanted = self._checkpointing
        if wanted is None:
            wanted = models.activation_bytes(self.config, tokens) > _ACTIVATION_SHARE * self._free_memory()
        layers = self._layers if wanted else []
        try:
            for layer in layers:
                layer.training = True
            yield
        finally:
            for layer in layers:
                layer.training = False

    def _require_optimizer(self) -> torch.optim.Optimizer:
        if self._optimizer is None:
            raise RuntimeError(f"the {self.role} engine was built with trainable=False")
        return self._optimizer

    def offload(self) -> None:
        """See `TrainingEngine.offload`; gradients are given back, not kept."""
        if not self._offloading:
            return
        for parameter in self._parameters if self._optimizer is not None else ():
            parameter.grad = None
        self._offloading.away(self.scorer, self._optimizer)
        self.platform.empty_cache()

    def onload(self, *, optimizer: bool = False) -> None:
        """See `TrainingEngine.onload`."""
        self._offloading.back(self.scorer, self._optimizer if optimizer else None, self.device)

    def release_cached_memory(self) -> None:
        """See `TrainingEngine.release_cached_memory`. A processor's heap is kept: new pages cost more than they are worth to others."""
        if not self.platform.on_host:
            self.platform.empty_cache()

    def schedule(self, total_steps: int) -> None:
        """See `TrainingEngine.schedule`."""
        self._schedule = Schedule(self._require_optimizer(), self._settings, total_steps)

    def advance(self) -> float:
        """See `TrainingEngine.advance`."""
        self._require_optimizer()
        assert self._schedule is not None
        return self._schedule.advance()


def _recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed layer: the second runs in the backward pass, when the plan is long gone."""
    return nullcontext(), attention.use(attention.current())


def _name_rows(rows: Sequence[Trajectory]) -> str:
    uids = list(dict.fromkeys(r.uid for r in rows))
    return f"prompts {', '.join(uids[:4])}{', …' if len(uids) > 4 else ''}"


def serving_dtype(path: str | Path | None, model_cfg: Any) -> str:
    """The data type that the source directory names for serving; bfloat16 where it names none."""
    if path is None:
        return "bfloat16"
    named = getattr(models.load_config(path, model_cfg), "dtype", None)
    return str(named).removeprefix("torch.") if named is not None else "bfloat16"
