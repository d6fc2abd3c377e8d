"""The training engine of one process and one device.

    rows ── split_rows ──▶ micro-batches ── pack ──▶ body ──▶ hidden states ──▶ log-probs ──▶ loss ──▶ backward
                             one after the other; gradients add up                │
                                                          then: finite? clip, one optimizer step

Weights and gradients are float32; matrix products run in the compute data type (autocast). Gradient buffers are
made once and cleared in place. `module` is the Hugging Face model itself: a sampler in this process reads the
very tensors that the optimizer writes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from verl.engine import attention
from verl.engine.training import model as models
from verl.engine.training.base import MicroBatch, MicroLoss, StepResult, TokenStats, TrainingEngine
from verl.engine.training.fuse import FusedForwards
from verl.engine.training.log_prob import TokenTensors, stats_of_logits, token_stats
from verl.engine.training.optimizer import (
    OptimizerSettings,
    Schedule,
    build_optimizer,
    clip_gradients,
    global_norm,
)
from verl.engine.training.optimizer_state import load_state, save_state
from verl.engine.training.packing import Pack, pack, split_rows
from verl.engine.training.settings import compute_dtype, micro_batching, preferred_tokens, read
from verl.platform import Platform, detect

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from verl.trajectory import Trajectory

# Share of free memory that the activations of one micro-batch may take before layers are recomputed instead.
_ACTIVATION_SHARE = 0.4


class LocalEngine(TrainingEngine):
    """See the module. `role_cfg` is the actor, reference or SFT group; absent keys take their defaults.

    log_prob_cfg  group with the `log_prob_*` micro-batch keys (the rollout group for an actor); None: role_cfg
    trainable     False builds no gradients and no optimizer
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
    ):
        self.platform = detect(device) if isinstance(device, str) else device
        self.platform.prepare()
        self.device = self.platform.device()
        self.role, self.trainable = role, trainable
        self.platform.seed(seed)
        loaded = module is None
        if module is None:
            if model_path is None:
                raise ValueError("give model_path or module")
            module = models.load_model(model_path, model_cfg)
        else:
            attention.register()
            models.check_supported(module, model_path or type(module).__name__)
            module.set_attn_implementation(attention.IMPLEMENTATION)
        self._serving_dtype = _serving_dtype(module, model_path, model_cfg)
        module.to(self.device)  # type: ignore[arg-type]
        self.module = module.eval()
        self.config = self.module.config
        self.compute_dtype = compute_dtype(role_cfg, self.platform)
        self._read_settings(model_cfg, role_cfg, log_prob_cfg)
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: Schedule | None = None
        if loaded:
            self.module.requires_grad_(trainable)
        if trainable:
            self._prepare_training(role_cfg)

    @classmethod
    def from_module(cls, module: PreTrainedModel, **options: Any) -> LocalEngine:
        """Around a model that is already built; its tensors and their requires_grad are used as they are."""
        return cls(module=module, **options)

    def _read_settings(self, model_cfg: Any, role_cfg: Any, log_prob_cfg: Any) -> None:
        share = read(role_cfg, "use_prefix_grouper")
        preferred = preferred_tokens(self.platform, models.activation_bytes(self.config, 1))
        updates = micro_batching(role_cfg, "ppo", share_prompt=share, preferred=preferred)
        if log_prob_cfg is None and read(role_cfg, "log_prob_max_token_len_per_gpu") is not None:
            log_prob_cfg = role_cfg
        passes = updates
        if log_prob_cfg is not None:
            passes = micro_batching(log_prob_cfg, "log_prob", share_prompt=share, preferred=preferred)
        if models.is_recurrent(self.module):
            updates, passes = replace(updates, one_by_one=True), replace(passes, one_by_one=True)
        self.update_batching, self.forward_batching = updates, passes
        wants_fused = read(model_cfg, "use_fused_kernels") is not False
        self._head = models.find_head(self.module) if wants_fused else None
        self._fused = FusedForwards(self.module)
        self._heads = int(self.config.get_text_config().num_attention_heads)
        self._checkpointing: bool | None = read(model_cfg, "enable_gradient_checkpointing")
        self._squares = bool(read(role_cfg, "calculate_sum_pi_squared", False))
        self._grad_clip = read(role_cfg, "grad_clip", 1.0)

    def _prepare_training(self, role_cfg: Any) -> None:
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        self._names = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._settings = OptimizerSettings.of(read(role_cfg, "optim"))
        self._optimizer = build_optimizer(self._parameters, self._settings)
        self._layers = models.checkpoint_layers(self.module)
        if self._checkpointing is not False and self._layers:
            options = {"use_reentrant": False, "preserve_rng_state": False, "context_fn": _recompute_contexts}
            self.module.gradient_checkpointing_enable(options)
            models.switch_off_dropout(self._layers)
        self.schedule(1)

    # -- forward -------------------------------------------------------------------------------------------

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.compute_dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.compute_dtype)

    def _forward(self, batch: Pack, temperature: float, entropy: bool, squares: bool) -> TokenTensors:
        """Statistics of the pack's response tokens, float32 [R]."""
        if not batch.targets.numel():
            empty = torch.zeros(0, device=self.device, requires_grad=torch.is_grad_enabled())
            return TokenTensors(empty, empty if entropy else None, empty if squares else None)
        inputs = {
            "input_ids": batch.input_ids[None],
            "position_ids": batch.positions[None],
            "use_cache": False,
        }
        with self._autocast(), attention.use(batch.plan(self._heads)):
            if self._head is None:
                logits = self.module(**inputs).logits[0][batch.source].float() / temperature
                return stats_of_logits(logits, batch.targets, entropy, squares)
            hidden = models.body(self.module)(**inputs).last_hidden_state[0]
            return token_stats(
                hidden.index_select(0, batch.source),
                batch.targets,
                self._head,
                temperature=temperature,
                entropy=entropy,
                sum_pi_squared=squares,
            )

    @torch.no_grad()
    def log_probs(
        self, rows: Sequence[Trajectory], *, temperature: float, entropy: bool = False
    ) -> TokenStats:
        """See `TrainingEngine.log_probs`; Σπ² too where `calculate_sum_pi_squared` asks for it."""
        parts: list[TokenTensors] = []
        with self._fused.active():
            for chunk in split_rows(rows, self.forward_batching):
                batch = pack(chunk, self.forward_batching, self.device)
                parts.append(self._forward(batch, temperature, entropy, self._squares))

        def join(tensors: list[torch.Tensor]) -> np.ndarray:
            return torch.cat(tensors).cpu().numpy() if tensors else np.zeros(0, np.float32)

        return TokenStats(
            join([p.log_probs for p in parts]),
            join([p.entropy for p in parts]) if entropy else None,  # type: ignore[misc]
            join([p.sum_pi_squared for p in parts]) if self._squares else None,  # type: ignore[misc]
        )

    # -- update --------------------------------------------------------------------------------------------

    def step(
        self, rows: Sequence[Trajectory], loss: MicroLoss, *, temperature: float, entropy: bool = False
    ) -> StepResult:
        """See `TrainingEngine.step`. Metrics hold `{role}/grad_norm` (before clipping) beside the loss's own."""
        optimizer = self._require_optimizer()
        torch._foreach_zero_([p.grad for p in self._parameters])
        sums: dict[str, list[float]] = {}
        tokens = 0
        for number, chunk in enumerate(split_rows(rows, self.update_batching)):
            batch = pack(chunk, self.update_batching, self.device)
            tokens += batch.size
            value, metrics = self._micro_step(batch, loss, temperature, entropy)
            if not math.isfinite(value):
                return self._refuse(
                    f"the loss of micro-batch {number} is {value} ({_name_rows(chunk)})", tokens
                )
            for name, (total, weight) in metrics.items():
                entry = sums.setdefault(name, [0.0, 0.0])
                entry[0] += total
                entry[1] += weight
        norm = float(global_norm(self._parameters))
        if not math.isfinite(norm):
            return self._refuse(f"the gradient norm is {norm}", tokens, norm)
        clip_gradients(self._parameters, norm, self._grad_clip)
        optimizer.step()
        logged = {name: total / weight if weight else total for name, (total, weight) in sums.items()}
        logged[f"{self.role}/grad_norm"] = norm
        return StepResult(logged, norm, "", tokens)

    def _micro_step(
        self, batch: Pack, loss: MicroLoss, temperature: float, entropy: bool
    ) -> tuple[float, dict[str, tuple[float, float]]]:
        """Forward and backward of one pack; gradients are added to the buffers."""
        with self._fused.active(), self._recomputing(batch.size):
            stats = self._forward(batch, temperature, entropy, False)
            scalar, metrics = loss(MicroBatch(batch.rows, stats.log_probs, stats.entropy))
            value = float(scalar.detach())
            if math.isfinite(value) and scalar.requires_grad:
                scalar.backward()
        return value, metrics

    def _refuse(self, why: str, tokens: int, norm: float = math.nan) -> StepResult:
        torch._foreach_zero_([p.grad for p in self._parameters])
        return StepResult({f"{self.role}/grad_norm": norm}, norm, why, tokens)

    @contextmanager
    def _recomputing(self, tokens: int) -> Iterator[None]:
        """Recompute layers in the backward pass of this block if asked for, or if memory asks for it.

        transformers looks at each layer's own `training` flag. Nothing below it is told, so dropout stays off there;
        a layer's own was switched off for good.
        """
        wanted = self._checkpointing
        if wanted is None:
            free, _ = self.platform.memory()
            wanted = models.activation_bytes(self.config, tokens) > _ACTIVATION_SHARE * free
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

    def schedule(self, total_steps: int) -> None:
        """See `TrainingEngine.schedule`."""
        self._schedule = Schedule(self._require_optimizer(), self._settings, total_steps)

    def advance(self) -> float:
        """See `TrainingEngine.advance`."""
        self._require_optimizer()
        assert self._schedule is not None
        return self._schedule.advance()

    # -- weights and state ---------------------------------------------------------------------------------

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainingEngine.named_weights`; float32."""
        yield from models.checkpoint_names(self.module)

    def save_weights(self, directory: Path) -> None:
        """See `TrainingEngine.save_weights`; float32, one or more safetensors files."""
        models.save_model(self.module, Path(directory), self._serving_dtype)

    @torch.no_grad()
    def load_weights(self, directory: Path) -> None:
        """See `TrainingEngine.load_weights`. In place: tensors shared with a sampler stay shared."""
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


def _recompute_contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts of a checkpointed layer: the second runs in the backward pass, when the plan is long gone."""
    return nullcontext(), attention.use(attention.current())


def _name_rows(rows: Sequence[Trajectory]) -> str:
    uids = list(dict.fromkeys(r.uid for r in rows))
    return f"prompts {', '.join(uids[:4])}{', …' if len(uids) > 4 else ''}"


def _serving_dtype(module: PreTrainedModel, path: str | Path | None, model_cfg: Any) -> str:
    """The data type that the source directory names for serving; bfloat16 where it names none."""
    if path is None:
        return "bfloat16"
    named = getattr(models.load_config(path, model_cfg), "dtype", None)
    return str(named).removeprefix("torch.") if named is not None else "bfloat16"
